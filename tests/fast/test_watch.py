"""Tests that hang, or leave something behind, as `make test` would see them."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.full.launches import ROOT, until
from zeropods.pods.processes import find_process, is_alive

CONFTEST = """
from tests.watch import Watch
def pytest_configure(config):
    config.pluginmanager.register(Watch(grace_seconds=0.5))
"""
IT = """
import pathlib, pytest, subprocess, time
@pytest.fixture
def made():
    pathlib.Path("made").touch()
    yield
    pathlib.Path("made").unlink()
def test_leaves():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("pid").write_text(str(child.pid))
def test_hangs(made):
    time.sleep(600)
"""


def test_an_interrupted_run_names_what_had_not_ended_and_kills_what_was_left_behind(tmp_path: Path) -> None:
    for name, text in (("conftest.py", CONFTEST), ("pytest.ini", "[pytest]\n"), ("test_it.py", IT)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    until((tmp_path / "made").exists)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert "test_it.py::test_hangs" in said and "NOT ENDED after" in said
    assert not (tmp_path / "made").exists()
    pid = int((tmp_path / "pid").read_text())
    assert f"LEFT BEHIND and killed: {pid} sleep 600" in said
    until(lambda: (found := find_process(pid)) is None or not is_alive(found))
