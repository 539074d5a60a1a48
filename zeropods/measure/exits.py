"""How the process of each rank ended, in `ranks/N.exit` of the run folder: written by whoever
started the rank.

A rank that is killed cannot write anything itself, and the others only notice that a connection is
lost. The process that started a rank (`launch/watched_rank.py`, or `slurm/node.sh`) knows its exit
status or signal first hand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.record import RankExit, StrictPart

EXIT_BYTES = 4096
"""Size of every file: it is written once when its rank starts, so that its end needs no room on a
disk that is full."""
LINE_CHARACTERS = 300
"""Most characters of a line that are kept."""


@dataclass(kw_only=True)
class ExitNote(StrictPart):
    """The content of `ranks/N.exit`."""

    exit: RankExit
    last_lines: list[str] = field(default_factory=list)
    """The last lines that the rank wrote to stdout and stderr; empty where the process that started
    it does not read its output."""


def exit_file(folder: Path, rank: int) -> Path:
    """The file of a rank's exit; it exists from the rank's start until the run's record is
    written."""
    return folder / "ranks" / f"{rank}.exit"


def write_exit(folder: Path, rank_exit: RankExit, last_lines: Sequence[str] = ()) -> None:
    """Write what is known of a rank's process in place of what was known before; `OSError` where
    that is impossible.

    The first lines are left out where all of them would be too long. The file is closed each time:
    a network file system shows what was closed.
    """
    lines = [line[:LINE_CHARACTERS] for line in last_lines]
    text = _encoded(rank_exit, lines)
    while len(text) > EXIT_BYTES:
        del lines[0]
        text = _encoded(rank_exit, lines)
    path = exit_file(folder, rank_exit.rank)
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, text.ljust(EXIT_BYTES), 0)
    finally:
        os.close(handle)


def _encoded(rank_exit: RankExit, lines: Sequence[str]) -> bytes:
    note = ExitNote(exit=rank_exit, last_lines=list(lines))
    return json.dumps(asdict(note)).encode()


def read_exits(folder: Path) -> dict[int, ExitNote]:
    """What is known of the ranks' processes, by rank."""
    notes = {}
    for path in (folder / "ranks").glob("*.exit"):
        # A file that is being written, or that is removed, at this moment is left out.
        with suppress(UserError, OSError):
            note = files.validated(ExitNote, path, path.read_bytes())
            notes[note.exit.rank] = note
    return notes


@contextmanager
def exits_noted(folder: Path) -> Iterator[None]:
    """Let the exits of one attempt be noted within this block: all notes are removed when it begins
    and when it ends."""
    # A supervisor that was killed has left those of an earlier attempt.
    remove_exits(folder)
    try:
        yield
    finally:
        remove_exits(folder)


def remove_exits(folder: Path) -> None:
    """Remove the notes of all ranks, and the folder `ranks/` if nothing else is in it."""
    for path in (folder / "ranks").glob("*.exit"):
        path.unlink(missing_ok=True)
    # A folder with other files is not removed.
    with suppress(OSError):
        (folder / "ranks").rmdir()
