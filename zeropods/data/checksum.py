"""What proves that a downloaded file is the one that was meant."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Checksum:
    """A digest over the whole content of a file."""

    algorithm: Literal["git-blob", "sha256"]
    value: str
    """Lower-case hexadecimal."""

    def of(self, path: Path) -> str:
        """This algorithm's digest of a file, computed while streaming it."""
        return git_blob_hash(path) if self.algorithm == "git-blob" else sha256(path)


def git_blob_hash(path: Path) -> str:
    """The name that git gives a file's content: SHA-1 of `blob SIZE`, a zero byte, and the content."""
    header = b"blob %d\0" % path.stat().st_size
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha1(header, usedforsecurity=False)).hexdigest()


def sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
