"""Turns at an extension: one process at a time, and none waits for one that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeropods.programs import STALE_SECONDS, Turn, is_taken

HOLD = """
import sys
from zeropods.programs import Turn
Turn(sys.argv[1]).try_acquire()
print("taken", flush=True)
sys.stdin.read()
"""
SECONDS = 20.0


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Where torch would keep its own lock of an extension."""
    return tmp_path / "lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the turn until it ends."""
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
        process.kill()


@pytest.fixture
def waiting(lock: Path) -> Iterator[threading.Thread]:
    """A thread that waits for the turn, takes it and gives it back."""

    def take() -> None:
        turn = Turn(str(lock))
        turn.try_acquire()
        turn.release()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    yield thread
    thread.join(SECONDS)


def test_a_second_process_waits_for_the_first(holder: subprocess.Popen[str], waiting: threading.Thread) -> None:
    waiting.join(0.3)
    assert waiting.is_alive()
    holder.communicate("", timeout=SECONDS)
    waiting.join(SECONDS)
    assert not waiting.is_alive()


def test_the_turn_of_a_killed_process_is_free_at_once(holder: subprocess.Popen[str], waiting: threading.Thread) -> None:
    holder.send_signal(signal.SIGKILL)
    waiting.join(SECONDS)
    assert not waiting.is_alive()


def test_a_turn_is_known_as_taken_while_it_is(holder: subprocess.Popen[str], lock: Path) -> None:
    assert is_taken(lock.parent)
    holder.communicate("", timeout=SECONDS)
    assert not is_taken(lock.parent)


def test_an_extension_that_nobody_has_loaded_is_not_taken(tmp_path: Path) -> None:
    assert not is_taken(tmp_path)


def test_a_lock_of_torch_itself_is_waited_for(lock: Path) -> None:
    lock.touch()
    threading.Timer(0.3, lock.unlink).start()
    began = time.monotonic()
    Turn(str(lock)).try_acquire()
    assert not lock.exists() and time.monotonic() - began >= 0.2


def test_a_lock_of_torch_itself_that_was_left_is_removed(lock: Path) -> None:
    lock.touch()
    os.utime(lock, (time.time() - STALE_SECONDS - 1,) * 2)
    Turn(str(lock)).try_acquire()
    assert not lock.exists()
