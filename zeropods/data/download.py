"""`zeropods data get`: a data set from its publisher, verified, unpacked, and moved into place whole.

Every file is pinned by a digest of its whole content, so it does not matter which server sent it:

* WikiSQL: the git blob hash of `data.tar.bz2` in the publisher's repository. The release also carries a SQLite copy of
  each split's tables; those are left out, since the tables are read from SPLIT.tables.jsonl.
* SQuAD v1.1 (87,599 train and 10,570 dev questions): SHA-256 as ParlAI and others pin it. That of dev was also computed
  from the file; that of train is taken from there.
* WikiText-2, word level with `<unk>`: SHA-256 of `wikitext-2-v1.zip` as several public loaders pin it (not computed
  from the archive itself). The bucket of its first publisher answers 403 since 2024; the address is the first author's.

The largest file has 35 MB: it is held in memory until its digest is known to be right. `OUT/source.json` says what the
folder is.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from zeropods import __version__
from zeropods.data.manifest import SPLITS
from zeropods.errors import UserError
from zeropods.files import new_folder, read_object, write_json

TIMEOUT_SECONDS = 30
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts at one file."""
LIMIT_BYTES = 2**30
CHUNK_BYTES = 2**16
RECORD = "source.json"
USER_AGENT = f"Mozilla/5.0 (compatible; zeropods/{__version__})"
"""Some publishers answer 403 to urllib's own name."""


@dataclass(frozen=True)
class Checksum:
    """A digest over the whole content of a file."""

    algorithm: Literal["git-blob", "sha256"]
    value: str
    """Lower-case hexadecimal."""

    def of(self, content: bytes) -> str:
        """This algorithm's digest; git's is SHA-1 of `blob SIZE`, a zero byte, and the content."""
        if self.algorithm == "sha256":
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


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
DATASETS: dict[str, tuple[SourceFile, ...]] = {"wikisql": (WIKISQL,), "squad": SQUAD, "wikitext-2": (WIKITEXT_2,)}
"""The files of each data set, which together become one folder."""


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


def get(name: str, out: Path | str) -> Download:
    """Fetch `wikisql`, `squad` or `wikitext-2` into the folder `out`, which then is complete or untouched.

    The environment's ZEROPODS_MIRROR is an address under which the files lie as NAME/FILENAME, for example
    `wikisql/data.tar.bz2`; they are checked all the same. A folder that holds anything else is refused.
    """
    if name not in DATASETS:
        raise UserError(f"data set {name!r}; expected {', '.join(DATASETS)}")
    return install(name, DATASETS[name], Path(out), os.environ.get("ZEROPODS_MIRROR"))


def install(
    name: str,
    sources: Sequence[SourceFile],
    out: Path,
    mirror: str | None = None,
    waits_seconds: Sequence[float] = WAITS_SECONDS,
) -> Download:
    """`get` for any files."""
    start, out = time.monotonic(), out.resolve()
    checksums = [asdict(source.checksum) for source in sources]
    record = _complete(name, checksums, out)
    already_there = record is not None
    if record is None:
        urls = [f"{mirror.rstrip('/')}/{name}/{source.filename}" if mirror else source.url for source in sources]
        with new_folder(out) as folder:
            for source, url in zip(sources, urls, strict=True):
                for file, content in _unpacked(source, _verified(source, url, waits_seconds)):
                    (folder / file).write_bytes(content)
            sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            record = {"dataset": name, "checksums": checksums, "urls": urls, "files": sizes}
            write_json(folder / RECORD, record)
    return Download(
        dataset=name,
        folder=str(out),
        already_there=already_there,
        files=record["files"],
        urls=tuple(record["urls"]),
        seconds=time.monotonic() - start,
    )


def _complete(name: str, checksums: list[dict[str, str]], out: Path) -> dict[str, Any] | None:
    """What a complete folder says of itself; None where there is none; `UserError` for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    record = read_object(out / RECORD, "choose another folder") if (out / RECORD).is_file() else {}
    if record.get("checksums") != checksums:
        raise UserError(f"{out}: holds something else than {name} as fetched here; choose another folder")
    for file, size in record["files"].items():
        path = out / file
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path}: not the {size} bytes that were unpacked; remove {out} and fetch it again")
    return record


def _verified(source: SourceFile, url: str, waits_seconds: Sequence[float]) -> bytes:
    """The content of a file, its digest right."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an HTTP address; expected http:// or https://")
    content = _fetched(url, waits_seconds)
    found, expected = source.checksum.of(content), source.checksum.value
    if found != expected:
        kind = source.checksum.algorithm
        raise UserError(f"{url}: {kind} {found}; expected {expected}; name a mirror in ZEROPODS_MIRROR")
    return content


def _fetched(url: str, waits_seconds: Sequence[float]) -> bytes:
    """What the server sends, after one attempt more than there are waits; a refusal (HTTP 4xx) is final."""
    for wait in (*waits_seconds, None):
        try:
            return _received(url)
        except HTTPError as error:
            error.close()
            said = f"HTTP {error.code} {error.reason}"
            if error.code < 500:
                raise UserError(f"{url}: {said}; name a mirror in ZEROPODS_MIRROR") from None
        except (OSError, HTTPException) as error:
            said = f"no connection: {getattr(error, 'reason', error)}"
        if wait is not None:
            print(f"{url}: {said}; next attempt in {wait:g} s", file=sys.stderr)
            time.sleep(wait)
    raise UserError(f"{url}: {said}; check the network and run the command again, or name a mirror in ZEROPODS_MIRROR")


def _received(url: str) -> bytes:
    """The body of one answer; `ConnectionError` where it ends early."""
    from tqdm import tqdm

    content = bytearray()
    with urlopen(Request(url, headers={"User-Agent": USER_AGENT}), timeout=TIMEOUT_SECONDS) as response:
        length = int(response.headers.get("Content-Length", 0))
        with tqdm(total=length or None, unit="B", unit_scale=True, desc=url.rpartition("/")[2], disable=None) as bar:
            while chunk := response.read(CHUNK_BYTES):
                content += chunk
                bar.update(len(chunk))
                if len(content) > LIMIT_BYTES:
                    raise UserError(f"{url}: more than {LIMIT_BYTES} bytes; check the address")
    if length and len(content) != length:
        raise ConnectionError(f"it ended after {len(content)} of {length} bytes")
    return bytes(content)


def _unpacked(source: SourceFile, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that a source gives; names are ours, never a path of the archive's own."""
    if not source.members:
        yield source.filename, content
    elif source.filename.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from ((name, archive.read(path)) for path, name in source.members.items())
    else:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.name in source.members else None
                if file is not None:
                    yield source.members[member.name], file.read()
