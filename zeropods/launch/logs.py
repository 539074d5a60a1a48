"""What a run writes while it goes on: its log line by line, with the pods' names, and the progress told there."""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from zeropods.measure.record import read_config
from zeropods.tables import progress

LOG = "launch.log"
"""In the run folder: what the ranks wrote on stdout and stderr, attempt after attempt."""
LAST_LINES, KEPT_LINES = 8, 200
MOST_WAITING, SHOW_SECONDS = 100_000, 5.0
"""Lines that wait for a reader to take them, further ones are not shown; at the end so long is waited for it."""
OF_LAUNCHER = re.compile(r"\[[\d:., -]+\] \[[A-Z]+\] \[(?:launch|runner)\.py:")
"""In a line that DeepSpeed's launcher has logged: what the script said last stands between two of them."""
OF_SCRIPT = re.compile(r"(?:\S+: )?zeropods: (.+)")
"""What a script of ours said when it refused to train, behind its pod's name where it ran on one."""
LINE = re.compile(r"step (\d+) (loss|eval_loss) ([\d.e+-]*\d|nan|inf|-inf)$", re.MULTILINE)
"""What `train.log` says of a step."""
SESSION_END = re.compile(r"pdsh@[^:]*: (\S+): (?:ssh exited with exit code|ssh killed by signal|killed by signal) \d+")
"""What pdsh writes when a pod's command fails or its connection breaks; of one that ends well it says nothing."""


class GrowingFile:
    """A file to which another process appends lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def lines(self, *, ended: bool = False) -> list[str]:
        """The complete lines that were added since the last call; where nothing more will come, all of them."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new if ended else new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", "replace").removesuffix("\n").split("\n") if whole else []


@contextmanager
def following(folder: Path) -> Iterator[Callable[[], None]]:
    """A progress bar over the optimizer steps of a run; call what it yields now and then."""
    log = GrowingFile(folder / "train.log")

    def planned_steps() -> int | None:
        """By the run's `config.json`; None where the clock ends it."""
        config = read_config(folder)
        asked = config.identity
        if asked.get("max_train_seconds") or "epochs" not in asked:
            return None
        per_epoch = math.ceil(config.train_rows / config.effective_batch_size)
        return int(asked["max_steps"]) if asked["max_steps"] > 0 else math.ceil(asked["epochs"] * per_epoch)

    with progress("train", "steps") as bar:

        def tick() -> None:
            for step, name, loss in LINE.findall("\n".join(log.lines())):
                bar.total = bar.total or planned_steps()
                bar.set_postfix({name: f"{float(loss):.4g}"}, refresh=False)
                bar.update(int(step) - bar.n)

        yield tick
        bar.leave = bar.n > 0
        # Where the clock ended it, what was done was all.
        bar.total = bar.total or bar.n or None


class RunLog(GrowingFile):
    """The log of a run: to it the run's processes append; here each line is shown, and the last ones are kept.

    pdsh writes `ADDRESS: ` before each line, and `srun --label` the task's number, padded.
    """

    def __init__(
        self, folder: Path, show: Callable[[str], object] = lambda line: None, names: Mapping[str, str] | None = None
    ) -> None:
        """Make the folder of the run where it is not there.

        Args:
            show: gets every line that is added from now on.
            names: the pods' names, by what stands before their lines.
        """
        super().__init__(folder / LOG)
        folder.mkdir(parents=True, exist_ok=True)
        self.names = dict(names or {})
        self.failed: dict[str, float] = {}
        """When pdsh said that a pod's session has failed, by the pod's name and the monotonic clock."""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._shown: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        # A reader that takes nothing (a full pipe) keeps nobody from watching the run; one that is gone ends none.
        self._shower = threading.Thread(target=self._show, args=(show,), daemon=True)
        self._shower.start()

    def read(self, *, ended: bool = False) -> None:
        """Take up the lines that are new, as `GrowingFile.lines` has them."""
        for line in self.lines(ended=ended):
            if match := SESSION_END.fullmatch(line):
                self.failed.setdefault(self.names.get(match[1], match[1]), time.monotonic())
            place, _, text = line.lstrip(" ").partition(": ")
            named = f"{self.names[place]}: {text}" if place in self.names else line
            self._last.append(named)
            with suppress(queue.Full):
                self._shown.put_nowait(named)
        if ended:
            with suppress(queue.Full):
                self._shown.put_nowait(None)
            self._shower.join(SHOW_SECONDS)

    def _show(self, show: Callable[[str], object]) -> None:
        while (line := self._shown.get()) is not None:
            with suppress(OSError):
                show(line)

    def tail(self, pod: str | None = None) -> list[str]:
        """The last lines of a pod; of all where it wrote none, or none is named."""
        lines = [line for line in self._last if not OF_LAUNCHER.search(line)]
        return ([line for line in lines if line.startswith(f"{pod}: ")] or lines)[-LAST_LINES:]
