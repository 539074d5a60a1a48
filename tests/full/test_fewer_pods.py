"""In a soak: real training with ZeRO on three pods that loses one, and goes on by itself on two."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.full.conftest import ROOT, TINY, run_several
from tests.full.launches import ended, left, record, until
from zeropods import pods
from zeropods.launch.fault import kill_pod
from zeropods.measure.heartbeat import read_beats
from zeropods.measure.record import read_json

pytestmark = pytest.mark.skipif(
    os.environ.get("ZEROPODS_SOAK") != "1", reason="trains and converts for minutes: make soak"
)
STEPS, INTERVAL, COMPARED = 40, 5, 10
FIND_SECONDS, RESUME_SECONDS = 10, 60
SAME = 1e-5
"""Relative: FP32, no dropout. Sums in another order grow from 1e-7 to some 1e-5 in the thirty steps that follow."""
CURVE = [
    *TINY, "--max_steps", STEPS, "--save_steps", INTERVAL, "--eval_steps", 0, "--threads", 1,
    "--learning_rate", 3e-4, "--per_device_train_batch_size", 4,
]  # fmt: skip


@dataclass(frozen=True)
class Lost:
    """A run on three pods, of which the second was killed; and one in one process that nothing disturbed."""

    folder: Path
    undisturbed: Path
    said: str
    killed_unix_seconds: float
    left: list[int]

    @property
    def journal(self) -> dict[str, Any]:
        (entry,) = read_json(self.folder / "restarts.json")["restarts"]
        return dict(entry)


@pytest.fixture(scope="module", params=["zero1", "zero3", "zero3_offload"])
def lost(
    request: pytest.FixtureRequest, shared_home: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lost]:
    area = tmp_path_factory.mktemp(request.param)
    config = ["--deepspeed", ROOT / "dsconfig" / f"{request.param}.json", "--dataset_path", prepared]
    run_several([*CURVE, *config], (1, area / "alone", ["--gradient_accumulation_steps", 6]))
    cluster = pods.up(3, name="fewer")
    folder = area / "lost"
    words = [cluster.name, "--restarts", 1, "--min-pods", 2, ROOT / "textsql_train.py", *CURVE, *config]
    command = [sys.executable, "-m", "tests.full.over_pdsh", *words, "--gradient_accumulation_steps", 2]
    try:
        process = subprocess.Popen(
            [*map(str, command), "--outputdir", str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        until(lambda: min((beat.step for beat in read_beats(folder).values()), default=0) > INTERVAL + 2, 120)
        at = time.time()
        kill_pod(cluster, "pod2")
        yield Lost(folder, area / "alone", ended(process, 200), at, left(folder))
    finally:
        process.kill()
        cluster.down()


def test_it_ends_well_on_the_two_that_are_left(lost: Lost) -> None:
    found = record(lost.folder)
    assert (found["status"], found["pods"], found["steps"], found["restarts"]) == ("ok", 2, STEPS, 1), lost.said[-4000:]


def test_its_effective_batch_is_what_it_was(lost: Lost) -> None:
    assert (record(lost.folder)["effective_batch_size"], record(lost.undisturbed)["effective_batch_size"]) == (24, 24)


def test_each_of_the_next_ten_losses_is_that_of_the_undisturbed_run(lost: Lost) -> None:
    whole = {entry["step"]: entry["loss"] for entry in record(lost.undisturbed)["losses"]}
    entries = record(lost.folder)["losses"][:COMPARED]
    assert len(entries) == COMPARED
    assert [entry["loss"] for entry in entries] == pytest.approx([whole[entry["step"]] for entry in entries], rel=SAME)


def test_at_most_one_interval_is_done_again(lost: Lost) -> None:
    first = record(lost.folder)["ranks"][0]["first_step"]
    assert first >= INTERVAL and read_json(lost.folder / "attempts" / "0.json")["steps"] - first <= INTERVAL


def test_it_is_found_and_goes_on_in_time(lost: Lost) -> None:
    found, first = lost.journal["found_unix_seconds"], record(lost.folder)["ranks"][0]
    began = first["ended_unix_seconds"] - first["wall_seconds"] + first["start_seconds"]
    assert found - lost.killed_unix_seconds < FIND_SECONDS and began - found < RESUME_SECONDS


def test_nothing_of_it_is_left(lost: Lost) -> None:
    assert not lost.left
