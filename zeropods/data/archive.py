"""Chosen members of an archive, unpacked without trusting it.

A path from the archive never becomes a path on disk: members are written under names of our own.
(tarfile's `data` filter is not in every Python 3.11, and zip files have none.) An archive is refused
whole where any of its members leaves the folder, is a link or a device, or where it unpacks to more
than a bound.
"""

from __future__ import annotations

import bz2
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from zeropods.data.writing import writing
from zeropods.errors import UserError

LIMIT_BYTES = 2**30
_CHUNK_BYTES = 2**20
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError)

Member = tuple[str, IO[bytes] | None]
"""A member's path and its content; None for a folder."""


def unpack(archive: Path, members: Mapping[str, str], folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Write the members of a .tar.bz2 or .zip under the names that `members` gives them.

    `UserError` where the archive is broken, unsafe or too large, or lacks a member; `folder` may then
    hold a part of it.
    """
    missing = set(members)
    with _readable(archive):
        walk = _zip_members if zipfile.is_zipfile(archive) else _tar_members
        for path, content in walk(archive, limit_bytes):
            if path in missing and content is not None:
                _write(content, folder / members[path])
                missing.remove(path)
    if missing:
        raise UserError(f"{archive}: has no {min(missing)}; expected the publisher's release")


def _tar_members(archive: Path, limit_bytes: int) -> Iterator[Member]:
    with _Bounded(archive, limit_bytes) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            if not (member.isfile() or member.isdir()):
                raise _refused(archive, member.name, "is a link or a device")
            yield _inside(archive, member.name), tar.extractfile(member)


def _zip_members(archive: Path, limit_bytes: int) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as container:
        if sum(member.file_size for member in container.infolist()) > limit_bytes:
            raise _too_large(archive, limit_bytes)
        for member in container.infolist():
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(archive, member.filename, "is a link or a device")
            path = _inside(archive, member.filename)
            if member.is_dir():
                yield path, None
            else:
                with container.open(member) as content:
                    yield path, content


class _Bounded(bz2.BZ2File):
    """A compressed file whose content ends with an error beyond a number of bytes."""

    def __init__(self, archive: Path, limit_bytes: int) -> None:
        super().__init__(archive)
        self._archive, self._limit_bytes = archive, limit_bytes

    def read(self, size: int | None = -1) -> bytes:
        chunk = super().read(size)
        if self.tell() > self._limit_bytes:
            raise _too_large(self._archive, self._limit_bytes)
        return chunk


def _write(content: IO[bytes], path: Path) -> None:
    with writing(path), open(path, "xb") as file:
        while chunk := content.read(_CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _inside(archive: Path, name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise _refused(archive, name, "leaves the folder")
    return str(path)


def _refused(archive: Path, name: str, reason: str) -> UserError:
    return UserError(f"{archive}: member {name!r} {reason}; the archive is refused, use the publisher's release")


def _too_large(archive: Path, limit_bytes: int) -> UserError:
    return UserError(f"{archive}: unpacks to more than {limit_bytes} bytes; the archive is refused")


@contextmanager
def _readable(archive: Path) -> Iterator[None]:
    """A broken archive is the user's to mend. (bz2 reports it by an `OSError` without a number.)"""
    try:
        yield
    except _BROKEN as error:
        raise UserError(f"{archive}: broken archive: {error}; remove it and fetch it again") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(f"{archive}: broken archive: {error}; remove it and fetch it again") from None
