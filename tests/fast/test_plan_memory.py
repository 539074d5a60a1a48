"""Memory by the closed form: by hand for smallest models, and against the published table."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_plan_shapes import LLAMA_WORK, T5_WORK
from tests.made import a_rank, a_record, as_record
from zeropods.measure.calibration import planned
from zeropods.plan.estimate import request_for
from zeropods.plan.facts import shape_named
from zeropods.plan.memory import PlannedMemory, plan_memory
from zeropods.plan.models import known_config
from zeropods.plan.workload import Workload, ZeroSettings, read_zero_settings
from zeropods.techniques import TECHNIQUES, technique_named

ROOT = Path(__file__).resolve().parents[2]
P = 224
"""Parameters of the smallest T5."""
TOUCHED = 176
"""Of its gradients, on the first of two ranks. Trainer's groups: 10, 4 x 4, 2 x 6, 8 x 4, 2 x 6 elements, cut at 41 in
the first matrix of the decoder, the first 42; 64, 3 x 2, 64, 4 x 2 elements, cut at 71 in the decoder's biases: 134."""
PLAIN = ZeroSettings(reduce_elements=100, persistent_elements=0)
PUBLISHED = Workload(shape=shape_named("t5-large"), rows=32, tokens=96, labels=96, checkpointing=True)


def memory(technique: str, ranks: int, work: Workload = T5_WORK, zero: ZeroSettings = PLAIN) -> PlannedMemory:
    return plan_memory(replace(work, technique=technique_named(technique), ranks=ranks, zero=zero))


@pytest.mark.parametrize(
    ("work", "technique", "state_bytes"),
    [
        (T5_WORK, "zero2", (2 + 12 // 2) * P + 2 * TOUCHED),
        (T5_WORK, "zero3", 8 * P),
        (LLAMA_WORK, "none", 16 * 136),
        (LLAMA_WORK, "zero3_offload", 10 * 136),
    ],
)
def test_states_in_bf16_are_a_master_beside_weights_and_gradients_of_two_bytes(
    work: Workload, technique: str, state_bytes: int
) -> None:
    assert memory(technique, 2, replace(work, precision="bf16")).state_bytes == state_bytes


def test_fp16_without_deepspeed_is_autocast_over_fp32_weights() -> None:
    fp16 = replace(LLAMA_WORK, precision="fp16")
    made = memory("ddp", 2, fp16)
    parts = made.parts()
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (4 * 136, 4 * 136, 8 * 136)
    assert memory("zero3", 2, fp16).state_bytes == 8 * 136


@pytest.mark.parametrize(("ranks", "gradient_bytes"), [(2, 2_362_880), (3, 2_100_224)])
def test_gradients_of_shared_tensors_are_whole_as_measured(ranks: int, gradient_bytes: int) -> None:
    # Counted in runs of t5-tiny on two and three pods: live gradients of the rank with most of them.
    work = replace(T5_WORK, shape=shape_named("t5-tiny"), own_rates=True)
    assert memory("zero1", ranks, work).parts()["gradients"] == gradient_bytes


@pytest.mark.parametrize(
    ("technique", "zero", "elements"),
    [
        ("ddp", {}, P),
        ("zero2", {}, 2 * 100),
        ("zero2", {"overlap": False}, 100),
        # A gradient that is larger than a bucket is reduced on its own: position biases of 64.
        ("zero2", {"reduce_elements": 9}, 2 * 9 + 64),
        # Copied together: at most a bucket, at least the largest tensor, no more than the model has.
        ("zero1", {"contiguous": False}, 100),
        ("zero1", {"contiguous": False, "reduce_elements": 9}, 64),
        ("zero1", {"contiguous": False, "reduce_elements": 1_000}, P),
        # Offload keeps its gradients contiguous whatever is asked, and copies one on its way.
        ("zero1_offload", {"contiguous": False}, 2 * 100 + 64),
        # Two buckets, 70 gathered, 20 fetched ahead.
        ("zero3", {"live_elements": 70, "prefetch_elements": 20}, 200 + 70 + 20),
    ],
)
def test_buffers_of_the_backward_pass(technique: str, zero: dict[str, Any], elements: int) -> None:
    assert memory(technique, 2, zero=replace(PLAIN, **zero)).parts()["buffers"] == 4 * elements


@pytest.mark.parametrize("work", [T5_WORK, PUBLISHED, replace(PUBLISHED, checkpointing=False, precision="bf16")])
def test_tensors_alone_never_exceed_what_must_fit_and_parts_are_its_sum(work: Workload) -> None:
    for technique in TECHNIQUES:
        made = plan_memory(replace(work, technique=technique, ranks=3))
        parts = made.parts()
        assert made.peak_allocated_bytes <= made.device_bytes == parts.pop("total") == sum(parts.values())


@pytest.mark.parametrize("model", ["distilgpt2", "bloom-560m", "qwen3-0.6b", "llama-8b"])
@pytest.mark.parametrize("tokens", [16, 1_024])
def test_tensors_of_a_causal_model_never_exceed_what_must_fit(model: str, tokens: int) -> None:
    asked = {"seq_length": tokens, "precision": "fp16", "attention": "all", "gradient_checkpointing": "both"}
    for work in request_for(model, **asked).variants():
        made = plan_memory(replace(work, ranks=3))
        assert made.peak_allocated_bytes <= made.device_bytes


@pytest.mark.parametrize("path", sorted((ROOT / "dsconfig").glob("zero*.json")), ids=lambda path: path.stem)
def test_the_plan_assumes_what_the_configurations_say(path: Path) -> None:
    config = json.loads(path.read_text())
    read, assumed = read_zero_settings(config), ZeroSettings()
    of_stage_3 = {} if config["zero_optimization"]["stage"] == 3 else {
        name: getattr(read, name) for name in ("live_elements", "prefetch_elements", "persistent_elements")
    }  # fmt: skip
    assert read == replace(assumed, pins="offload_optimizer" in config["zero_optimization"], **of_stage_3)


# Plans of recorded runs.


def recorded(**values: Any) -> Any:
    """Two ranks of 32 rows of 40 + 30 tokens of t5-tiny."""
    batch = {"rows": 32, "source_tokens": 40, "target_tokens": 30, **values.pop("batch", {})}
    ranks = [a_rank(number, shape=known_config("t5-tiny"), largest_batch=batch) for number in range(2)]
    return as_record(a_record(**{"ranks": ranks, **values}))


def recorded_causal(name: str = "llama-tiny", **values: Any) -> Any:
    """20 steps of 32 rows of 8 tokens, 2 of them with a loss."""
    batch = {"rows": 32, "source_tokens": 8, "target_tokens": 0}
    counts = {"source_tokens": 640 * 8, "target_tokens": 640 * 2, "padded_tokens": 640 * 8}
    rank = a_rank(shape=known_config(name), largest_batch=batch, **counts)
    return as_record(a_record(ranks=[rank], task="squad", **values))


def test_a_recorded_run_is_planned_with_its_own_buckets_and_without_cuda_on_a_cpu() -> None:
    config = {"zero_optimization": {"stage": 1, "overlap_comm": False, "reduce_bucket_size": 1_000}}
    made = planned(recorded(technique="zero1", deepspeed=config))
    assert made is not None
    largest_gradient = 1_024 * 128
    assert (made.parts()["buffers"], made.parts()["context"]) == (4 * (1_000 + largest_gradient), 0)


@pytest.mark.parametrize(
    "values",
    [
        {"technique": "custom"},
        {"precision": "fp16"},
        {"ranks": [a_rank()]},
        *(
            {"technique": "zero1", "deepspeed": {"zero_optimization": {"stage": 1, "reduce_bucket_size": size}}}
            for size in ("auto", None, -1, float("nan"), True, [1])
        ),
    ],
)
def test_a_run_that_cannot_be_planned_has_no_plan(values: dict[str, Any]) -> None:
    assert planned(recorded(**values)) is None


def test_a_recorded_causal_run_is_planned_with_its_batch_and_attention() -> None:
    work = Workload(shape=shape_named("llama-tiny"), rows=32, tokens=8, labels=2, attention="eager")
    expected = plan_memory(work, context_bytes=0)
    assert planned(recorded_causal(identity={"attn_implementation": "eager", "dropout": None})) == expected


def test_a_recorded_bloom_is_planned_as_it_ran_whatever_was_asked() -> None:
    made = planned(recorded_causal("bloom-tiny", identity={"attn_implementation": "sdpa"}))
    assert made is not None and any("eager attention" in term.formula for term in made.terms)
