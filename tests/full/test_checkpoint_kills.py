"""A writer killed at any point leaves the old or the new checkpoint, whole."""

import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.fast.test_checkpoints import an_origin, content_of, quick_folder, read, save
from zeropods import files
from zeropods.train import checkpoints as protocol

ROOM = str(Path(protocol.__file__).parent)
SEED = random.SystemRandom().randrange(2**32)
STEP = 20


@pytest.fixture
def copies() -> Iterator[Callable[[], Path]]:
    """Gives, as often as it is called, a folder of its own with one complete checkpoint, of step 10."""
    with quick_folder() as run:
        save(run / "made", 10)

        def copy() -> Path:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            return Path(shutil.copytree(run / "made", run / "checkpoints"))

        yield copy


def in_child(act: Callable[[], object]) -> int:
    """Run something in a fork; returns its exit status, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(line: int, act: Callable[[], object]) -> int:
    """Run something that dies by SIGKILL before the n-th line of the protocol, in whichever thread; returns lines."""
    passed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.startswith((ROOM, files.__file__)):
            return None
        passed += event == "line"
        if passed == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return passed


def newest(folder: Path) -> Path:
    """The newest checkpoint that counts."""
    found = protocol.newest_good(folder, lambda of: of.other_run(an_origin()))
    assert found is not None
    return found[0]


def check(folder: Path) -> bool:
    """That what counts is the old or the new checkpoint, bit by bit; whether it is the new one."""
    path = newest(folder)
    new = path.name == f"checkpoint-{STEP}"
    assert read(path) == content_of(STEP if new else 10)
    return new


def save_and_prune(folder: Path, which: str = "first") -> None:
    """The whole protocol: save a step, then delete the one before."""
    save(folder, STEP, save=which)
    protocol.prune(folder, STEP, an_origin(), 1)


def check_goes_on(folder: Path) -> None:
    """That the next attempt saves the same step whole, and that nothing of the killed one stays."""
    save_and_prune(folder, "second")
    assert newest(folder) == folder / f"checkpoint-{STEP}"
    assert read(folder / f"checkpoint-{STEP}") == content_of(STEP, "second")
    assert set(os.listdir(folder)) == {f"checkpoint-{STEP}", "latest.json"}


def test_killed_at_forty_random_lines(copies: Callable[[], Path]) -> None:
    folder = copies()
    lines = killed_at(-1, lambda: save_and_prune(folder))
    chosen = random.Random(SEED)
    outcomes = set()
    for number in range(40):
        # Stratified, so that every part of the protocol has its kills.
        line = int((number + chosen.random()) * lines / 40) + 1
        folder = copies()
        status = in_child(lambda at=line, to=folder: killed_at(at, lambda: save_and_prune(to)))
        assert status in (-signal.SIGKILL, 0), f"seed {SEED}, line {line}"
        outcomes.add((status, check(folder)))
        if number % 4 == 0:
            check_goes_on(folder)
    assert {(-signal.SIGKILL, False), (-signal.SIGKILL, True)} <= outcomes
