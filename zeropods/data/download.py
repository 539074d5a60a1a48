"""`zeropods data get`: a data set from its publisher, proven, unpacked, and moved into place whole.

All that is unfinished lives in `OUT.part` beside the folder: partial downloads, which the next call
continues, and the unpacked files, which become the folder in one rename. `OUT/source.json` says what
the folder is.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropods.data.archive import unpack
from zeropods.data.fetch import WAITS_SECONDS, discard, fetch
from zeropods.data.publishers import DATASETS, Dataset, Source
from zeropods.data.writing import writing
from zeropods.errors import UserError

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
