"""Tests that hang, or leave something behind, as `make test` would see them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zeropods.pods.processes import find_process, is_alive

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.watch import Watch
def pytest_configure(config):
    config.pluginmanager.register(Watch(grace_seconds=0.5))
"""
LEAVES = """
import pathlib, subprocess
def test_leaves():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("pid").write_text(str(child.pid))
"""
HANGS = """
import pathlib, pytest, time
@pytest.fixture(autouse=True)
def made():
    pathlib.Path("made").touch()
    yield
    pathlib.Path("made").unlink()
def test_hangs():
    time.sleep(600)
"""


def begun(folder: Path, test: str) -> subprocess.Popen[str]:
    """A run of a test file of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def until(happened: Callable[[], bool]) -> bool:
    """Wait until something has happened; whether it has."""
    deadline = time.monotonic() + 30
    while not (so := happened()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return so


def printed(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=60)[0]


def test_a_process_that_is_left_behind_is_named_and_killed(tmp_path: Path) -> None:
    said = printed(begun(tmp_path, LEAVES))
    pid = int((tmp_path / "pid").read_text())
    assert f"LEFT BEHIND and killed: {pid} sleep 600" in said
    assert until(lambda: (found := find_process(pid)) is None or not is_alive(found))


def test_an_interrupted_run_names_the_test_that_had_not_ended(tmp_path: Path) -> None:
    process = begun(tmp_path, HANGS)
    assert until((tmp_path / "made").exists)
    process.send_signal(signal.SIGINT)
    said = printed(process)
    assert "test_it.py::test_hangs" in said and "NOT ENDED after" in said
    assert not (tmp_path / "made").exists()
