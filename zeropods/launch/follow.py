"""The progress of a run, read from its `train.log`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from zeropods.measure.records import read_json
from zeropods.measure.run_folder import CONFIG
from zeropods.report.progress import progress

LINE = re.compile(r"step (\d+) (loss|eval_loss) ([\d.e+-]*\d|nan|inf|-inf)$")


class Entry(NamedTuple):
    """A line of the log that says how far the run is."""

    step: int
    name: str
    """`loss` or `eval_loss`."""
    loss: float


class Tail:
    """The entries that a growing log got since they were last asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.is_file() else 0

    def entries(self) -> list[Entry]:
        """New entries, of complete lines only."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        matches = map(LINE.search, whole.decode("utf-8", "replace").splitlines())
        return [Entry(int(m[1]), m[2], float(m[3])) for m in matches if m]


@contextmanager
def following(folder: Path) -> Iterator[Callable[[], None]]:
    """A progress bar over the optimizer steps of a run; call what it yields now and then."""
    tail = Tail(folder / "train.log")
    with progress("train", "steps") as bar:

        def tick() -> None:
            for entry in tail.entries():
                bar.total = bar.total or planned_steps(read_json(folder / CONFIG))
                bar.set_postfix({entry.name: f"{entry.loss:.4g}"}, refresh=False)
                bar.update(entry.step - bar.n)

        yield tick
        bar.leave = bar.n > 0
        # Where the clock ended it, what was done was all.
        bar.total = bar.total or bar.n or None


def planned_steps(config: dict[str, Any]) -> int | None:
    """Optimizer steps of a run; None where the clock ends it."""
    asked = config.get("identity", {})
    if asked.get("max_train_seconds") or "epochs" not in asked:
        return None
    if asked["max_steps"] > 0:
        return asked["max_steps"]
    return math.ceil(asked["epochs"] * math.ceil(config["train_rows"] / config["effective_batch_size"]))
