"""TensorBoard: what a run leaves for it, and the application that shows it."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.full.clusters import listens
from tests.full.conftest import ROOT
from tests.full.demo_page import refused
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


def test_a_killed_application_leaves_nothing(trained: Path) -> None:
    """What it shows, and its end by Ctrl-C, are looked at in the browser."""
    port = free_port("127.0.0.1")
    command = [sys.executable, str(APPLICATION), "--runs", str(trained.parent), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as application:
        try:
            until(lambda: listens("127.0.0.1", port), SECONDS)
        finally:
            application.kill()
    until(lambda: not listens("127.0.0.1", port), 10)


def test_it_says_in_one_line_why_it_cannot_start_and_so_does_the_demo(tmp_path: Path) -> None:
    for application in (APPLICATION, APPLICATION.with_name("run_demo.py")):
        said = "no port: CDSW_APP_PORT is not set, as it is in a CML application; give --port"
        assert refused(application) == f"zeropods: {said}\n"
    assert "no such folder" in refused(APPLICATION, "--runs", tmp_path / "none", "--port", free_port("127.0.0.1"))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        number = busy.getsockname()[1]
        busy_line = f"zeropods: port {number}: Address already in use; give another with --port\n"
        assert refused(APPLICATION, CDSW_APP_PORT=str(number)) == busy_line
