"""Equal effective batch and seed, FP32, no dropout: the same numbers on any number of pods, by every technique."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full.conftest import ROOT, TINY, run_several
from zeropods.launch.command import plan_launch
from zeropods.launch.outcome import failure
from zeropods.launch.supervisor import run_launch
from zeropods.measure.profile_checks import check
from zeropods.measure.record import read_record
from zeropods.pods.cluster import Cluster

EFFECTIVE_BATCH = 12
STEPS = 6
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0
"""Below the gradients' norms (1.6 to 5.3 here), so that clipping takes part in every step."""
T5_TINY_PARAMETERS = 1_050_368
TECHNIQUES = ("ddp", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")
PROFILED = {"zero1profiler": "zero1", "zero2profiler": "zero2", "zero3profiler": "zero3_offload"}
SEVEN = [
    ("ddp", 2), ("zero1profiler", 2), ("zero1_offload", 2), ("zero2", 3), ("zero2_offload", 1), ("zero3", 3),
    ("zero3profiler", 2),
]  # fmt: skip
"""Every technique, every number of ranks."""
ALL = [(name, pods) for name in (*TECHNIQUES, *PROFILED) for pods in (1, 2, 3) if (name, pods) != ("ddp", 1)]
ON_PODS = ALL if os.environ.get("ZEROPODS_SOAK") == "1" else []
"""Those that are launched over pods, which takes longer than they do; else only notebooks launch and compare some."""
CURVE = [
    "--max_steps", STEPS, "--eval_steps", STEPS // 2, "--precision", "fp32", "--threads", 1,
    "--learning_rate", LEARNING_RATE, "--max_grad_norm", MAX_GRAD_NORM,
]  # fmt: skip


def flags(name: str, ranks: int) -> list[object]:
    """What makes a run one of `dsconfig/NAME.json`, of `ddp`, or of one process alone, on so many ranks."""
    config = [] if name in ("none", "ddp") else ["--deepspeed", ROOT / "dsconfig" / f"{name}.json"]
    return ["--per_device_train_batch_size", EFFECTIVE_BATCH // ranks, *config]


def over_pods(cluster: Cluster, pods: int, name: str, prepared: Path, folder: Path) -> None:
    """Train on so many pods of a cluster."""
    given = [*TINY, *CURVE, *flags(name, pods), "--dataset_path", prepared, "--outputdir", folder]
    planned = plan_launch(cluster, "textsql_train.py", [str(argument) for argument in given], pods=pods)
    record = run_launch(planned, cluster)
    assert (record.status, record.pods) == ("ok", pods), failure(folder, record)


@pytest.fixture(scope="module")
def forked(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others must equal, in one process without DeepSpeed, and those that need no pods."""
    folder = tmp_path_factory.mktemp("forked")
    pairs = [("none", 1), *(pair for pair in SEVEN if pair not in ON_PODS)]
    runs = [(ranks, folder / f"{name}-{ranks}", flags(name, ranks)) for name, ranks in pairs]
    # The first one's model, trained further.
    loaded = ["--init", "pretrained", "--model_id", folder / "none-1" / "model", "--max_steps", 3, "--eval_steps", 0]
    further = [("none", 1), ("zero3_offload", 2)]
    runs += [(ranks, folder / f"loaded-{ranks}", [*flags(name, ranks), *loaded]) for name, ranks in further]
    run_several([*TINY, *CURVE, "--dataset_path", prepared], *runs)
    return folder


def values(entries: list[dict[str, float]]) -> list[float]:
    return [entry.loss for entry in entries]


def weights(run: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(run / "model" / "model.safetensors")


@pytest.mark.skipif(not ON_PODS, reason="`make soak` launches them over pods")
@pytest.mark.parametrize(("name", "pods"), ON_PODS or ALL[:1])
def test_a_technique_on_pods_gives_the_numbers_of_one_process(
    name: str, pods: int, cluster: Cluster, forked: Path, prepared: Path, tmp_path: Path
) -> None:
    over_pods(cluster, pods, name, prepared, tmp_path / "run")
    assert_same_numbers(tmp_path / "run", forked / "none-1", name, pods)


@pytest.mark.parametrize(("name", "ranks"), [pair for pair in SEVEN if pair not in ON_PODS])
def test_a_technique_gives_the_numbers_of_one_process(name: str, ranks: int, forked: Path) -> None:
    assert_same_numbers(forked / f"{name}-{ranks}", forked / "none-1", name, ranks)


def assert_same_numbers(run: Path, alone: Path, name: str, ranks: int) -> None:
    record, expected = read_record(run), read_record(alone)
    assert (record.technique, record.world_size) == (PROFILED.get(name, name), ranks)
    assert record.effective_batch_size == expected.effective_batch_size == EFFECTIVE_BATCH
    assert len(record.losses) == STEPS
    assert values(record.losses) == pytest.approx(values(expected.losses), rel=1e-3)
    assert values(record.eval_losses) == pytest.approx(values(expected.eval_losses), rel=1e-3)
    assert_weights_are_those_of(alone, run)
    assert_loads_without_a_missing_weight(run)
    assert (run / "profile.txt").is_file() == (name in PROFILED)
    if name in PROFILED:
        assert_report_is_read_and_its_faults_are_found(run, name)


def assert_report_is_read_and_its_faults_are_found(run: Path, name: str) -> None:
    """What this version of DeepSpeed writes is read to its last line, and mended to what arithmetic says."""
    checked = check(run)
    always = {"root_latency", "root_flops_per_second", "profiled_step"}
    of_stage = {"linear_counted_twice", "sharded_parameters"} if name == "zero3profiler" else {"shared_parameters"}
    assert not checked.report.missing and checked.root is not None
    # How much the profiler costs differs between machines.
    assert {fault.name for fault in checked.faults} - {"profiler_overhead"} == always | of_stage
    assert checked.figures["parameters_per_gpu"] == pytest.approx(T5_TINY_PARAMETERS, rel=0.005)
    assert checked.figures["forward_macs"] == pytest.approx(checked.closed_form_macs, rel=0.01)


def assert_weights_are_those_of(alone: Path, run: Path) -> None:
    """Within the furthest that AdamW can have moved them apart, and all but a fiftieth much nearer.

    On some processors the sums of smaller batches are rounded otherwise, and a unit of a feed-forward layer whose
    input is near zero is on in one run and off in the other. AdamW then moves its weights apart: 0.6 % of all, once.
    """
    ours, theirs = weights(run), weights(alone)
    assert ours.keys() == theirs.keys()
    assert {value.dtype for value in ours.values()} == {np.dtype("float32")}
    apart = np.concatenate([np.abs(ours[name] - theirs[name]).ravel() for name in theirs])
    assert apart.max() <= 2 * LEARNING_RATE * STEPS
    assert np.mean(apart <= 1e-5) >= 0.98


def assert_loads_without_a_missing_weight(run: Path) -> None:
    from transformers import T5ForConditionalGeneration

    model, loaded = T5ForConditionalGeneration.from_pretrained(run / "model", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()


def test_a_loaded_model_that_zero3_divides_is_trained_and_saved_as_by_one_process(forked: Path) -> None:
    one, two = (forked / f"loaded-{ranks}" for ranks in (1, 2))
    assert values(read_record(two).losses) == pytest.approx(values(read_record(one).losses), rel=1e-4)
    # It went on from what was learned.
    assert values(read_record(one).losses)[0] < values(read_record(forked / "none-1").losses)[0] - 1
    assert_weights_are_those_of(one, two)
    assert_loads_without_a_missing_weight(two)
