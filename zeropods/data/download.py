"""`zeropods data get`: fetch a data set from its publisher, verify and unpack it, and move it into place as a whole.

Every file is pinned by a digest of its whole content, so it does not matter which server sent it:

* WikiSQL: the git blob hash of `data.tar.bz2` in the publisher's repository. The release also carries a SQLite copy of
  each split's tables; these copies are left out, since the tables are read from SPLIT.tables.jsonl.
* SQuAD v1.1 (87,599 train and 10,570 dev questions): SHA-256 as pinned by ParlAI and others. The digest of dev was also
  computed from the file; that of train is taken from them.
* WikiText-2, word level with `<unk>`: SHA-256 of `wikitext-2-v1.zip` as pinned by several public loaders (not computed
  from the archive itself). The first publisher's bucket has answered 403 since 2024; the address is the first author's.

The largest file is 35 MB, so each file is held in memory until its digest has been verified. `OUT/source.json` records
what the folder holds.
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
from zeropods.data.manifest import SPLITS
from zeropods.errors import UserError
from zeropods.files import read_object, write_json
from zeropods.outputs import new_folder
from zeropods.tables import progress

TIMEOUT_SECONDS = 30
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Seconds to wait between attempts to fetch a file."""
LIMIT_BYTES = 2**30
CHUNK_BYTES, KIB = 2**16, 2**10
RECORD = "source.json"
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
    """Path in the archive -> name in the folder; empty if the file is not an archive and is kept as it is."""

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    def digest_of(self, content: bytes | bytearray) -> str:
        """Digest of a content by this algorithm; git's is the SHA-1 of `blob SIZE`, a zero byte, and the content."""
        if self.algorithm == "sha256":
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


DATASETS: dict[str, tuple[SourceFile, ...]] = {
    "wikisql": (
        SourceFile(
            "https://github.com/salesforce/WikiSQL/raw/master/data.tar.bz2",
            "git-blob",
            "941de4cb2ad5fa7aeb2e37d314468636ce070af7",
            {f"data/{split}.{kind}": f"{split}.{kind}" for split in SPLITS for kind in ("jsonl", "tables.jsonl")},
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
            {f"wikitext-2/wiki.{split}.tokens": f"{split}.txt" for split in ("train", "valid", "test")},
        ),
    ),
}
"""The files of each data set, which together become one folder."""


def get(name: str, out: Path | str) -> dict[str, Any]:
    """Fetch `wikisql`, `squad` or `wikitext-2` into the folder `out`, which ends up either complete or untouched.

    The environment variable ZEROPODS_MIRROR is an address under which the files are found as NAME/FILENAME, for example
    `wikisql/data.tar.bz2`; they are verified all the same. A folder that holds anything else is refused.

    Returns:
        What `zeropods data get --json` prints: `dataset`, `folder`, whether it was `already_there`, the `files` with
        their sizes in bytes, the `urls` that they came from, and the `seconds` that the call took.
    """
    if name not in DATASETS:
        raise UserError(f"data set {name!r}; expected {', '.join(DATASETS)}")
    start, out, mirror = time.monotonic(), Path(out).resolve(), os.environ.get("ZEROPODS_MIRROR")
    checksums = [{"algorithm": each.algorithm, "value": each.digest} for each in DATASETS[name]]
    already_there = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    if already_there:
        record = read_object(out / RECORD, "choose another folder") if (out / RECORD).is_file() else {}
        if record.get("checksums") != checksums:
            raise UserError(f"{out}: holds something other than {name} as fetched here; choose another folder")
        for file, size in record["files"].items():
            path = out / file
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(f"{path}: not the {size} bytes that were unpacked; remove {out} and fetch it again")
    else:
        base = mirror and f"{mirror.rstrip('/')}/{name}"
        urls = [f"{base}/{each.filename}" if base else each.url for each in DATASETS[name]]
        with new_folder(out) as folder:
            for url, source in zip(urls, DATASETS[name], strict=True):
                for file, content in _unpacked(source, _verified(source, url)):
                    (folder / file).write_bytes(content)
            sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            record = {"dataset": name, "checksums": checksums, "urls": urls, "files": sizes}
            write_json(folder / RECORD, record)
    return {
        "dataset": name,
        "folder": str(out),
        "already_there": already_there,
        "files": record["files"],
        "urls": record["urls"],
        "seconds": time.monotonic() - start,
    }


def _verified(source: SourceFile, url: str) -> bytes:
    """Fetch a file and verify its digest: one attempt more than there are waits; a refusal (HTTP 4xx) is final."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an HTTP address; expected http:// or https://")
    request = Request(url, headers={"User-Agent": USER_AGENT})
    for wait in (*WAITS_SECONDS, None):
        content = bytearray()
        try:
            with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                length = int(response.headers.get("Content-Length", 0))
                with progress(url.rpartition("/")[2], "KiB", length // KIB or None) as bar:
                    while (chunk := response.read(CHUNK_BYTES)) and len(content) <= LIMIT_BYTES:
                        content += chunk
                        bar.update(len(content) // KIB - bar.n)
            if len(content) > LIMIT_BYTES:
                raise UserError(f"{url}: more than {LIMIT_BYTES} bytes; check the address")
            if not length or len(content) == length:
                break
            said = f"connection lost after {len(content)} of {length} bytes"
        except HTTPError as error:
            error.close()
            said = f"HTTP {error.code} {error.reason}"
            if error.code < 500:
                raise UserError(f"{url}: {said}; set ZEROPODS_MIRROR to a mirror") from None
        except (OSError, HTTPException) as error:
            said = f"no connection: {getattr(error, 'reason', error)}"
        if wait is None:
            remedy = "check the network and run the command again, or set ZEROPODS_MIRROR to a mirror"
            raise UserError(f"{url}: {said}; {remedy}")
        print(f"{url}: {said}; next attempt in {wait:g} s", file=sys.stderr)
        time.sleep(wait)
    found = source.digest_of(content)
    if found != source.digest:
        wrong = f"{source.algorithm} {found}; expected {source.digest}"
        raise UserError(f"{url}: {wrong}; set ZEROPODS_MIRROR to a mirror")
    return bytes(content)


def _unpacked(source: SourceFile, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that a source contains; the names are ours, never paths from the archive."""
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
