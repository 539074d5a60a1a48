"""What can be observed of a run from outside: the losses that it logs, its processes, and when
something happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from zeropods.launch.logs import LINE, GrowingFile
from zeropods.launch.outcome import written_at
from zeropods.measure.heartbeat import read_beats
from zeropods.pods.processes import (
    RUN,
    Process,
    descendants,
    find_process,
    is_alive,
    processes_with,
    variable,
)

POLL_SECONDS = 0.02

Losses = dict[int, float]


class Log:
    """The training losses that a run logs, six digits each, read as they are written."""

    def __init__(self, folder: Path) -> None:
        self._tail = GrowingFile(folder / "train.log")
        self.losses: Losses = {}
        """Losses by step since the last `forget`."""
        self.first_unix_seconds: float | None = None
        """Time at which the first of these losses was seen."""
        self.all: list[tuple[int, float]] = []
        """Steps and losses of all attempts."""

    def read(self) -> Losses:
        """Return the losses by step, including those just written."""
        text = "\n".join(self._tail.new_lines())
        new: Losses = {}
        for step, name, loss in LINE.findall(text):
            if name == "loss":
                new[int(step)] = float(loss)
        if new and not self.losses:
            self.first_unix_seconds = time.time()
        self.losses.update(new)
        self.all += new.items()
        return self.losses

    def forget(self) -> None:
        """Start again with what is written from now on."""
        self.read()
        self.losses = {}
        self.first_unix_seconds = None


def difference(losses: Iterable[tuple[int, float]], undisturbed: Losses) -> float | None:
    """Largest difference of a step's loss from the undisturbed run's, relative to the latter; None
    without any step."""
    differences = []
    for step, loss in losses:
        expected = undisturbed[step]
        differences.append(abs(loss - expected) / expected)
    return max(differences, default=None)


def ranks_of(folder: Path) -> list[Process]:
    """The processes of an attempt's ranks, found by their heartbeats."""
    processes = []
    for _, beat in sorted(read_beats(folder).items()):
        process = find_process(beat.pid)
        if process is not None:
            processes.append(process)
    return processes


def processes_of(ranks: Iterable[Process], launch: int) -> list[Process]:
    """Processes that carry the mark of these ranks' run, and those that its launch started on this
    machine."""
    marks = set[str]()
    for rank in ranks:
        mark = variable(rank, RUN)
        if mark is not None:
            marks.add(mark)
    processes = []
    for mark in marks:
        processes += processes_with(RUN, mark)
    return processes + descendants(launch)


def ended(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Wait up to `seconds` for processes to end; returns those that are still alive."""
    waited_for = list(processes)
    until(lambda: not any(map(is_alive, waited_for)), seconds)
    return [process for process in waited_for if is_alive(process)]


def until(happened: Callable[[], object], seconds: float) -> bool:
    """Wait until `happened` returns true, for `seconds` at most; returns whether it did."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def first_word(folder: Path, since: float) -> float | None:
    """First time after `since` at which stacks of a hung run or a rank's record were written; None
    where none were."""
    paths = [*(folder / "stacks").glob("*.txt"), *(folder / "ranks").glob("[0-9].json")]
    times = [path.stat().st_mtime for path in paths]
    return min((at for at in times if at >= since), default=None)


def changed(path: Path) -> Callable[[], bool]:
    """Return a function that tells whether a file has been rewritten since this call."""
    before = written_at(path)
    return lambda: written_at(path) != before
