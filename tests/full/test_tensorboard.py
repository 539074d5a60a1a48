"""TensorBoard: what a run leaves for it, and the application that shows it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.full.clusters import listens
from tests.full.conftest import ROOT, TINY, run_several
from tests.full.launches import until
from zeropods.measure.record import read_record
from zeropods.programs import free_port

APPLICATION = ROOT / "cml" / "run_tensorboard.py"
SECONDS = 60.0


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, as TensorBoard reads an event folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def zero1(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a configuration of dsconfig/, whose TensorBoard is on."""
    folder = tmp_path_factory.mktemp("runs") / "zero1"
    flags = ["--max_steps", 2, "--eval_steps", 0, "--deepspeed", ROOT / "dsconfig" / "zero1.json"]
    run_several([*TINY, "--dataset_path", prepared], (1, folder, flags))
    return folder


def test_training_and_validation_loss_are_the_record_s_in_one_chart(trained: Path) -> None:
    record = read_record(trained)
    for run, key in (("train", "losses"), ("validation", "eval_losses")):
        drawn = scalars(trained / "tensorboard" / run)["loss"]
        assert drawn == [(point.step, pytest.approx(point.loss)) for point in getattr(record, key)]


def test_step_time_speed_padding_and_memory_stand_beside_the_loss(trained: Path) -> None:
    drawn = scalars(trained / "tensorboard" / "train")
    rank, steps = read_record(trained).ranks[0], np.load(trained / "steps" / "0.npy")
    assert [value for _, value in drawn["step_seconds"]] == pytest.approx(steps, rel=1e-5)
    assert [value for _, value in drawn["samples_per_second"]] == pytest.approx(
        [32 / seconds for seconds in steps], rel=1e-5
    )
    assert len(drawn["padding_share"]) == 6 and all(0 <= share < 1 for _, share in drawn["padding_share"])
    assert all(50e6 < value <= 1.02 * rank.peak_resident_bytes for _, value in drawn["resident_bytes"])
    assert len(drawn["cpu_percent"]) == len(drawn["resident_bytes"])


def test_deepspeed_s_own_scalars_are_in_the_run_folder(zero1: Path) -> None:
    drawn = scalars(zero1 / "tensorboard" / "train_t5")
    # Its steps are samples, 32 rows each; beside the rate it writes times where its profiler is on.
    assert [step for step, _ in drawn["Train/Samples/lr"]] == [32, 64]


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


@pytest.fixture
def application(trained: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "CDSW_APP_PORT": str(port)}
    command = [sys.executable, str(APPLICATION), "--runs", str(trained.parent)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def served_runs(port: int, child: subprocess.Popen[bytes]) -> list[str]:
    """What TensorBoard's API lists, as soon as it lists anything."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert child.poll() is None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=5) as answer:
                if runs := json.load(answer):
                    return runs
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"no runs within {SECONDS} s")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_application_shows_the_runs_and_leaves_nothing(
    application: subprocess.Popen[bytes], port: int, end: signal.Signals
) -> None:
    runs = served_runs(port, application)
    assert {"tiny/tensorboard/train", "tiny/tensorboard/validation"} <= set(runs)
    application.send_signal(end)
    assert application.wait(timeout=20) == (-end if end == signal.SIGKILL else 0)
    until(lambda: not listens("127.0.0.1", port), 10)
    assert application.stderr is not None and b"Traceback" not in application.stderr.read()


def said(*arguments: object, **environment: str) -> str:
    """What the application says where it cannot start."""
    kept = {name: value for name, value in os.environ.items() if name != "CDSW_APP_PORT"}
    command = [sys.executable, str(APPLICATION), *map(str, arguments)]
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr


def test_it_says_in_one_line_why_it_cannot_start(tmp_path: Path, port: int) -> None:
    assert said() == "zeropods: no port: CDSW_APP_PORT is not set, as it is in a CML application; give --port\n"
    assert "no such folder" in said("--runs", tmp_path / "none", "--port", port)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        number = busy.getsockname()[1]
        busy_line = f"zeropods: port {number}: Address already in use; give another with --port\n"
        assert said(CDSW_APP_PORT=str(number)) == busy_line
