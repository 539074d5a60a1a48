"""A rank's heartbeat, `ranks/N.beat` of a run folder: that it runs, how far it is, and where."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

BYTES = 4096
"""Of every beat: written over the one before, it needs no room on a disk that has become full."""
FRAMES = 24


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank says of itself about once a second."""

    rank: int
    pid: int
    began_unix_seconds: float
    """When this attempt began, by the rank's own clock."""
    alive: int
    """Goes up with every beat, whatever the main thread does."""
    marks: int
    """Goes up with every piece of work that is done: a forward and backward pass, a step, a batch of an evaluation."""
    step: int
    """Optimizer steps that are done."""
    phase: str
    patient: bool
    """Whether what it does now has no such pieces: loading, the first step, saving."""
    stack: tuple[str, ...]
    """Its main thread, innermost first: `FILE:LINE FUNCTION`."""
    called_from: str | None
    """The innermost of these that is neither of Python nor of an installed package."""

    def place(self) -> str:
        """Where its main thread is, and whence in the user's or our own code."""
        inner = self.stack[0] if self.stack else "an unknown place"
        called = self.called_from
        return inner if called in (None, inner) else f"{inner}, called from {called}"


def beat_file(folder: Path, rank: int) -> Path:
    """Where a rank's beat is; it is there from the beginning of an attempt to its end."""
    return folder / "ranks" / f"{rank}.beat"


def write_beat(folder: Path, beat: Beat) -> None:
    """Write over the beat before. Closed each time, since a network file system shows others what was closed."""
    stack = list(beat.stack[:FRAMES])
    while len(text := json.dumps({**asdict(beat), "stack": stack}).encode()) > BYTES and stack:
        stack.pop()
    handle = os.open(beat_file(folder, beat.rank), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, text.ljust(BYTES), 0)
    finally:
        os.close(handle)


def read_beats(folder: Path) -> dict[int, Beat]:
    """The last beat of every rank that has one; one that is just being written counts as none."""
    found = {}
    for path in (folder / "ranks").glob("*.beat"):
        try:
            beat = _beat(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            continue
        found[beat.rank] = beat
    return found


def _beat(document: dict[str, object]) -> Beat:
    names = {field.name for field in fields(Beat)}
    beat = Beat(**{name: value for name, value in document.items() if name in names})  # type: ignore[arg-type]
    return Beat(**{**asdict(beat), "stack": tuple(beat.stack)})
