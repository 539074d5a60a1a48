"""The image's scripts, each run for real in a folder of its own; its packages, as far as apt knows them here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dockerfile import read_dockerfile
from tests.full.cuda_repository import INSTALL_CUDA, PARTS, Repository, run

ROOT = Path(__file__).resolve().parents[2]
USE_CUDA = ROOT / "docker" / "use-cuda.sh"


class Prefix:
    """A /usr/local with CUDA 12.2 and 13.0, and a torch that says with which of them it was built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "local"
        self.link = self.folder / "cuda"
        self.torch = folder / "packages" / "torch"
        self.torch.mkdir(parents=True)
        (self.torch / "__init__.py").write_text("raise SystemExit('nobody has to load torch')")
        self.built_with("13.0")
        for version in ("12.2", "13.0"):
            compiler = self.folder / f"cuda-{version}" / "bin" / "nvcc"
            compiler.parent.mkdir(parents=True)
            compiler.touch(0o755)

    def built_with(self, version: str | None) -> None:
        (self.torch / "version.py").write_text(f"cuda = {version!r}")

    def use(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run(USE_CUDA, *words, PREFIX=self.folder, PYTHON=sys.executable, PYTHONPATH=self.torch.parent)


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    return Prefix(tmp_path)


@pytest.mark.parametrize("before", [None, "cuda-12.2"])
def test_the_link_leads_to_the_cuda_of_torch(before: str | None, prefix: Prefix) -> None:
    if before is not None:
        prefix.link.symlink_to(before)
    done = prefix.use("--no-report")
    assert (done.returncode, done.stderr) == (0, "")
    assert prefix.link.resolve() == (prefix.folder / "cuda-13.0").resolve()
    assert sorted(path.name for path in prefix.folder.iterdir()) == ["cuda", "cuda-12.2", "cuda-13.0"]


def test_a_cuda_that_is_not_there_is_one_line_with_those_that_are(prefix: Prefix) -> None:
    prefix.built_with("12.8")
    done = prefix.use("--no-report")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "built with CUDA 12.8; there is cuda-12.2 cuda-13.0" in done.stderr


def test_a_folder_in_the_link_s_place_is_left_alone(prefix: Prefix) -> None:
    prefix.link.mkdir()
    done = prefix.use("--no-report")
    assert done.returncode == 1 and "is no link; set CUDA_HOME=" in done.stderr
    assert prefix.link.is_dir() and not prefix.link.is_symlink()


def test_a_torch_without_cuda_leaves_the_link_alone(prefix: Prefix) -> None:
    prefix.built_with(None)
    assert "torch is built without CUDA" in prefix.use("--no-report").stdout
    assert not prefix.link.exists()


def test_the_session_command_ends_with_deepspeed_s_report(tmp_path: Path) -> None:
    done = run(USE_CUDA, PREFIX=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed general environment info" in done.stdout and "cpu_adam" in done.stdout


@pytest.fixture
def repository() -> Iterator[Repository]:
    for program in ("apt-get", "gpg", "gpgconf", "curl"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    made = Repository(Path(tempfile.mkdtemp()))  # gpg's socket has a short name, or none
    try:
        yield made
    finally:
        made.close()


def test_all_parts_of_cuda_come_from_a_repository_with_nvidia_s_key(repository: Repository) -> None:
    done = repository.install("13.0")
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"^Inst (\S+)", done.stdout, re.MULTILINE)) == {f"{part}-13-0" for part in PARTS}


def test_another_key_than_nvidia_s_is_refused(repository: Repository) -> None:
    done = repository.install("13.0", KEY_FINGERPRINT="0" * 40)
    assert done.returncode == 1 and f"fingerprint {repository.fingerprint}; expected {'0' * 40}" in done.stderr
    assert not (repository.root / "etc/apt/sources.list.d").exists()


def test_a_package_that_nvidia_does_not_have_ends_the_build(repository: Repository) -> None:
    repository.publish(PARTS[1:])
    done = repository.install("13.0")
    assert done.returncode != 0 and "cuda-nvcc-13-0" in done.stderr


def test_a_distribution_that_nvidia_does_not_serve_is_one_line(repository: Repository) -> None:
    (repository.root / "etc" / "os-release").write_text("ID=alpine\nVERSION_ID=3.20\n")
    done = repository.install("13.0")
    assert done.returncode == 1
    assert done.stderr.startswith("install-cuda: alpine320: NVIDIA's repository for it is not known here")


@pytest.mark.parametrize("words", [(), ("13",), ("13.0", "12.2"), ("13.0; id",)])
def test_a_version_that_is_none_is_refused(words: tuple[str, ...]) -> None:
    done = run(INSTALL_CUDA, *words)
    assert done.returncode == 1 and "expected a version of CUDA, such as 13.0" in done.stderr


def test_the_image_s_debian_packages_are_known_to_apt() -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get")
    if not list(Path("/var/lib/apt/lists").glob("*_Packages*")):
        pytest.skip("apt has no lists of packages; apt-get update makes them")
    [text] = [line.text for line in read_dockerfile(ROOT / "docker" / "Dockerfile") if "openssh-server" in line.text]
    lists = re.findall(r"apt-get install --yes --no-install-recommends (.*?)(?:;|&&)", text)
    packages = [package for found in lists for package in found.split()]
    assert len(packages) > 12
    argv = ["apt-get", "install", "--simulate", "--no-install-recommends", *packages]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


EFA_VERSION = "9.8.7"
INSTALLER = "#!/bin/sh\necho installs $*\n"


@pytest.mark.parametrize("fault", ["", "another key", "changed", "not there"])
def test_aws_s_installer_runs_only_if_its_key_has_signed_it(fault: str, repository: Repository, tmp_path: Path) -> None:
    server, installer = tmp_path / "server", tmp_path / "aws-efa-installer"
    for folder in (server, installer):
        folder.mkdir()
    (installer / "efa_installer.sh").write_text(INSTALLER)
    (installer / "efa_installer.sh").chmod(0o755)
    archive = server / f"aws-efa-installer-{EFA_VERSION}.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", tmp_path, installer.name], check=True)
    repository.gpg("--detach-sign", "--output", f"{archive}.sig", str(archive))
    (server / "aws-efa-installer.key").write_bytes(repository.gpg("--armor", "--export"))
    if fault == "changed":
        archive.write_bytes(archive.read_bytes() + b"\0")
    elif fault == "not there":
        archive.unlink()
    given = {
        "INSTALLERS": f"file://{server}", "APT_CONFIG": repository.root / "apt.conf", "ROOT": repository.root,
        "KEY_FINGERPRINT": "0" * 40 if fault == "another key" else repository.fingerprint,
    }  # fmt: skip
    done = run(ROOT / "docker" / "install-efa.sh", EFA_VERSION, **given)
    assert (done.returncode == 0) == (not fault), done.stderr
    assert ("installs --yes --skip-kmod --skip-limit-conf --no-verify" in done.stdout) == (not fault)
    if fault:
        assert done.stderr.splitlines()[-1].startswith("install-efa: ")
