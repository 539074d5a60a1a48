"""In a soak: real training with ZeRO on three pods that loses one, and goes on by itself on two."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.full.conftest import ROOT, TINY, run_several
from tests.full.launches import ended, left, until
from zeropods import pods
from zeropods.launch.fault import kill_pod
from zeropods.measure.heartbeat import read_beats
from zeropods.measure.record import read_json, read_record

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


@pytest.mark.parametrize("technique", ["zero1", "zero3", "zero3_offload"])
def test_a_run_that_loses_a_pod_goes_on_with_the_losses_of_an_undisturbed_one(
    technique: str, shared_home: Path, prepared: Path, tmp_path: Path
) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "lost"
    config = ["--deepspeed", ROOT / "dsconfig" / f"{technique}.json", "--dataset_path", prepared]
    run_several([*CURVE, *config], (1, alone, ["--gradient_accumulation_steps", 6]))
    cluster = pods.up(3, name="fewer")
    words = [cluster.name, "--restarts", 1, "--min-pods", 2, ROOT / "textsql_train.py", *CURVE, *config]
    words += ["--gradient_accumulation_steps", 2, "--outputdir", folder]
    command = [sys.executable, "-m", "tests.full.over_pdsh", *map(str, words)]
    try:
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            until(lambda: min((beat.step for beat in read_beats(folder).values()), default=0) > INTERVAL + 2, 120)
            killed_at = time.time()
            kill_pod(cluster, "pod2")
            said = ended(process, 200)
        assert not left(folder)
    finally:
        cluster.down()
    found, whole = read_record(folder), {entry.step: entry.loss for entry in read_record(alone).losses}
    assert (found.status, found.pods, found.steps, found.restarts) == ("ok", 2, STEPS, 1), said[-4000:]
    assert found.effective_batch_size == read_record(alone).effective_batch_size == 24
    entries = found.losses[:COMPARED]
    assert [entry.loss for entry in entries] == pytest.approx([whole[entry.step] for entry in entries], rel=SAME)
    assert len(entries) == COMPARED
    # At most one interval between checkpoints is done again, soon after the pod was lost.
    first = found.ranks[0]
    assert first.first_step >= INTERVAL and read_record(folder, attempt=0).steps - first.first_step <= INTERVAL
    (entry,) = read_json(folder / "restarts.json")["restarts"]
    assert entry["found_unix_seconds"] - killed_at < FIND_SECONDS
    assert first.ended_unix_seconds and first.wall_seconds and first.start_seconds
    began = first.ended_unix_seconds - first.wall_seconds + first.start_seconds
    assert began - entry["found_unix_seconds"] < RESUME_SECONDS
