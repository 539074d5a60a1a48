"""Faults in one rank of a real run, from outside its process."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.full.launches import until
from zeropods.measure.heartbeat import read_beats

SECONDS = 600.0
"""Seconds within which a run begins, on a machine with other work."""
LIBRARY = Path(__file__).parent / "faulty_library"
"""Folder for PYTHONPATH: with it, a rank does what `give_order` says."""


def give_order(folder: Path, rank: int, fault: str) -> None:
    """Let a rank of a run have a fault of `faulty_library` after its present step."""
    written = folder / f".fault.{rank}"
    written.write_text(fault)
    written.rename(folder / f"fault.{rank}")


def kill_rank(folder: Path, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the process of a rank."""
    os.kill(read_beats(folder)[rank].pid, number)


def until_trains(folder: Path, ranks: int, ended: Callable[[], object] = lambda: None, steps: int = 3) -> None:
    """Wait until every rank of a run has done some steps; it is an error if the run has `ended` before."""

    def train() -> bool:
        assert ended() is None, f"{folder}: the run ended before it was to"
        beats = read_beats(folder)
        return len(beats) == ranks and all(beat.step >= steps for beat in beats.values())

    until(train, SECONDS)
