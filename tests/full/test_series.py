"""Runs by forks of one process: whatever comes of one, it leaves a record, and the next one begins."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.full.conftest import ROOT
from tests.full.launches import until
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.tokenizers import GPT_TINY
from zeropods.measure.record import read_record

DEADLINE_SECONDS = 200
SERIES = """
import json, sys
from zeropods.launch.notebook import train_series

if __name__ == "__main__":
    train_series("causal_train.py", json.loads(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def series(text_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A series whose runs fail, are killed, and are interrupted; its folder and exit status."""
    folder = tmp_path_factory.mktemp("series")
    for length in (64, 2048):
        wanted = Preparation(task="lm", data=text_sample, tokenizer=GPT_TINY, max_seq_length=length, limit=20)
        prepare(wanted, folder / str(length))
    runs = [flags(folder, "too-long", 2048), flags(folder, "killed", 64), flags(folder, "interrupted", 64, slots=2)]
    (folder / "series.py").write_text(SERIES)
    runner = subprocess.Popen(
        [sys.executable, folder / "series.py", json.dumps(runs)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        os.kill(rank_that_trains(folder / "killed"), signal.SIGKILL)
        rank_that_trains(folder / "interrupted")
        runner.send_signal(signal.SIGTERM)
        status = runner.wait(timeout=DEADLINE_SECONDS)
    finally:
        runner.kill()
        runner.wait()
    return folder, status


def flags(folder: Path, name: str, length: int, **more: int) -> dict[str, Any]:
    return {
        **{"data": str(folder / str(length)), "model_name_or_path": GPT_TINY, "init": "random", "threads": 1},
        **{"max_train_steps": 100_000, "logging_steps": 1, "save_steps": 0, "eval_steps": 0, "precision": "fp32"},
        **{"outputdir": str(folder / name), **more},
    }


def rank_that_trains(run: Path) -> int:
    """The process that holds a run's lock, once it has trained some steps."""
    log = run / "train.log"
    until(lambda: log.is_file() and " loss " in log.read_text(), DEADLINE_SECONDS)
    return int((run / "run.lock").read_text().split()[1])


def test_a_run_that_fails_leaves_its_record_and_its_words(series: tuple[Path, int]) -> None:
    record = read_record(series[0] / "too-long")
    assert record.status == "failed" and "has 1024 positions" in (record.reason or "")
    assert "has 1024 positions" in (series[0] / "too-long" / "launch.log").read_text()


def test_a_run_that_was_killed_gets_a_record(series: tuple[Path, int]) -> None:
    record = read_record(series[0] / "killed")
    assert (record.status, record.reason) == ("failed", "rank 0 left no measurement: killed by SIGKILL")


def test_an_interrupted_series_ends_its_run_in_order_and_says_so_by_its_status(series: tuple[Path, int]) -> None:
    record = read_record(series[0] / "interrupted")
    assert (record.status, record.world_size) == ("interrupted", 2)
    assert series[1] == 128 + signal.SIGTERM


def test_an_interrupt_while_the_fork_server_imports_ends_a_series_at_once(
    series: tuple[Path, int],
) -> None:
    runner = subprocess.Popen(
        [sys.executable, series[0] / "series.py", json.dumps([flags(series[0], "early", 64)])],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(
            lambda: "zeropods.launch.forks" in [w for p in psutil.Process(runner.pid).children() for w in p.cmdline()]
        )
        (server,) = psutil.Process(runner.pid).children()
        runner.send_signal(signal.SIGINT)
        assert runner.wait(timeout=30) != 0
        until(lambda: not server.is_running())
    finally:
        runner.kill()
        runner.wait()
    assert not (series[0] / "early" / "config.json").exists()
