"""The files of a checkpoint: which there are, who answers for which, their sizes and digests."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zeropods.measure.rank import STRICT

MANIFEST = "manifest.json"
THREADS = 4
"""Hashing leaves the interpreter's lock; a disk or a server is seldom faster than four cores hash."""
NUMBERED = re.compile(r"(?:pp_rank_|rng_state_)(\d+)")
"""Names that DeepSpeed and transformers give to what one rank writes; rank 0 writes the others."""

DIVIDED = "_optim_states.pt"
"""How names of files end in which DeepSpeed keeps a rank's share of the FP32 weights and of the optimizer's states."""


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint."""

    __pydantic_config__ = STRICT

    bytes: int
    sha256: str


def names_in(checkpoint: Path) -> set[str]:
    """Paths of the files below a checkpoint, relative, with `/`; links to folders count as files.

    Names that begin with a dot are left out: network file systems keep deleted files so, and writers unfinished ones.
    """
    found = set()
    for root, folders, files in os.walk(checkpoint, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        inside = Path(root).relative_to(checkpoint)
        found |= {(inside / name).as_posix() for name in [*files, *links] if not name.startswith(".")}
    return found - {MANIFEST}


def share(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """The files that a rank hashes: its own, which its machine still has in memory.

    Each file is some rank's, also one with a name of no known kind.
    """
    return sorted(name for name in names if _writer(name) % world_size == rank)


def zero_folders(names: Iterable[str]) -> set[str]:
    """The folders in a checkpoint that hold what ZeRO's ranks have divided; none without ZeRO."""
    return {str(Path(name).parent) for name in names if name.endswith(DIVIDED)}


def measured(checkpoint: Path, names: Iterable[str]) -> dict[str, Shard]:
    """Force files down to the disk and take their sizes and digests; `OSError` where one cannot be read."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: shard(checkpoint / name, sync=True), names), strict=True))


def shard(path: Path, *, sync: bool = False) -> Shard:
    """Size and digest of a file as it is now; a link, a pipe or a folder raises `OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(0, "no plain file", str(path))
        if sync:
            os.fsync(handle)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Shard(os.fstat(handle).st_size, sha256)


def _writer(name: str) -> int:
    found = NUMBERED.search(name)
    return int(found[1]) if found else 0


def _raise(error: OSError) -> None:
    raise error
