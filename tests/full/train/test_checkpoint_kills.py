"""A writer killed at any point leaves the old or the new checkpoint, whole."""

import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fast.train.test_checkpoints import an_origin, content_of, found, kept, quick_folder, read, save
from zeropods import files
from zeropods.train import checkpoints as protocol

ROOM = str(Path(protocol.__file__).parent)
SEED = random.SystemRandom().randrange(2**32)
STEP = 20


def save_and_prune(folder: Path, which: str) -> None:
    """The whole protocol: save a step, then delete the one before."""
    save(folder, STEP, save=which)
    protocol.prune(folder, STEP, an_origin(), 1)


def lines_passed(folder: Path, deadly: int | None = None) -> int:
    """Save and prune, and die by SIGKILL before that line of the protocol, in whichever thread; returns lines."""
    passed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.startswith((ROOM, files.__file__)):
            return None
        passed += event == "line"
        if passed == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        save_and_prune(folder, "first")
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return passed


def status_of_one_killed(folder: Path, line: int) -> int:
    """What a fork came to that saves, prunes and dies there: its exit status, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            lines_passed(folder, line)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_forty_random_lines() -> None:
    chosen, outcomes = random.Random(SEED), set()
    with quick_folder() as run:
        save(run / "of-step-10", 10)
        lines = lines_passed(Path(shutil.copytree(run / "of-step-10", run / "counted")))
        for number in range(40):
            # Stratified, so that every part of the protocol has its kills.
            line = int((number + chosen.random()) * lines / 40) + 1
            folder = Path(shutil.copytree(run / "of-step-10", run / str(number)))
            status = status_of_one_killed(folder, line)
            assert status in (-signal.SIGKILL, 0), f"seed {SEED}, line {line}"
            # What counts is the old or the new checkpoint, bit by bit.
            newest, _ = found(folder)
            step = STEP if newest == f"checkpoint-{STEP}" else 10
            assert newest and read(folder / newest) == content_of(step)
            outcomes.add((status, step))
            if number % 4 == 0:
                # The next attempt saves the same step whole, and nothing of the killed one stays.
                save_and_prune(folder, "second")
                assert found(folder)[0] == f"checkpoint-{STEP}" and kept(folder) == [STEP]
                assert read(folder / f"checkpoint-{STEP}") == content_of(STEP, "second")
                assert set(os.listdir(folder)) == {f"checkpoint-{STEP}", "latest.json"}
    assert {(-signal.SIGKILL, 10), (-signal.SIGKILL, STEP)} <= outcomes
