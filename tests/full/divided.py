"""Runs of two ranks each that keep their checkpoints: ZeRO-1, told to save and resumed; ZeRO-3 with BF16 weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.full.conftest import ROOT
from tests.full.test_checkpoint_training import several, started, until

SECONDS = 300.0
"""DeepSpeed may have to compile first."""
ZERO1 = ("--deepspeed", str(ROOT / "dsconfig" / "zero1.json"), "--max_steps", "20", "--save_steps", "20")
ZERO3 = ("--deepspeed", str(ROOT / "dsconfig" / "zero3.json"), "--max_steps", "2", "--save_steps", "2")


def train_divided(prepared: Path, folder: Path) -> None:
    """Make `zero1` and `zero3` in a folder; of `zero1` only the second rank hears a signal, in its third step."""
    one, three = folder / "zero1", folder / "zero3"
    runs = several(prepared, (2, one, ZERO1), (2, one, ZERO1), (2, three, (*ZERO3, "--precision", "bf16")))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ZEROPODS_SAVE_SIGNAL", "USR1")
        with started(runs, folder / "said") as child:
            until(lambda: (one / "train.log").exists() and "step 3 " in (one / "train.log").read_text(), child)
            os.kill(second_rank(child.pid, one), signal.SIGUSR1)
            # The highest of their statuses: that of the run which was told to save.
            assert child.wait(SECONDS) == os.EX_TEMPFAIL, (folder / "said").read_text()[-4000:]


def second_rank(parent: int, run: Path) -> int:
    """The process of rank 1, which does not hold the run's lock."""
    first = int((run / "run.lock").read_text().split()[1])
    return next(rank.pid for rank in psutil.Process(parent).children() if rank.pid != first)
