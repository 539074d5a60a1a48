"""The image's scripts, each run for real in a folder of its own; its packages, as far as apt knows them here."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.version import cuda as torch_cuda

from tests.dockerfile import read_dockerfile

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
PARTS = ("nvcc", "cudart-dev", "profiler-api", "libcublas-dev", "libcusparse-dev", "libcusolver-dev", "libcurand-dev")
NAMES = [f"{part if part.startswith('lib') else f'cuda-{part}'}-13-0" for part in PARTS]
PACKAGE = """\
Package: {name}
Version: 13.0.1-1
Architecture: amd64
Maintainer: a test
Filename: ./{name}.deb
Size: 1
SHA256: {digest}
Description: stands for one of NVIDIA's

"""
EFA_VERSION = "9.8.7"


def run(script: str, *words: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run a script of the image with further environment variables."""
    argv = [str(DOCKER / script), *words]
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    ("torch", "before", "said", "after"),
    [
        ("13.0", None, "is now ", "cuda-13.0"),
        ("13.0", "cuda-12.2", "is now ", "cuda-13.0"),
        ("12.8", "cuda-12.2", "built with CUDA 12.8; there is cuda-12.2 cuda-13.0\n", "cuda-12.2"),
        ("13.0", "a folder", "is no link; set CUDA_HOME=", "cuda"),
        (None, "cuda-12.2", "torch is built without CUDA", "cuda-12.2"),
    ],
)
def test_the_link_leads_to_the_cuda_of_torch(
    torch: str | None, before: str | None, said: str, after: str, tmp_path: Path
) -> None:
    """A /usr/local with CUDA 12.2 and 13.0, and a torch that says with which CUDA it was built."""
    prefix, package = tmp_path / "local", tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('nobody has to load torch')")
    (package / "version.py").write_text(f"cuda = {torch!r}")
    for version in ("12.2", "13.0"):
        (prefix / f"cuda-{version}" / "bin").mkdir(parents=True)
        (prefix / f"cuda-{version}" / "bin" / "nvcc").touch(0o755)
    if before == "a folder":
        (prefix / "cuda").mkdir()
    elif before is not None:
        (prefix / "cuda").symlink_to(before)
    done = run("use-cuda.sh", "--no-report", PREFIX=prefix, PYTHON=sys.executable, PYTHONPATH=package.parent)
    told = done.stdout if done.returncode == 0 else done.stderr
    assert said in told and told.count("\n") == 1
    assert (prefix / "cuda").resolve() == (prefix / after).resolve()
    assert sorted(path.name for path in prefix.iterdir()) == ["cuda", "cuda-12.2", "cuda-13.0"]


def test_the_session_command_ends_with_deepspeed_s_report(tmp_path: Path) -> None:
    if torch_cuda is not None:
        compiler = tmp_path / f"cuda-{torch_cuda}" / "bin" / "nvcc"
        compiler.parent.mkdir(parents=True)
        compiler.touch(0o755)
    done = run("use-cuda.sh", PREFIX=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed general environment info" in done.stdout and "cpu_adam" in done.stdout


class Signed:
    """An image's root, and a key that signs: for repositories like NVIDIA's and for AWS's installer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.gnupg = folder, folder / "root", folder / "gnupg"
        for made in ("etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
            (self.root / made).mkdir(parents=True)
        self.gnupg.mkdir(mode=0o700)
        (self.root / "status").touch()
        (self.root / "etc" / "os-release").write_text('ID=ubuntu\nVERSION_ID="24.04"\n')
        (self.root / "apt.conf").write_text(
            f'Dir "{self.root}/"; Dir::State::status "{self.root}/status"; APT::Architecture "amd64";\n'
            'Dir::Bin::methods "/usr/lib/apt/methods"; APT::Get::Simulate "true"; APT::Sandbox::User "root";\n'
        )
        self.gpg("--passphrase", "", "--quick-generate-key", "a test <test@example.org>", "ed25519", "sign", "never")
        self.key = self.gpg("--armor", "--export")
        listed = self.gpg("--with-colons", "--list-keys").decode()
        self.fingerprint = re.findall(r"^fpr:+(\w+):", listed, re.MULTILINE)[0]

    def gpg(self, *words: str) -> bytes:
        argv = ["gpg", "--homedir", str(self.gnupg), "--batch", "--quiet", *words]
        return subprocess.run(argv, capture_output=True, check=True, timeout=240).stdout

    def run(self, script: str, word: str, fault: str, **variables: object) -> subprocess.CompletedProcess[str]:
        """Run a script on this root; apt only simulates the installation."""
        key = "0" * 40 if fault == "another key" else self.fingerprint
        given = {"ROOT": self.root, "APT_CONFIG": self.root / "apt.conf", "KEY_FINGERPRINT": key}
        return run(script, word, **given, **variables)


@pytest.fixture
def signed() -> Iterator[Signed]:
    for program in ("apt-get", "gpg", "gpg-agent", "gpgconf", "curl"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    folder = Path(tempfile.mkdtemp())  # gpg's socket has a short name, or none
    made = Signed(folder)
    yield made
    subprocess.run(["gpgconf", "--homedir", made.gnupg, "--kill", "all"], check=False, timeout=240)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("another key", f"; expected {'0' * 40}"),
        ("no nvcc", "cuda-nvcc-13-0"),
        ("alpine", "install-cuda: alpine320: NVIDIA's repository for it is not known here"),
    ],
)
def test_all_parts_of_cuda_come_from_a_repository_with_nvidia_s_key(fault: str, said: str, signed: Signed) -> None:
    place = signed.folder / "repos" / "ubuntu2404" / os.uname().machine
    place.mkdir(parents=True)
    (place / "3bf863cc.pub").write_bytes(signed.key)
    names = NAMES[1:] if fault == "no nvcc" else NAMES
    packages = "".join(PACKAGE.format(name=name, digest="0" * 64) for name in names).encode()
    (place / "Packages").write_bytes(packages)
    digest = hashlib.sha256(packages).hexdigest()
    (signed.folder / "Release").write_text(f"Origin: a test\nSHA256:\n {digest} {len(packages)} Packages\n")
    signed.gpg("--output", str(place / "InRelease"), "--clear-sign", str(signed.folder / "Release"))
    if fault == "alpine":
        (signed.root / "etc" / "os-release").write_text("ID=alpine\nVERSION_ID=3.20\n")
    done = signed.run("install-cuda.sh", "13.0", fault, REPOSITORIES=f"file://{signed.folder}/repos")
    assert (done.returncode == 0) == (not fault) and said in done.stderr, done.stderr
    if not fault:
        assert sorted(re.findall(r"^Inst (\S+)", done.stdout, re.MULTILINE)) == sorted(NAMES)


@pytest.mark.parametrize("words", [(), ("13",), ("13.0", "12.2"), ("13.0; id",)])
def test_a_version_that_is_none_is_refused(words: tuple[str, ...]) -> None:
    done = run("install-cuda.sh", *words)
    assert done.returncode == 1 and "expected a version of CUDA, such as 13.0" in done.stderr


@pytest.mark.parametrize("fault", ["", "another key", "changed", "not there"])
def test_aws_s_installer_runs_only_if_its_key_has_signed_it(fault: str, signed: Signed) -> None:
    server, installer = signed.folder / "server", signed.folder / "aws-efa-installer"
    server.mkdir()
    installer.mkdir()
    (installer / "efa_installer.sh").write_text("#!/bin/sh\necho installs $*\n")
    (installer / "efa_installer.sh").chmod(0o755)
    archive = server / f"aws-efa-installer-{EFA_VERSION}.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", signed.folder, installer.name], check=True)
    signed.gpg("--detach-sign", "--output", f"{archive}.sig", str(archive))
    (server / "aws-efa-installer.key").write_bytes(signed.key)
    if fault == "changed":
        archive.write_bytes(archive.read_bytes() + b"\0")
    elif fault == "not there":
        archive.unlink()
    done = signed.run("install-efa.sh", EFA_VERSION, fault, INSTALLERS=f"file://{server}")
    assert (done.returncode == 0) == (not fault), done.stderr
    assert ("installs --yes --skip-kmod --skip-limit-conf --no-verify" in done.stdout) == (not fault)
    assert not fault or done.stderr.splitlines()[-1].startswith("install-efa: ")


def test_the_image_s_debian_packages_are_known_to_apt() -> None:
    if shutil.which("apt-get") is None or not list(Path("/var/lib/apt/lists").glob("*_Packages*")):
        pytest.skip("apt has no lists of packages; apt-get update makes them")
    [text] = [line.text for line in read_dockerfile(DOCKER / "Dockerfile") if "openssh-server" in line.text]
    lists = re.findall(r"apt-get install --yes --no-install-recommends (.*?)(?:;|&&)", text)
    packages = [package for found in lists for package in found.split()]
    assert len(packages) > 12
    argv = ["apt-get", "install", "--simulate", "--no-install-recommends", *packages]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
