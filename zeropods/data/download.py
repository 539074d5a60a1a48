"""`zeropods data get`: fetch a data set from its publisher, verify and unpack it, and move it into
place as a whole.

Every file is pinned by a digest of its whole content, so it does not matter which server sent it:

* WikiSQL: the git blob hash of `data.tar.bz2` in the publisher's repository. The release also
  carries a SQLite copy of each split's tables; these copies are left out, since the tables are read
  from SPLIT.tables.jsonl.
* SQuAD v1.1 (87,599 train and 10,570 dev questions): SHA-256 as pinned by ParlAI and others. The
  digest of dev was also computed from the file; that of train is taken from them.
* WikiText-2, word level with `<unk>`: SHA-256 of `wikitext-2-v1.zip` as pinned by several public
  loaders (not computed from the archive itself). The first publisher's bucket has answered 403
  since 2024; the address is the first author's.

The largest file is 35 MB, so each file is held in memory until its digest has been verified.
`OUT/source.json` records what the folder holds.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from zeropods import __version__
from zeropods.errors import UserError
from zeropods.files import read_object, write_json
from zeropods.outputs import new_folder
from zeropods.tables import progress

TIMEOUT_SECONDS = 30
"""Seconds to wait for a server that sends nothing."""
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Seconds to wait between attempts to fetch a file."""
LIMIT_BYTES = 2**30
"""Size above which a file is refused, since it is held in memory."""
READ_BYTES = 2**16
KIB = 2**10
RECORD = "source.json"
"""File in a folder that says what was fetched into it."""
USER_AGENT = f"Mozilla/5.0 (compatible; zeropods/{__version__})"
"""User agent of the requests: some publishers answer 403 to urllib's own name."""


@dataclass(frozen=True)
class SourceFile:
    """One file at a publisher."""

    url: str
    algorithm: Literal["git-blob", "sha256"]
    digest: str
    """Digest of the whole content, in lower-case hexadecimal."""
    members: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Path in the archive -> name in the folder; empty if the file is not an archive and is kept as
    it is."""

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    def digest_of(self, content: bytes | bytearray) -> str:
        """Digest of a content by this algorithm; git's is the SHA-1 of `blob SIZE`, a zero byte,
        and the content."""
        if self.algorithm == "sha256":
            return hashlib.sha256(content).hexdigest()
        blob = b"blob %d\0" % len(content) + content
        return hashlib.sha1(blob, usedforsecurity=False).hexdigest()


DATASETS: dict[str, tuple[SourceFile, ...]] = {
    "wikisql": (
        SourceFile(
            "https://github.com/salesforce/WikiSQL/raw/master/data.tar.bz2",
            "git-blob",
            "941de4cb2ad5fa7aeb2e37d314468636ce070af7",
            {
                "data/train.jsonl": "train.jsonl",
                "data/train.tables.jsonl": "train.tables.jsonl",
                "data/dev.jsonl": "dev.jsonl",
                "data/dev.tables.jsonl": "dev.tables.jsonl",
                "data/test.jsonl": "test.jsonl",
                "data/test.tables.jsonl": "test.tables.jsonl",
            },
        ),
    ),
    "squad": (
        SourceFile(
            "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v1.1.json",
            "sha256",
            "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
        ),
        SourceFile(
            "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v1.1.json",
            "sha256",
            "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
        ),
    ),
    "wikitext-2": (
        SourceFile(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            "sha256",
            "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
            {
                f"wikitext-2/wiki.{split}.tokens": f"{split}.txt"
                for split in ("train", "valid", "test")
            },
        ),
    ),
}
"""The files of each data set, which together become one folder."""


def get(name: str, out: Path | str) -> dict[str, Any]:
    """Fetch `wikisql`, `squad` or `wikitext-2` into the folder `out`, which ends up either complete
    or untouched.

    The environment variable ZEROPODS_MIRROR is an address under which the files are found as
    NAME/FILENAME, for example `wikisql/data.tar.bz2`; they are verified all the same. A folder that
    holds the data set already is left as it is.

    Returns:
        What `zeropods data get --json` prints: `dataset`, `folder`, whether it was `already_there`,
        the `files` with their sizes in bytes, the `urls` that they came from, and the `seconds`
        that the call took.

    Raises:
        UserError: there is no such data set, the folder holds anything else, or a file cannot be
            fetched or is not what it should be.
    """
    if name not in DATASETS:
        raise UserError(f"data set {name!r}; expected {', '.join(DATASETS)}")
    start = time.monotonic()
    out = Path(out).resolve()
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    already_there = out.exists() and not is_empty_folder
    record = _checked_record(name, out) if already_there else _fetched(name, out)
    return {
        "dataset": name,
        "folder": str(out),
        "already_there": already_there,
        "files": record["files"],
        "urls": record["urls"],
        "seconds": time.monotonic() - start,
    }


def _checked_record(name: str, out: Path) -> dict[str, object]:
    """The record of a folder that was fetched before; `UserError` if it is of something else, or a
    file has not kept its size."""
    has_record = (out / RECORD).is_file()
    record = read_object(out / RECORD, "choose another folder") if has_record else {}
    if record.get("checksums") != _checksums(name):
        raise UserError(
            f"{out}: holds something other than {name} as fetched here; choose another folder"
        )
    for file, size in record["files"].items():
        path = out / file
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(
                f"{path}: not the {size} bytes that were unpacked; remove {out} and fetch it again"
            )
    return record


def _fetched(name: str, out: Path) -> dict[str, object]:
    """Fetch a data set into a folder, and return the record, which is written into it too."""
    urls = _urls(name)
    with new_folder(out) as folder:
        for url, source in zip(urls, DATASETS[name], strict=True):
            for file, content in _unpacked(source, _verified(source, url)):
                (folder / file).write_bytes(content)
        record: dict[str, object] = {
            "dataset": name,
            "checksums": _checksums(name),
            "urls": urls,
            "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        }
        write_json(folder / RECORD, record)
    return record


def _checksums(name: str) -> list[dict[str, str]]:
    """The digests of the files of a data set, by which its record is recognised."""
    checksums = []
    for source in DATASETS[name]:
        checksums.append({"algorithm": source.algorithm, "value": source.digest})
    return checksums


def _urls(name: str) -> list[str]:
    """The addresses of a data set's files, at their publisher or at the mirror."""
    mirror = os.environ.get("ZEROPODS_MIRROR")
    if not mirror:
        return [source.url for source in DATASETS[name]]
    return [f"{mirror.rstrip('/')}/{name}/{source.filename}" for source in DATASETS[name]]


def _verified(source: SourceFile, url: str) -> bytes:
    """Fetch a file and return its content; `UserError` if it has another digest."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an HTTP address; expected http:// or https://")
    content = _content(url)
    digest = source.digest_of(content)
    if digest != source.digest:
        raise UserError(
            f"{url}: {source.algorithm} {digest}; expected {source.digest}; "
            "set ZEROPODS_MIRROR to a mirror"
        )
    return bytes(content)


class _AttemptError(Exception):
    """A fault after which another attempt may succeed."""


def _content(url: str) -> bytearray:
    """What an address sends, after as many attempts as that takes: at most one more than
    `WAITS_SECONDS` has waits."""
    for wait in (*WAITS_SECONDS, None):
        try:
            return _received(url)
        except _AttemptError as error:
            fault = str(error)
        if wait is not None:
            print(f"{url}: {fault}; next attempt in {wait:g} s", file=sys.stderr)
            time.sleep(wait)
    raise UserError(
        f"{url}: {fault}; "
        "check the network and run the command again, or set ZEROPODS_MIRROR to a mirror"
    )


def _received(url: str) -> bytearray:
    """What an address sends in one attempt.

    Raises:
        _AttemptError: there was no whole answer.
        UserError: the server refused (HTTP 4xx), or what it sends has no end.
    """
    request = Request(url, headers={"User-Agent": USER_AGENT})
    content = bytearray()
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            length = int(response.headers.get("Content-Length", 0))
            with progress(url.rpartition("/")[2], "KiB", length // KIB or None) as bar:
                while (chunk := response.read(READ_BYTES)) and len(content) <= LIMIT_BYTES:
                    content += chunk
                    bar.update(len(content) // KIB - bar.n)
    except HTTPError as error:
        error.close()
        status = f"HTTP {error.code} {error.reason}"
        if error.code < 500:
            raise UserError(f"{url}: {status}; set ZEROPODS_MIRROR to a mirror") from None
        raise _AttemptError(status) from None
    except (OSError, HTTPException) as error:
        raise _AttemptError(f"no connection: {getattr(error, 'reason', error)}") from None
    if len(content) > LIMIT_BYTES:
        raise UserError(f"{url}: more than {LIMIT_BYTES} bytes; check the address")
    is_whole = not length or len(content) == length
    if not is_whole:
        raise _AttemptError(f"connection lost after {len(content)} of {length} bytes")
    return content


def _unpacked(source: SourceFile, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that a source contains; the names are ours, never paths from
    the archive."""
    if not source.members:
        yield source.filename, content
    elif source.filename.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for path, name in source.members.items():
                yield name, archive.read(path)
    else:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                if member.name not in source.members:
                    continue
                file = tar.extractfile(member)
                # It is None for a member that is no file.
                if file is not None:
                    yield source.members[member.name], file.read()
