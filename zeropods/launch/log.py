"""What a run writes: its log line by line, with the pods' names, and the progress that the log tells of."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from zeropods.measure.record import RunConfig, read_config
from zeropods.tables import progress

LOG = "launch.log"
"""In the run folder: what the ranks wrote on stdout and stderr, attempt after attempt."""
LAST_LINES, KEPT_LINES = 8, 200
LINE = re.compile(r"step (\d+) (loss|eval_loss) ([\d.e+-]*\d|nan|inf|-inf)$")
"""What `train.log` says of a step."""
SESSION_END = re.compile(r"pdsh@[^:]*: (\S+): (?:ssh exited with exit code|ssh killed by signal|killed by signal) \d+")
"""What pdsh writes when a pod's command fails or its connection breaks; of one that ends well it says nothing."""


class GrowingFile:
    """A file to which another process appends lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def lines(self) -> list[str]:
        """The complete lines that were added since the last call."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode("utf-8", "replace").split("\n") if newline else []


class Progress(NamedTuple):
    """A line of `train.log` that says how far the run is."""

    step: int
    name: str
    """`loss` or `eval_loss`."""
    loss: float


class TrainLog(GrowingFile):
    """`train.log` of a run."""

    def entries(self) -> list[Progress]:
        """Losses that were logged since the last call."""
        return [Progress(int(m[1]), m[2], float(m[3])) for m in map(LINE.search, self.lines()) if m]


@contextmanager
def following(folder: Path) -> Iterator[Callable[[], None]]:
    """A progress bar over the optimizer steps of a run; call what it yields now and then."""
    log = TrainLog(folder / "train.log")
    with progress("train", "steps") as bar:

        def tick() -> None:
            for entry in log.entries():
                bar.total = bar.total or planned_steps(read_config(folder))
                bar.set_postfix({entry.name: f"{entry.loss:.4g}"}, refresh=False)
                bar.update(entry.step - bar.n)

        yield tick
        bar.leave = bar.n > 0
        # Where the clock ended it, what was done was all.
        bar.total = bar.total or bar.n or None


def planned_steps(config: RunConfig) -> int | None:
    """Optimizer steps of a run, by its `config.json`; None where the clock ends it."""
    asked = config.identity
    if asked.get("max_train_seconds") or "epochs" not in asked:
        return None
    if asked["max_steps"] > 0:
        return int(asked["max_steps"])
    return math.ceil(asked["epochs"] * math.ceil(config.train_rows / config.effective_batch_size))


class RunLog:
    """The last lines that a run wrote, each shown as it comes."""

    def __init__(self, show: Callable[[str], object] = lambda line: None) -> None:
        self._show = show
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def add(self, line: str) -> None:
        """Keep and show a line."""
        self._last.append(line)
        # A terminal that is gone ends no run: ranks would wait for a pipe that nobody reads.
        with suppress(OSError):
            self._show(line)

    def tail(self, pod: str | None = None) -> list[str]:
        """The last lines of a pod; of all where it wrote none, or none is named."""
        lines = list(self._last)
        return ([line for line in lines if line.startswith(f"{pod}: ")] or lines)[-LAST_LINES:]


class PdshLog(RunLog):
    """Reads pdsh's output to its end in a thread of its own, into the log file.

    pdsh puts `ADDRESS: ` before each line; known addresses are replaced by the pods' names.
    """

    def __init__(self, pipe: IO[bytes], file: Path, names: Mapping[str, str], show: Callable[[str], object]) -> None:
        """`names`: of the pods, by address; `show` is called in the reader's thread."""
        super().__init__(show)
        self._failed: dict[str, float] = {}
        self._names = names
        self._thread = threading.Thread(target=self._read, args=(pipe, file), daemon=True)
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Wait for the end of the pipe; a process that escaped and holds it open is not waited for."""
        self._thread.join(seconds)

    def failed_sessions(self) -> dict[str, float]:
        """Seconds since pdsh said that a pod's session has failed, by the pod's name."""
        now = time.monotonic()
        return {pod: now - at for pod, at in list(self._failed.items())}

    def _read(self, pipe: IO[bytes], path: Path) -> None:
        with pipe, open(path, "a", encoding="utf-8") as file:
            for raw in pipe:
                address, colon, text = raw.decode("utf-8", "replace").rstrip("\n").partition(": ")
                line = f"{self._names.get(address, address)}{colon}{text}"
                print(line, file=file, flush=True)
                match = SESSION_END.fullmatch(line)
                if match:
                    self._failed.setdefault(self._names.get(match[1], match[1]), time.monotonic())
                self.add(line)
