"""ZeRO++ on two pods of two slots: hpZ trains, saves and resumes there, to the numbers of ZeRO-3."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full.conftest import ROOT, TINY, run_several
from tests.full.train.test_checkpoint_training import assert_same_losses
from tests.full.train.test_same_numbers import KEPT, T5_TINY_PARAMETERS, weights
from tests.full.train.test_train import losses
from zeropods import pods
from zeropods.launch.command import plan_launch
from zeropods.launch.outcome import failure
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.supervisor import run_launch
from zeropods.measure.record import Record, read_record
from zeropods.pods.cluster import Cluster

SLOTS, SAVED, STEPS = 2, 2, 4
FLAGS = [
    *TINY, "--max_steps", STEPS, "--save_steps", SAVED, "--eval_steps", SAVED, "--threads", 1,
    "--per_device_train_batch_size", 3,
]  # fmt: skip


@pytest.fixture(scope="module")
def two_by_two(shared_home: Path) -> Iterator[Cluster]:
    """Two pods of two slots."""
    up = pods.up(2, slots=SLOTS, name="two-by-two")
    yield up
    up.down()


@pytest.fixture(scope="module")
def undisturbed(two_by_two: Cluster, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by `dsconfig/zero3++.json`, which saves a checkpoint midway."""
    folder = tmp_path_factory.mktemp("zeropp") / "zero3++"
    launched(two_by_two, prepared, folder)
    return folder


def launched(cluster: Cluster, prepared: Path, folder: Path) -> Record:
    """Train by `dsconfig/zero3++.json` on all pods of a cluster, to the end."""
    given = [*FLAGS, "--deepspeed", ROOT / "dsconfig" / "zero3++.json", "--dataset_path", prepared]
    words = [str(word) for word in (*given, "--outputdir", folder)]
    call = ScriptCall.of("textsql_train.py", words)
    record = run_launch(plan_launch(cluster, call), cluster)
    assert record.status == "ok", failure(folder, record)
    return record


def test_hpz_trains_on_two_pods_of_two_slots_to_the_numbers_of_zero3(
    undisturbed: Path, prepared: Path, tmp_path: Path
) -> None:
    record = read_record(undisturbed)
    assert (record.technique, record.pods, record.slots) == ("zero3++", 2, SLOTS)
    assert record.technique_text == f"zero3++ (zero_hpz_partition_size {SLOTS})"

    plain = tmp_path / "zero3"
    given = ["--deepspeed", ROOT / "dsconfig" / "zero3.json"]
    run_several([*FLAGS, "--dataset_path", prepared], (2 * SLOTS, plain, given), slots=SLOTS)
    expected = read_record(plain)
    assert expected.technique == "zero3"
    # What changes is only from where weights are gathered. The ranks are the same, so they add up in the same order.
    assert losses(record) == pytest.approx(losses(expected), rel=1e-6)
    assert losses(record, "eval_losses") == pytest.approx(losses(expected, "eval_losses"), rel=1e-6)
    ours, theirs = weights(undisturbed), weights(plain)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[name] - theirs[name]).max() for name in theirs) <= 1e-6

    # What is not kept gathered is there a second time, divided among the slots of a pod.
    second_copy = 4 * (T5_TINY_PARAMETERS - KEPT) / SLOTS
    for rank, rank_without in zip(record.ranks, expected.ranks, strict=True):
        assert rank.live_bytes is not None and rank_without.live_bytes is not None
        more = rank.live_bytes.parameters - rank_without.live_bytes.parameters
        assert more == pytest.approx(second_copy, rel=0.02)


def test_a_run_with_hpz_goes_on_from_its_checkpoint_on_two_pods_of_two_slots(
    undisturbed: Path, two_by_two: Cluster, prepared: Path, tmp_path: Path
) -> None:
    # As if it had been killed between its two checkpoints.
    killed = tmp_path / "killed"
    shutil.copytree(undisturbed, killed)
    (killed / "record.json").unlink()
    shutil.rmtree(killed / "checkpoints" / f"checkpoint-{STEPS}")
    again = launched(two_by_two, prepared, killed)
    assert (again.attempt, again.technique) == (1, "zero3++")
    assert_same_losses(killed, undisturbed, SAVED, STEPS)
