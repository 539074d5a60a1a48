"""`zeropods data get`: a data set from its publisher, verified, unpacked, and moved into place whole.

Every file is pinned by a digest of its whole content, so it does not matter which server sent it:

* WikiSQL: the git blob hash of `data.tar.bz2` in the publisher's repository. The release also carries a SQLite copy of
  each split's tables; those are left out, since the tables are read from SPLIT.tables.jsonl.
* SQuAD v1.1 (87,599 train and 10,570 dev questions): SHA-256 as ParlAI and others pin it. That of dev was also computed
  from the file; that of train is taken from there.
* WikiText-2, word level with `<unk>`: SHA-256 of `wikitext-2-v1.zip` as several public loaders pin it (not computed
  from the archive itself). The bucket of its first publisher answers 403 since 2024; the address is the first author's.

All that is unfinished lives in `OUT.part` beside the folder: partial downloads, which the next call continues, and the
unpacked files, which become the folder in one rename. `OUT/source.json` says what the folder is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from zeropods import __version__
from zeropods.errors import UserError
from zeropods.files import read_object, sha256, write_json, writing

TIMEOUT_SECONDS = 30
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
LIMIT_BYTES = 2**30
CHUNK_BYTES = 2**20
RECORD = "source.json"
SPLITS = ("train", "dev", "test")
USER_AGENT = f"Mozilla/5.0 (compatible; zeropods/{__version__})"
"""Some publishers answer 403 to urllib's own name."""
PASSING = (408, 416, 429)
"""HTTP status codes that may be gone with the next attempt, as those from 500 on."""


@dataclass(frozen=True)
class Checksum:
    """A digest over the whole content of a file."""

    algorithm: Literal["git-blob", "sha256"]
    value: str
    """Lower-case hexadecimal."""

    def of(self, path: Path) -> str:
        """This algorithm's digest of a file; git's is SHA-1 of `blob SIZE`, a zero byte, and the content."""
        if self.algorithm == "sha256":
            return sha256(path)
        header = b"blob %d\0" % path.stat().st_size
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.sha1(header, usedforsecurity=False)).hexdigest()


@dataclass(frozen=True)
class SourceFile:
    """One file at a publisher."""

    url: str
    checksum: Checksum
    members: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Path in the archive -> name in the folder; empty where the file is no archive and is kept as it is."""

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class PublishedSet:
    """A data set: its files, which together become one folder."""

    name: str
    sources: tuple[SourceFile, ...]

    @property
    def checksums(self) -> list[dict[str, str]]:
        """Digests of its files, as JSON values."""
        return [asdict(source.checksum) for source in self.sources]


WIKISQL = SourceFile(
    "https://github.com/salesforce/WikiSQL/raw/master/data.tar.bz2",
    Checksum("git-blob", "941de4cb2ad5fa7aeb2e37d314468636ce070af7"),
    {f"data/{split}.{suffix}": f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")},
)
SQUAD_DIGESTS = {
    "train": "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
    "dev": "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
}
SQUAD = tuple(
    SourceFile(f"https://rajpurkar.github.io/SQuAD-explorer/dataset/{split}-v1.1.json", Checksum("sha256", digest))
    for split, digest in SQUAD_DIGESTS.items()
)
WIKITEXT_2 = SourceFile(
    "https://wikitext.smerity.com/wikitext-2-v1.zip",
    Checksum("sha256", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    {f"wikitext-2/wiki.{split}.tokens": f"{split}.txt" for split in ("train", "valid", "test")},
)
DATASETS = {
    name: PublishedSet(name, sources)
    for name, sources in (("wikisql", (WIKISQL,)), ("squad", SQUAD), ("wikitext-2", (WIKITEXT_2,)))
}


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


class PassingError(Exception):
    """The transfer failed for a reason that may pass."""


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
    dataset: PublishedSet, out: Path, mirror: str | None = None, waits_seconds: Sequence[float] = WAITS_SECONDS
) -> Download:
    """`get` for any data set; `waits_seconds` are the pauses between attempts at one file."""
    start, out = time.monotonic(), out.resolve()
    record = _complete(dataset, out)
    already_there = record is not None
    if record is None:
        with _workplace(out) as work:
            parts = {}
            for source in dataset.sources:
                url = f"{mirror.rstrip('/')}/{dataset.name}/{source.filename}" if mirror else source.url
                parts[url] = source, _verified(source, url, work, waits_seconds)
            record = _put_in_place(dataset, parts, work, out)
    return Download(
        dataset=dataset.name,
        folder=str(out),
        already_there=already_there,
        files=record["files"],
        urls=tuple(record["urls"]),
        seconds=time.monotonic() - start,
    )


def fetch(url: str, part: Path, waits_seconds: Sequence[float] = WAITS_SECONDS) -> None:
    """Download `url` into `part`, going on after the bytes that are already there.

    What has arrived stays when this fails, and the next call goes on from there. `UserError` names the address, what
    happened and the remedy, after one attempt more than there are waits.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an HTTP address; expected http:// or https://")
    for wait in (*waits_seconds, None):
        try:
            _attempt(url, part)
            return
        except PassingError as error:
            if wait is None:
                remedy = "check the network and run the command again, or name a mirror in ZEROPODS_MIRROR"
                kept = f"{part.stat().st_size} bytes are kept; " if part.exists() else ""
                raise UserError(f"{url}: {error}; {kept}{remedy}") from None
            print(f"{url}: {error}; next attempt in {wait:g} s", file=sys.stderr)
            time.sleep(wait)


def unpack(archive: Path, members: Mapping[str, str], folder: Path) -> None:
    """Write the members of a .tar.bz2 or .zip under the names that `members` gives them: no path of the archive's own.

    `UserError` where the archive is broken or lacks a member; `folder` may then hold a part of it.
    """
    try:
        with _opened(archive) as content_of:
            for member, name in members.items():
                content = content_of(member)
                if content is None:
                    raise UserError(f"{archive}: {member} is no file; expected the publisher's release")
                with content, writing(folder / name), open(folder / name, "xb") as file:
                    shutil.copyfileobj(content, file, CHUNK_BYTES)
    except KeyError as error:
        raise UserError(f"{archive}: {error.args[0]}; expected the publisher's release") from None
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{archive}: broken archive: {error}; remove it and fetch it again") from None
    except OSError as error:
        if error.errno is not None:  # bz2 reports broken data by an error without a number.
            raise
        raise UserError(f"{archive}: broken archive: {error}; remove it and fetch it again") from None


@contextmanager
def _opened(archive: Path) -> Iterator[Any]:
    """A function from a member's path to its content."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as container:
            yield container.open
    else:
        with tarfile.open(archive, "r:*") as container:
            yield container.extractfile


def _attempt(url: str, part: Path) -> None:
    offset = part.stat().st_size if part.exists() else 0
    with _open(url, part, offset) as response:
        if response.status != 206:
            offset = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            part.unlink(missing_ok=True)
            raise PassingError("the server sent another range than was asked for")
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length else None
        if total is not None and total > LIMIT_BYTES:
            raise UserError(f"{url}: {total} bytes; expected at most {LIMIT_BYTES}; check the address")
        _receive(response, part, offset, total)
    arrived = part.stat().st_size
    if total is not None and arrived != total:
        raise PassingError(f"the connection ended after {arrived} of {total} bytes")


def _open(url: str, part: Path, offset: int) -> HTTPResponse:
    headers = {"User-Agent": USER_AGENT} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416:
            part.unlink(missing_ok=True)
        if error.code in PASSING or error.code >= 500:
            raise PassingError(f"HTTP {error.code} {error.reason}") from None
        raise UserError(f"{url}: HTTP {error.code} {error.reason}; name a mirror in ZEROPODS_MIRROR") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}; check the address") from None
    except URLError as error:
        raise PassingError(f"no connection: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise PassingError(f"{type(error).__name__}: {error}") from None


def _receive(response: HTTPResponse, part: Path, offset: int, total: int | None) -> None:
    """Append the response to the file. A disk that is full is not retried: only the network's errors may pass."""
    bar = tqdm(total=total, initial=offset, unit="B", unit_scale=True, desc=part.stem, disable=None)
    with bar, writing(part), open(part, "ab" if offset else "wb") as file:
        while chunk := _chunk(response):
            offset += len(chunk)
            if offset > LIMIT_BYTES:
                raise UserError(f"{response.url}: more than {LIMIT_BYTES} bytes; check the address")
            file.write(chunk)
            bar.update(len(chunk))


def _chunk(response: IO[bytes]) -> bytes:
    try:
        return response.read(2**16)
    except (OSError, HTTPException) as error:
        raise PassingError(f"{type(error).__name__}: {error}") from None


def _verified(source: SourceFile, url: str, work: Path, waits_seconds: Sequence[float]) -> Path:
    """The downloaded file, its digest right; what was continued and came out wrong is fetched anew."""
    part = work / f"{source.filename}.part"
    if part.exists() and source.checksum.of(part) == source.checksum.value:
        return part
    while True:
        continued = part.exists()
        fetch(url, part, waits_seconds)
        found = source.checksum.of(part)
        if found == source.checksum.value:
            return part
        part.unlink(missing_ok=True)
        if not continued:
            kind, expected = source.checksum.algorithm, source.checksum.value
            raise UserError(f"{url}: {kind} {found}; expected {expected}; name a mirror in ZEROPODS_MIRROR")


def _put_in_place(
    dataset: PublishedSet, parts: Mapping[str, tuple[SourceFile, Path]], work: Path, out: Path
) -> dict[str, Any]:
    """Unpack beside `out`, describe, rename, and drop the downloads."""
    folder = work / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        for source, part in parts.values():
            if source.members:
                unpack(part, source.members, folder)
            else:
                with writing(folder / source.filename):
                    shutil.copyfile(part, folder / source.filename)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        record = {"dataset": dataset.name, "checksums": dataset.checksums, "urls": list(parts), "files": sizes}
        write_json(folder / RECORD, record)
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for _, part in parts.values():
        part.unlink(missing_ok=True)
    return record


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


def _complete(dataset: PublishedSet, out: Path) -> dict[str, Any] | None:
    """What a complete folder says of itself; None where there is none; `UserError` for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        record = read_object(out / RECORD, "choose another folder")
    except UserError:
        record = {}
    if record.get("checksums") != dataset.checksums:
        raise UserError(f"{out}: holds something else than {dataset.name} as fetched here; choose another folder")
    for name, size in record["files"].items():
        path = out / name
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path}: not the {size} bytes that were unpacked; remove {out} and fetch it again")
    return record
