"""What is seen of a run from outside: its losses as it logs them, its processes, when something has happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from zeropods.launch.logs import LINE, GrowingFile
from zeropods.launch.outcome import written_at
from zeropods.measure.heartbeat import read_beats
from zeropods.pods.processes import RUN, Process, descendants, find_process, is_alive, processes_with, variable

POLL_SECONDS = 0.02

Losses = dict[int, float]


class Log:
    """The training losses that a run logs, six digits each, as they come."""

    def __init__(self, folder: Path) -> None:
        self._tail = GrowingFile(folder / "train.log")
        self.losses: Losses = {}
        """Since `forget`."""
        self.first_unix_seconds: float | None = None
        """When the first of them was seen."""
        self.all: list[tuple[int, float]] = []
        """Of all attempts."""

    def read(self) -> Losses:
        """Losses by step, those just written included."""
        said = LINE.findall("\n".join(self._tail.lines()))
        new = {int(step): float(loss) for step, name, loss in said if name == "loss"}
        if new and not self.losses:
            self.first_unix_seconds = time.time()
        self.losses.update(new)
        self.all += new.items()
        return self.losses

    def forget(self) -> None:
        """Begin anew with what is written from now on."""
        self.read()
        self.losses, self.first_unix_seconds = {}, None


def difference(losses: Iterable[tuple[int, float]], undisturbed: Losses) -> float | None:
    """The largest of the differences of a step's losses, relative to the undisturbed run's; None without any step."""
    return max((abs(loss - undisturbed[step]) / undisturbed[step] for step, loss in losses), default=None)


def ranks_of(folder: Path) -> list[Process]:
    """The ranks of an attempt, by their beats."""
    found = (find_process(beat.pid) for _, beat in sorted(read_beats(folder).items()))
    return [rank for rank in found if rank is not None]


def processes_of(ranks: Iterable[Process], launch: int) -> list[Process]:
    """Whatever carries the mark of these ranks' run, and what its launch started here."""
    marks = {mark for rank in ranks if (mark := variable(rank, RUN)) is not None}
    return [*(each for mark in marks for each in processes_with(RUN, mark)), *descendants(launch)]


def ended(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Those that are still there when there was so much time to end."""
    left = list(processes)
    until(lambda: not any(map(is_alive, left)), seconds)
    return [process for process in left if is_alive(process)]


def until(happened: Callable[[], object], seconds: float) -> bool:
    """Wait for it, no longer than so many seconds; returns whether it has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def first_word(folder: Path, since: float) -> float | None:
    """When the first stack of a run that stood still, or the last word of a rank, was written; None where none was."""
    paths = [*(folder / "stacks").glob("*.txt"), *(folder / "ranks").glob("[0-9].json")]
    return min((at for at in (path.stat().st_mtime for path in paths) if at >= since), default=None)


def changed(path: Path) -> Callable[[], bool]:
    """Whether a file is another one than it is now."""
    before = written_at(path)
    return lambda: written_at(path) != before
