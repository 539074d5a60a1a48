"""A package repository like NVIDIA's, signed and without the packages themselves, and an image's root beside it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL_CUDA = ROOT / "docker" / "install-cuda.sh"
PARTS = (
    "cuda-nvcc", "cuda-cudart-dev", "cuda-profiler-api", "libcublas-dev", "libcusparse-dev", "libcusolver-dev",
    "libcurand-dev",
)  # fmt: skip
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
RELEASE = "Origin: a test\nSHA256:\n {digest} {size} Packages\n"
FOLDERS = ("etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg")


def run(script: Path, *words: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run a script with further environment variables."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run([script, *words], env=environment, capture_output=True, text=True, timeout=120, check=False)


class Repository:
    """An image's root, and a package repository as NVIDIA's: signed, with packages of the names that are wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.gnupg = folder, folder / "root", folder / "gnupg"
        self.place = folder / "repos" / "ubuntu2404" / os.uname().machine
        for made in (self.gnupg, self.place, *(self.root / path for path in FOLDERS)):
            made.mkdir(parents=True, mode=0o700)
        (self.root / "etc" / "os-release").write_text('ID=ubuntu\nVERSION_ID="24.04"\n')
        (self.root / "var/lib/dpkg/status").touch()
        (self.root / "apt.conf").write_text(
            f'Dir "{self.root}/"; Dir::State::status "{self.root}/var/lib/dpkg/status"; APT::Architecture "amd64";\n'
            'Dir::Bin::methods "/usr/lib/apt/methods"; APT::Get::Simulate "true"; APT::Sandbox::User "root";\n'
        )
        self.gpg("--passphrase", "", "--quick-generate-key", "a test <test@example.org>", "ed25519", "sign", "never")
        (self.place / "3bf863cc.pub").write_bytes(self.gpg("--armor", "--export"))
        self.fingerprint = re.search(r"^fpr:+(\w+):", self.gpg("--with-colons", "--list-keys").decode(), re.MULTILINE)[
            1
        ]  # type: ignore[index]
        self.publish(PARTS)

    def gpg(self, *words: str) -> bytes:
        argv = ["gpg", "--homedir", str(self.gnupg), "--batch", "--quiet", *words]
        return subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout

    def publish(self, parts: tuple[str, ...]) -> None:
        packages = "".join(PACKAGE.format(name=f"{part}-13-0", digest="0" * 64) for part in parts).encode()
        (self.place / "Packages").write_bytes(packages)
        release = RELEASE.format(digest=hashlib.sha256(packages).hexdigest(), size=len(packages))
        (self.folder / "Release").write_text(release)
        self.gpg("--yes", "--output", str(self.place / "InRelease"), "--clear-sign", str(self.folder / "Release"))

    def install(self, *words: str, **variables: object) -> subprocess.CompletedProcess[str]:
        """Run the image's script on this root; apt only simulates the installation."""
        given = {
            "ROOT": self.root,
            "REPOSITORIES": f"file://{self.place.parents[1]}",
            "KEY_FINGERPRINT": self.fingerprint,
            "APT_CONFIG": self.root / "apt.conf",
        }
        return run(INSTALL_CUDA, *words, **{**given, **variables})

    def close(self) -> None:
        subprocess.run(["gpgconf", "--homedir", self.gnupg, "--kill", "all"], check=False, timeout=30)
        shutil.rmtree(self.folder)
