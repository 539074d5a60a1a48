"""`zeropods data get`: a data set from its publisher, proven, unpacked, and moved into place whole."""

from __future__ import annotations

import bz2
import fcntl
import json
import os
import re
import shutil
import stat
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from zeropods import __version__
from zeropods.data.manifest import Checksum, writing
from zeropods.errors import UserError

# One file over HTTP: resumable, bounded in time and size, its progress shown on stderr.

TIMEOUT_SECONDS = 30
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
LIMIT_BYTES = 2**30
_CHUNK_BYTES = 2**16
_PASSING = (408, 416, 429)
_USER_AGENT = f"Mozilla/5.0 (compatible; zeropods/{__version__})"
"""Some publishers answer 403 to urllib's own name."""


class PassingError(Exception):
    """The transfer failed for a reason that may pass."""


def fetch(url: str, part: Path, waits_seconds: Sequence[float] = WAITS_SECONDS) -> None:
    """Download `url` into `part`, going on after the bytes that are already there.

    The server's validator is kept beside as `PART.etag`, so that bytes of two versions are not joined;
    where a server gives none, only the checksum of the whole can tell. What has arrived stays when this
    fails, and the next call goes on from there. `UserError` names the address, what happened and the
    remedy, after one attempt more than there are waits.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an HTTP address; expected http:// or https://")
    for wait in waits_seconds:
        try:
            return _attempt(url, part)
        except PassingError as error:
            print(f"{url}: {error}; next attempt in {wait:g} s", file=sys.stderr)
            time.sleep(wait)
    try:
        return _attempt(url, part)
    except PassingError as error:
        raise UserError(f"{url}: {error}; {_remedy(part)}") from None


def discard(part: Path) -> None:
    """Forget what was downloaded."""
    part.unlink(missing_ok=True)
    _validator_file(part).unlink(missing_ok=True)


def _remedy(part: Path) -> str:
    kept = part.stat().st_size if part.exists() else 0
    remedy = "check the network and run the command again, or name a mirror in ZEROPODS_MIRROR"
    return f"{kept} bytes are kept; {remedy}" if kept else remedy


def _attempt(url: str, part: Path) -> None:
    offset = part.stat().st_size if part.exists() else 0
    with _open(url, part, offset) as response:
        if response.status != 206:
            offset = 0
        elif _first_byte(response) != offset:
            discard(part)
            raise PassingError("the server sent another range than was asked for")
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length else None
        if total is not None and total > LIMIT_BYTES:
            raise UserError(f"{url}: {total} bytes; expected at most {LIMIT_BYTES}; check the address")
        _keep_validator(response, part)
        _receive(response, part, offset, total)
    arrived = part.stat().st_size
    if total is not None and arrived != total:
        raise PassingError(f"the connection ended after {arrived} of {total} bytes")


def _open(url: str, part: Path, offset: int) -> HTTPResponse:
    headers = {"User-Agent": _USER_AGENT}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if _validator_file(part).exists():
            headers["If-Range"] = _validator_file(part).read_text("latin-1")
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416:
            discard(part)
        if error.code in _PASSING or error.code >= 500:
            raise PassingError(f"HTTP {error.code} {error.reason}") from None
        raise UserError(f"{url}: HTTP {error.code} {error.reason}; name a mirror in ZEROPODS_MIRROR") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}; check the address") from None
    except URLError as error:
        raise PassingError(f"no connection: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise PassingError(_reason(error)) from None


def _first_byte(response: HTTPResponse) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _keep_validator(response: HTTPResponse, part: Path) -> None:
    """Only a strong entity tag or a date may stand in If-Range (RFC 9110, 13.1.5)."""
    tag = response.headers.get("ETag", "")
    validator = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
    if validator:
        _validator_file(part).write_text(validator, "latin-1")
    else:
        _validator_file(part).unlink(missing_ok=True)


def _receive(response: HTTPResponse, part: Path, offset: int, total: int | None) -> None:
    """A disk that is full is not retried: only reading from the network ends in `PassingError`."""
    bar = tqdm(total=total, initial=offset, unit="B", unit_scale=True, desc=part.stem, disable=None)
    with bar, writing(part), open(part, "ab" if offset else "wb") as file:
        for chunk in _chunks(response):
            offset += len(chunk)
            if offset > LIMIT_BYTES:
                raise UserError(f"{response.url}: more than {LIMIT_BYTES} bytes; check the address")
            file.write(chunk)
            bar.update(len(chunk))


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    try:
        while chunk := response.read(_CHUNK_BYTES):
            yield chunk
    except (OSError, HTTPException) as error:
        raise PassingError(_reason(error)) from None


def _validator_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# Chosen members of an archive, unpacked without trusting it.
#
# A path from the archive never becomes a path on disk: members are written under names of our own.
# (tarfile's `data` filter is not in every Python 3.11, and zip files have none.) An archive is refused
# whole where any of its members leaves the folder, is a link or a device, or where it unpacks to more
# than a bound.

_CHUNK_BYTES_archive = 2**20
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
        while chunk := content.read(_CHUNK_BYTES_archive):
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


# Where the data sets are published, what proves each file, and which of its members are kept.
#
# Every file is proven by a digest of its whole content, so it does not matter which server sent it:
#
# * WikiSQL: the git blob hash of `data.tar.bz2` in the publisher's repository. The release also carries a
#   SQLite copy of each split's tables; those are left out, since the tables are read from
#   SPLIT.tables.jsonl.
# * SQuAD v1.1 (87,599 train and 10,570 dev questions): SHA-256 as ParlAI and others pin it. That of dev
#   was also computed from the file; that of train is taken from there.
# * WikiText-2, word level with `<unk>`: SHA-256 of `wikitext-2-v1.zip` as several public loaders pin it
#   (not computed from the archive itself). The bucket of its first publisher answers 403 since 2024; the
#   address is that of the paper's first author.

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Source:
    """One file at a publisher."""

    url: str
    checksum: Checksum
    members: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Path in the archive -> name in the folder; empty where the file is no archive and is kept as it is."""

    @property
    def filename(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Dataset:
    """A data set: its files, which together become one folder."""

    name: str
    sources: tuple[Source, ...]


def _wikisql_members() -> dict[str, str]:
    names = [f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")]
    return {f"data/{name}": name for name in names}


_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset"

WIKISQL = Dataset(
    "wikisql",
    (
        Source(
            "https://github.com/salesforce/WikiSQL/raw/master/data.tar.bz2",
            Checksum("git-blob", "941de4cb2ad5fa7aeb2e37d314468636ce070af7"),
            _wikisql_members(),
        ),
    ),
)

SQUAD = Dataset(
    "squad",
    (
        Source(
            f"{_SQUAD}/train-v1.1.json",
            Checksum("sha256", "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
        ),
        Source(
            f"{_SQUAD}/dev-v1.1.json",
            Checksum("sha256", "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
        ),
    ),
)

WIKITEXT_2 = Dataset(
    "wikitext-2",
    (
        Source(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            Checksum("sha256", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
            {f"wikitext-2/wiki.{split}.tokens": f"{split}.txt" for split in ("train", "valid", "test")},
        ),
    ),
)

DATASETS = {dataset.name: dataset for dataset in (WIKISQL, SQUAD, WIKITEXT_2)}


# `zeropods data get`: a data set from its publisher, proven, unpacked, and moved into place whole.
#
# All that is unfinished lives in `OUT.part` beside the folder: partial downloads, which the next call
# continues, and the unpacked files, which become the folder in one rename. `OUT/source.json` says what
# the folder is.

RECORD = "source.json"


@dataclass(frozen=True, kw_only=True)
class Download:
    """What `get` did; `dataclasses.asdict` of it is ready for JSON."""

    dataset: str
    folder: str
    already_there: bool
    """The folder was complete before, and nothing was done."""
    files: dict[str, int]
    """Size in bytes by file name."""
    urls: tuple[str, ...]
    """Where the files come from; on a mirror, the mirror's addresses."""
    seconds: float


def get(name: str, out: Path | str, mirror: str | None = None) -> Download:
    """Fetch `wikisql`, `squad` or `wikitext-2` into the folder `out`, which then is complete or untouched.

    `mirror` (or the environment's ZEROPODS_MIRROR) is an address under which the files lie as
    NAME/FILENAME, for example `wikisql/data.tar.bz2`; they are checked all the same. A folder that holds
    anything else is refused.
    """
    if name not in DATASETS:
        raise UserError(f"data set {name!r}; expected {', '.join(DATASETS)}")
    return install(DATASETS[name], Path(out), mirror or os.environ.get("ZEROPODS_MIRROR"))


def install(
    dataset: Dataset, out: Path, mirror: str | None = None, waits_seconds: Sequence[float] = WAITS_SECONDS
) -> Download:
    """`get` for any data set; `waits_seconds` are the pauses between attempts at one file."""
    start, out = time.monotonic(), out.resolve()
    urls = {source: _address(dataset, source, mirror) for source in dataset.sources}
    record = _record_of(dataset, out)
    already_there = record is not None
    if record is None:
        with _workplace(out) as work:
            parts = {source: _proven(source, url, work, waits_seconds) for source, url in urls.items()}
            record = _put_in_place(dataset, parts, list(urls.values()), work, out)
    return Download(
        dataset=dataset.name,
        folder=str(out),
        already_there=already_there,
        files=record["files"],
        urls=tuple(record["urls"]),
        seconds=time.monotonic() - start,
    )


def _address(dataset: Dataset, source: Source, mirror: str | None) -> str:
    return f"{mirror.rstrip('/')}/{dataset.name}/{source.filename}" if mirror else source.url


def _proven(source: Source, url: str, work: Path, waits_seconds: Sequence[float]) -> Path:
    """The downloaded file, its checksum right; what was continued and came out wrong is fetched anew."""
    part = work / f"{source.filename}.part"
    if part.exists() and source.checksum.of(part) == source.checksum.value:
        return part
    while True:
        continued = part.exists()
        fetch(url, part, waits_seconds)
        found = source.checksum.of(part)
        if found == source.checksum.value:
            return part
        discard(part)
        if not continued:
            kind, expected = source.checksum.algorithm, source.checksum.value
            raise UserError(f"{url}: {kind} {found}; expected {expected}; name a mirror in ZEROPODS_MIRROR")


def _put_in_place(
    dataset: Dataset, parts: dict[Source, Path], urls: list[str], work: Path, out: Path
) -> dict[str, Any]:
    """Unpack beside `out`, describe, rename, and drop the downloads."""
    with staged(work / "unpacked") as folder:
        for source, part in parts.items():
            if source.members:
                unpack(part, source.members, folder)
            else:
                with writing(folder / source.filename):
                    shutil.copyfile(part, folder / source.filename)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        record = {"dataset": dataset.name, "checksums": _checksums(dataset), "urls": urls, "files": sizes}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        os.replace(folder, out)
    for part in parts.values():
        discard(part)
    return record


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder of ours that is gone afterwards, unless it was moved away."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """`OUT.part`, held by one process at a time; gone afterwards if nothing is left in it."""
    work = out.with_name(f"{out.name}.part")
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work
    except BlockingIOError:
        raise UserError(f"{work}: another command is downloading there; wait until it has ended") from None
    finally:
        os.close(descriptor)
        with suppress(OSError):
            work.rmdir()


def _record_of(dataset: Dataset, out: Path) -> dict[str, Any] | None:
    """What a complete folder says of itself; None where there is none; `UserError` for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        record = json.loads((out / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict) or record.get("checksums") != _checksums(dataset):
        raise UserError(f"{out}: holds something else than {dataset.name} as fetched here; choose another folder")
    for name, size in record["files"].items():
        path = out / name
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path}: not the {size} bytes that were unpacked; remove {out} and fetch it again")
    return record


def _checksums(dataset: Dataset) -> list[dict[str, str]]:
    return [asdict(source.checksum) for source in dataset.sources]
