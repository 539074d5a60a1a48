"""Memory by the closed form: by hand for a smallest model, and against the published table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_rank, a_record, as_record
from zeropods.measure.record import Record
from zeropods.plan.activations import activations
from zeropods.plan.estimate import largest
from zeropods.plan.jobs import Job
from zeropods.plan.memory import PlannedMemory, plan_memory
from zeropods.plan.recorded import planned
from zeropods.plan.shapes import T5Shape, t5_shape
from zeropods.plan.workload import elements, share, short
from zeropods.techniques import TECHNIQUES, ZeroSettings, read_zero_settings, technique_named

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = T5Shape(d_model=2, d_kv=1, d_ff=3, layers=1, heads=2, vocabulary=5)
P = 224
"""Its parameters."""
TOUCHED = 176
"""Of its gradients, on the first of two ranks. Trainer's groups: 10, 4 x 4, 2 x 6, 8 x 4, 2 x 6 elements, cut at 41 in
the first matrix of the decoder, the first 42; 64, 3 x 2, 64, 4 x 2 elements, cut at 71 in the decoder's biases: 134."""
JOB = Job(shape=SMALLEST, rows=1, source_tokens=2, target_tokens=1)
PLAIN = ZeroSettings(reduce_elements=100, persistent_elements=0)
PUBLISHED = Job(shape=t5_shape("t5-large"), rows=32, source_tokens=96, target_tokens=96, checkpointing=True)
OLD = ZeroSettings(reduce_elements=500_000_000, overlap=False, contiguous=False, multi_rank_all_reduce=False)
"""The published ZeRO-1 runs: gradients kept until the end of the backward pass, then copied together, 5e8 at a time."""
OLD_STAGE_3 = ZeroSettings(reduce_elements=10_000_000, live_elements=1_000_000_000)
GIGA = 1e9


def memory(technique: str, ranks: int, job: Job = JOB, zero: ZeroSettings | None = None) -> PlannedMemory:
    return plan_memory(job, technique_named(technique), ranks, zero or PLAIN)


@pytest.mark.parametrize(
    ("technique", "ranks", "parameters", "gradients", "optimizer"),
    [
        ("none", 1, 4 * P, 4 * P, 8 * P),
        ("none", 3, 4 * P, 4 * P, 8 * P),
        ("ddp", 2, 4 * P, 4 * P, 8 * P),
        ("zero1", 2, 4 * P, 4 * TOUCHED, 6 * P),
        ("zero2", 2, 4 * P, 4 * TOUCHED, 6 * P),
        ("zero3", 2, 2 * P, 2 * P, 6 * P),
        ("zero1_offload", 2, 4 * P, 0, 0),
        ("zero2_offload", 2, 4 * P, 0, 0),
        ("zero3_offload", 2, 0, 0, 0),
    ],
)
def test_states_of_each_technique_in_fp32(
    technique: str, ranks: int, parameters: int, gradients: int, optimizer: int
) -> None:
    parts = memory(technique, ranks).parts()
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (parameters, gradients, optimizer)


@pytest.mark.parametrize(
    ("technique", "bytes_a_parameter"),
    [
        ("none", 16),
        ("ddp", 16),
        ("zero1", 2 + 12 / 2 + 2 * TOUCHED / P),
        ("zero2", 2 + 12 / 2 + 2 * TOUCHED / P),
        ("zero3", 16 / 2),
    ],
)
def test_states_in_bf16_are_a_master_beside_weights_and_gradients_of_two_bytes(
    technique: str, bytes_a_parameter: float
) -> None:
    assert memory(technique, 2, replace(JOB, precision="bf16")).state_bytes == bytes_a_parameter * P


@pytest.mark.parametrize(
    ("technique", "bytes_a_parameter"),
    [
        ("zero1", 4 + 12 / 2 + 4 * TOUCHED / P),
        ("zero1_offload", 4 + 16 / 2),
        ("zero2_offload", 4 + 16 / 2),
        ("zero3", 20 / 2),
        ("zero3_offload", 24 / 2),
    ],
)
def test_states_of_device_and_host_together(technique: str, bytes_a_parameter: float) -> None:
    assert memory(technique, 2).state_bytes == bytes_a_parameter * P


@pytest.mark.parametrize(("ranks", "gradient_bytes"), [(2, 2_362_880), (3, 2_100_224)])
def test_gradients_of_shared_tensors_are_whole_as_measured(ranks: int, gradient_bytes: int) -> None:
    # Counted in runs of t5-tiny on two and three pods: live gradients of the rank with most of them.
    job = replace(JOB, shape=t5_shape("t5-tiny"), own_rates=True)
    assert memory("zero1", ranks, job).parts()["gradients"] == gradient_bytes


def test_one_rank_touches_every_tensor_once() -> None:
    assert memory("zero2", 1).parts()["gradients"] == 4 * P


def test_stage_1_holds_all_gradients_where_communication_does_not_overlap() -> None:
    assert memory("zero1", 2, zero=ZeroSettings(overlap=False)).parts()["gradients"] == 4 * P


def test_stage_1_holds_all_gradients_while_they_add_up() -> None:
    assert memory("zero1", 2, replace(JOB, accumulates=True)).parts()["gradients"] == 4 * P


def test_overlapping_communication_has_two_reduce_buckets() -> None:
    assert memory("zero2", 2).parts()["buffers"] == 2 * 4 * 100
    assert memory("zero2", 2, zero=ZeroSettings(reduce_elements=100, overlap=False)).parts()["buffers"] == 4 * 100


@pytest.mark.parametrize(("bucket", "copied"), [(100, 100), (9, 10), (1_000, P)])
def test_gradients_that_are_not_contiguous_are_copied_together_as_many_as_there_are(bucket: int, copied: int) -> None:
    # At most a bucket of them; at least the largest tensor, of 10 elements; no more than the model has.
    zero = ZeroSettings(reduce_elements=bucket, contiguous=False)
    assert memory("zero1", 2, zero=zero).parts()["buffers"] == 4 * copied


def test_offload_keeps_its_gradients_contiguous_whatever_is_asked() -> None:
    one, other = (memory("zero1_offload", 2, zero=replace(PLAIN, contiguous=each)) for each in (True, False))
    assert one == other


@pytest.mark.parametrize("size", ["auto", None, -1, float("nan"), True, [1]])
def test_a_run_whose_bucket_has_no_size_is_not_planned(size: object) -> None:
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": size}}
    rank = a_rank(shape=asdict(SMALLEST), largest_batch={"rows": 1, "source_tokens": 2, "target_tokens": 1})
    assert planned(as_record(a_record(ranks=[rank], technique="zero1", deepspeed=config))) is None


@pytest.mark.parametrize("batch", [{"rows": 0}, {"source_tokens": 0}, {"target_tokens": -1}])
def test_a_run_whose_largest_batch_can_be_none_is_not_planned(batch: dict[str, int]) -> None:
    largest_batch = {"rows": 1, "source_tokens": 2, "target_tokens": 1, **batch}
    assert planned(as_record(a_record(ranks=[a_rank(shape=asdict(SMALLEST), largest_batch=largest_batch)]))) is None


def test_a_gradient_larger_than_a_bucket_is_reduced_on_its_own() -> None:
    # The largest tensor of the smallest model has 10 elements.
    assert memory("zero2", 2, zero=ZeroSettings(reduce_elements=9)).parts()["buffers"] == 2 * 4 * 9 + 4 * 10


def test_ddp_holds_its_gradients_a_second_time_in_buckets() -> None:
    assert memory("ddp", 2).parts()["buffers"] == 4 * P


def test_stage_3_keeps_no_more_parameters_gathered_than_it_may() -> None:
    zero = replace(PLAIN, live_elements=50, prefetch_elements=20)
    # Two buckets of 100, 50 gathered, 20 fetched ahead.
    assert memory("zero3", 2, zero=zero).parts()["buffers"] == 4 * (200 + 50 + 20)


def test_stage_3_keeps_small_tensors_whole_beside_their_shares() -> None:
    # All but the two tables of position biases, 64 elements each, have at most 10; so half of 224 and 96 whole.
    zero = replace(PLAIN, persistent_elements=10)
    assert memory("zero3", 2, zero=zero).parts()["parameters"] == 4 * (112 + 96)


def test_one_process_alone_keeps_nothing_a_second_time() -> None:
    assert memory("zero3", 1, zero=replace(PLAIN, persistent_elements=10)).parts()["parameters"] == 4 * P


def test_activations_of_a_smallest_encoder_layer_by_hand() -> None:
    # Two tokens of width 2, heads of width 1, feed-forward 3, FP32, dropout masks of one byte.
    norm = 2 * (3 * 2 * 4 + 4)
    attention = norm + 4 * (4 * 2 * 2) + 4 * 2 * 2 + 4 * (2 * 2 * 2) + 4
    feed_forward = norm + 2 * 4 * (2 * 3) + 6 + 4
    assert activations(JOB).encoder_layer == attention + feed_forward


def test_the_head_holds_log_softmax_and_two_gradients_of_its_size() -> None:
    found = activations(replace(JOB, rows=2, target_tokens=3))
    assert (found.head, found.head_transient) == (4 * 6 * 5, 2 * 4 * 6 * 5)


def test_checkpointing_keeps_one_input_a_layer_and_the_head() -> None:
    layers, width, tokens = 24, 1_024, 32 * 96
    kept = 4 * 2 * layers * tokens * width + 3 * 4 * tokens * 32_128
    assert plan_memory(PUBLISHED, technique_named("none"), 1).parts()["activations"] == pytest.approx(kept, rel=0.06)


def test_a_part_of_the_total_is_counted_once() -> None:
    for technique in TECHNIQUES:
        parts = memory(technique.name, 3, PUBLISHED).parts()
        assert parts.pop("total") == sum(parts.values())


@pytest.mark.parametrize("job", [JOB, PUBLISHED, replace(PUBLISHED, checkpointing=False, precision="bf16")])
def test_tensors_alone_never_exceed_what_must_fit(job: Job) -> None:
    for technique in TECHNIQUES:
        made = plan_memory(job, technique, 3)
        assert made.peak_allocated_bytes <= made.device_bytes


def test_the_end_of_the_backward_pass_is_the_worst_moment_of_a_small_batch() -> None:
    # States of 16 B a parameter, the embedding's gradient twice, one layer's activations.
    job = Job(shape=t5_shape("t5-large"), rows=1, source_tokens=8, target_tokens=8)
    made = plan_memory(job, technique_named("none"), 1)
    assert made.peak_allocated_bytes == pytest.approx(16 * 737.7e6 + 4 * 32_128 * 1_024, rel=0.005)


def test_the_loss_is_the_worst_moment_of_a_large_batch() -> None:
    job = Job(shape=t5_shape("t5-small"), rows=256, source_tokens=96, target_tokens=96)
    a, layers = activations(job), 6
    saved = layers * (a.encoder_layer + a.decoder_layer) + a.encoder_ends + a.decoder_ends + 3 * a.head
    expected = 12 * job.parameters + saved
    assert plan_memory(job, technique_named("none"), 1).peak_allocated_bytes == expected


@pytest.mark.parametrize(
    ("technique", "ranks", "zero", "low", "high"),
    [
        ("none", 1, OLD, 15, 15),
        ("zero1", 3, OLD, 13, 13),
        ("zero1", 2, OLD, 14, 15),
        ("zero1", 3, replace(OLD, overlap=True), 13, 13),
        ("zero1", 2, replace(OLD, overlap=True), 14, 15),
    ],
)
def test_t5_large_is_within_15_percent_of_the_published_memory(
    technique: str, ranks: int, zero: ZeroSettings, low: float, high: float
) -> None:
    gigabytes = plan_memory(PUBLISHED, technique_named(technique), ranks, zero).device_bytes / GIGA
    assert 0.85 * low <= gigabytes <= 1.15 * high


def test_zero3_offload_of_t5_large_is_far_below_the_published_9_gb() -> None:
    made = plan_memory(PUBLISHED, technique_named("zero3_offload"), 3, OLD_STAGE_3)
    assert made.device_bytes / GIGA == pytest.approx(5.4, rel=0.05)


def test_pinned_buffers_on_the_host_are_rounded_up_to_a_power_of_two() -> None:
    made = memory("zero2_offload", 2)
    rounding = next(term for term in made.host_terms if "rounding" in term.name)
    # 112 elements of 4 B are 448 and become 512, twice; one gradient of 10 is 40 and becomes 64.
    assert rounding.bytes == 2 * (512 - 448) + (64 - 40)


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_the_host_holds_a_model_while_it_is_loaded(technique) -> None:  # type: ignore[no-untyped-def]
    made = plan_memory(PUBLISHED, technique, 3)
    assert made.host_bytes >= 4 * PUBLISHED.parameters


@pytest.mark.parametrize("path", sorted((ROOT / "dsconfig").glob("zero*.json")), ids=lambda path: path.stem)
def test_the_plan_assumes_what_the_configurations_say(path: Path) -> None:
    config = json.loads(path.read_text())
    read, assumed = read_zero_settings(config), ZeroSettings()
    stage, offloads = config["zero_optimization"]["stage"], "offload_optimizer" in config["zero_optimization"]
    expected = replace(
        assumed,
        live_elements=assumed.live_elements if stage == 3 else read.live_elements,
        prefetch_elements=assumed.prefetch_elements if stage == 3 else read.prefetch_elements,
        persistent_elements=assumed.persistent_elements if stage == 3 else read.persistent_elements,
        pins=offloads,
    )
    assert read == expected


def planned_record(**values: Any) -> Record:
    shape = asdict(t5_shape("t5-tiny"))
    batch = {"rows": 32, "source_tokens": 40, "target_tokens": 30}
    ranks = [a_rank(number, shape=shape, largest_batch=batch) for number in range(2)]
    return as_record(a_record(ranks=ranks, **values))


def test_a_recorded_run_is_planned_with_its_own_buckets_and_without_cuda_on_a_cpu() -> None:
    config = {"zero_optimization": {"stage": 1, "overlap_comm": False, "reduce_bucket_size": 1_000}}
    made = planned(planned_record(technique="zero1", deepspeed=config))
    largest_gradient = 1_024 * 128
    assert made is not None
    assert (made.parts()["buffers"], made.parts()["context"]) == (4 * (1_000 + largest_gradient), 0)


@pytest.mark.parametrize("values", [{"technique": "custom"}, {"precision": "fp16"}])
def test_a_run_that_is_none_of_those_planned_has_no_plan(values: dict[str, str]) -> None:
    assert planned(planned_record(**values)) is None


def test_a_run_that_died_before_its_first_batch_has_no_plan() -> None:
    assert planned(as_record(a_record())) is None


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 64, 522])
def test_the_largest_number_that_fits_is_found_exactly(limit: int) -> None:
    assert largest(lambda rows: rows <= limit) == limit


def test_where_not_even_one_fits_there_is_no_largest() -> None:
    assert largest(lambda rows: False) is None


def test_formulas_are_written_with_their_numbers() -> None:
    assert (elements(4, 737_668_096, 3), short(96), share(10, 3)) == ("4 B x 737.7 M / 3 ranks", "96", 4)
