"""Runs by forks of one process: whatever comes of one, it leaves a record, and the next one begins."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from zeropods.data.causal_samples import write_text_sample
from zeropods.data.prepare import prepare
from zeropods.data.prepare_causal import CausalPreparation
from zeropods.data.tokenizers import GPT_TINY
from zeropods.launch.child import child_environment
from zeropods.launch.command import Launch
from zeropods.launch.local import train_arguments
from zeropods.launch.series import series_argv
from zeropods.measure.record import read_record
from zeropods.pods.hostfile import Host

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 200


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A series whose runs fail, are killed, and are interrupted; its folder and exit status."""
    folder = tmp_path_factory.mktemp("series")
    write_text_sample(folder / "text")
    for length in (64, 2048):
        wanted = CausalPreparation(task="lm", data=folder / "text", tokenizer=GPT_TINY, max_seq_length=length, limit=20)
        prepare(wanted, folder / str(length))
    launches = [planned(folder, "too-long", 2048), planned(folder, "killed", 64), planned(folder, "interrupted", 64)]
    runner = subprocess.Popen(
        series_argv(launches), env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        os.kill(rank_that_trains(folder / "killed"), signal.SIGKILL)
        rank_that_trains(folder / "interrupted")
        runner.send_signal(signal.SIGTERM)
        status = runner.wait(timeout=DEADLINE_SECONDS)
    finally:
        runner.kill()
        runner.wait()
    return folder, status


def planned(folder: Path, name: str, length: int) -> Launch:
    flags: dict[str, Any] = {
        **{"data": folder / str(length), "model_name_or_path": GPT_TINY, "init": "random", "threads": 1},
        **{"max_train_steps": 100_000, "logging_steps": 1, "save_steps": 0, "eval_steps": 0, "precision": "fp32"},
        "outputdir": folder / name,
    }
    return Launch(
        script=ROOT / "causal_train.py",
        arguments=tuple(train_arguments(**flags)),
        folder=folder / name,
        hosts=(Host("here", 1),),
        master_port=0,
        launcher="none",
    )


def rank_that_trains(run: Path) -> int:
    """The process that holds a run's lock, once it has trained some steps."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        log = run / "train.log"
        if log.is_file() and " loss " in log.read_text():
            return int((run / "run.lock").read_text().split()[1])
        time.sleep(0.1)
    raise AssertionError(f"{run.name} has not begun to train in time")


def test_a_run_that_fails_leaves_its_record(series: tuple[Path, int]) -> None:
    record = read_record(series[0] / "too-long")
    assert record.status == "failed" and "has 1024 positions" in record.reason


def test_a_run_that_was_killed_gets_a_record(series: tuple[Path, int]) -> None:
    record = read_record(series[0] / "killed")
    assert (record.status, record.reason) == ("failed", "killed by SIGKILL")


def test_an_interrupted_series_ends_its_run_in_order(series: tuple[Path, int]) -> None:
    assert read_record(series[0] / "interrupted").status == "interrupted"


def test_an_interrupted_series_says_so_by_its_status(series: tuple[Path, int]) -> None:
    assert series[1] == 128 + signal.SIGTERM


def test_each_run_keeps_what_it_said(series: tuple[Path, int]) -> None:
    assert "has 1024 positions" in (series[0] / "too-long" / "launch.log").read_text()
