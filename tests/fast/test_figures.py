"""Every figure of a summary, each against a number computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import made
from tests.made import GIB, a_failed_record, a_rank, as_record
from zeropods.measure.record import PHASES, Record
from zeropods.report import figures
from zeropods.report.figures import DERIVED, FIGURES
from zeropods.report.groups import t_interval

SHAPE = {"d_model": 2, "d_kv": 1, "d_ff": 4, "layers": 1, "heads": 2, "vocabulary": 10}
"""A projection is 2 x 2 x 1 = 4 parameters: encoder 4 x 4 + 2 x 2 x 4 = 32, decoder 8 x 4 + 16 = 48, of which
cross-attention's keys and values are 8, head 10 x 2 = 20."""
A100 = "NVIDIA A100-SXM4-40GB"


def a_record(**values: Any) -> Record:
    return as_record(made.a_record(**values))


def two(**values: Any) -> Record:
    """A record of two ranks on two pods, both with the same values."""
    return a_record(ranks=[a_rank(0, **values), a_rank(1, **values)])


def ranks(key: str, *values: Any, **both: Any) -> Record:
    """A record of ranks that differ in one field."""
    return a_record(ranks=[a_rank(i, **{key: value}, **both) for i, value in enumerate(values)])


def test_duration_is_that_of_the_slowest_rank() -> None:
    assert figures.duration_seconds(ranks("wall_seconds", 30.0, 31.5)) == 31.5


def test_duration_of_a_resumed_run_is_not_known() -> None:
    assert figures.duration_seconds(a_record(ranks=[a_rank(first_step=5)])) is None


def test_duration_is_not_known_where_a_rank_has_left_none() -> None:
    record = a_record(ranks=[a_rank(0)], pods=2, world_size=2, status="failed", effective_batch_size=64)
    assert figures.duration_seconds(record) is None


def test_start_is_that_of_the_slowest_rank() -> None:
    assert figures.start_seconds(ranks("start_seconds", 5.0, 7.0)) == 7.0


def test_saving_is_summed_over_a_rank() -> None:
    assert figures.save_seconds(ranks("save_seconds", [0.25, 0.5], [0.25])) == 0.75


def test_evaluation_is_summed_over_a_rank() -> None:
    assert figures.evaluate_seconds(ranks("evaluate_seconds", [0.5], [0.25, 0.5])) == 0.75


def test_tokens_a_sample_are_means_over_all_rows_of_all_ranks() -> None:
    # 2 ranks x 20 steps x 32 rows = 1,280 rows; 2 x 6,400 source and 2 x 3,200 target tokens.
    record = two(source_tokens=6_400, target_tokens=3_200, padded_tokens=12_800)
    assert figures.tokens_per_sample(record) == (10.0, 5.0)


def test_tokens_a_second_are_samples_a_second_times_tokens_a_sample() -> None:
    # One rank: 640 rows in steps of 0.8 s: 40 samples/s; 9,600 tokens / 640 = 15 a sample.
    record = a_record(ranks=[a_rank(source_tokens=6_400, target_tokens=3_200, padded_tokens=12_800)])
    assert figures.tokens_per_second(record) == pytest.approx(600)


def test_padding_is_what_is_not_real() -> None:
    assert figures.padding_share(two(source_tokens=6_400, target_tokens=3_200, padded_tokens=12_800)) == 0.25


def test_evaluation_rate_is_rows_by_the_mean_of_the_slowest_rank() -> None:
    # 100 rows; means 0.5 and 0.25 s.
    assert figures.evaluation_samples_per_second(ranks("evaluate_seconds", [0.4, 0.6], [0.25])) == pytest.approx(200)


def test_model_flops_are_those_of_a_sample_times_samples_a_second() -> None:
    # (32 + 8) x 10 + (48 - 8 + 20) x 5 = 700 products; 6 x 700 = 4,200 FLOPs a sample; 40 samples/s.
    record = a_record(ranks=[a_rank(source_tokens=6_400, target_tokens=3_200, padded_tokens=9_600, shape=SHAPE)])
    assert figures.model_flops_per_second(record) == pytest.approx(168_000)


def test_the_peak_of_gpus_is_published_and_summed_over_ranks() -> None:
    record = two(gpu=A100)
    assert (figures.peak_flops_per_second(record), figures.peak_kind(record)) == (39.0e12, "published")


def test_the_peak_of_a_gpu_that_is_not_published_is_measured_for_each_rank() -> None:
    record = ranks("matmul_flops_per_second", 2e12, None, gpu="GPU X")
    assert (figures.peak_flops_per_second(record), figures.peak_kind(record)) == (4e12, "measured matmul")


def test_pods_of_one_machine_share_its_measured_peak() -> None:
    assert figures.peak_flops_per_second(ranks("matmul_flops_per_second", 1e11, None)) == 1e11


def test_machines_of_their_own_have_a_peak_each() -> None:
    record = a_record(ranks=[a_rank(0, matmul_flops_per_second=1e11, machine="a"), a_rank(1, machine="b")])
    assert figures.peak_flops_per_second(record) == 2e11


def test_mfu_is_the_share_of_the_peak() -> None:
    assert figures.model_flops_utilization(25.0, 100.0) == 0.25


def test_pods_of_one_machine_are_one_machine() -> None:
    assert figures.machines(two()) == 1


def test_a_peak_is_of_the_rank_that_needed_most() -> None:
    assert figures.peak_bytes(ranks("peak_reserved_bytes", 5, 7), "reserved") == 7


def test_device_used_memory_is_the_highest_sample() -> None:
    used = {"samples": 3, "peak": 9.0, "mean": 5.0, "minimum": 1.0}
    assert figures.peak_bytes(two(sampled={"device_used_bytes": used}), "device-used") == 9.0


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "resident"),
        ({"peak_allocated_bytes": 5}, "allocated"),
        (
            {
                "peak_allocated_bytes": 5,
                "sampled": {"device_used_bytes": {"samples": 1, "peak": 9.0, "mean": 9.0, "minimum": 9.0}},
            },
            "device-used",
        ),
        ({"peak_resident_bytes": None}, None),
    ],
)
def test_pods_are_compared_in_one_kind_of_memory(values: dict[str, Any], kind: str | None) -> None:
    assert figures.pod_memory_kind(two(**values)) == kind


def test_resident_memory_of_a_pod_is_the_sum_of_its_ranks() -> None:
    four = [a_rank(i, peak_resident_bytes=i + 1) for i in range(4)]
    assert figures.pod_memory_bytes(a_record(ranks=four, pods=2, slots=2)) == [1 + 2, 3 + 4]


def test_device_memory_of_a_pod_is_that_of_its_fullest_gpu() -> None:
    four = [a_rank(i, peak_allocated_bytes=i + 1) for i in range(4)]
    assert figures.pod_memory_bytes(a_record(ranks=four, pods=2, slots=2)) == [2, 4]


def test_peak_memory_is_that_of_the_fullest_pod() -> None:
    assert figures.peak_memory_bytes(ranks("peak_resident_bytes", GIB, 3 * GIB)) == 3 * GIB


def a_phase(**peaks: int | None) -> dict[str, Any]:
    none = {"peak_resident_bytes": None, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    return {"seconds": 1.0, **none, **peaks}


def test_a_peak_within_a_phase_is_of_the_rank_that_needed_most() -> None:
    phases = [{"steady": a_phase(peak_resident_bytes=size)} for size in (5, 7)]
    assert figures.phase_peak_bytes(ranks("phases", *phases), "steady") == 7


def test_a_phase_that_a_rank_has_not_reached_has_no_peak() -> None:
    record = ranks("phases", {"save": a_phase(peak_resident_bytes=5)}, {})
    assert figures.phase_peak_bytes(record, "save") is None


def test_on_a_cpu_live_states_are_measured_against_the_plan() -> None:
    live = [{"parameters": 4, "gradients": 4, "optimizer": size} for size in (8, 16)]
    assert (figures.measured_bytes(ranks("live_bytes", *live)), figures.planned_kind(two())) == (24, "live states")


def test_on_a_gpu_device_used_memory_is_measured_against_the_plan() -> None:
    used = {"device_used_bytes": {"samples": 3, "peak": 9.0, "mean": 5.0, "minimum": 1.0}}
    assert figures.measured_bytes(two(gpu=A100, sampled=used)) == 9.0


def test_the_plan_of_plain_training_is_sixteen_bytes_a_parameter() -> None:
    # Embedding 20; encoder 32 + 2 norms of 2 + 32 relative positions x 2 heads; decoder 48 + 3 norms of 2 + 64;
    # a final norm of 2 for each: 20 + 32 + 4 + 64 + 48 + 6 + 64 + 4 = 242 parameters.
    batch = {"rows": 1, "source_tokens": 1, "target_tokens": 1}
    record = a_record(ranks=[a_rank(shape=SHAPE, largest_batch=batch)])
    assert figures.planned_bytes(record) == 16 * 242


def test_a_technique_of_the_users_own_has_no_plan() -> None:
    batch = {"rows": 1, "source_tokens": 1, "target_tokens": 1}
    record = a_record(ranks=[a_rank(shape=SHAPE, largest_batch=batch)], technique="custom")
    assert figures.planned_bytes(record) is None


def test_measured_and_planned_memory_are_set_in_ratio() -> None:
    assert figures.measured_to_planned(90, 100) == 0.9


def test_losses_are_the_last_ones() -> None:
    assert (figures.train_loss(a_record()), figures.eval_loss(a_record())) == (2.0, 2.25)


def test_energy_is_summed_over_ranks() -> None:
    assert figures.energy_joules(ranks("energy_joules", 100.0, 150.0)) == 250.0


def test_energy_that_one_rank_has_not_measured_is_not_known() -> None:
    assert figures.energy_joules(ranks("energy_joules", 100.0, None)) is None


def test_a_kilowatt_hour_is_3_6_million_joules() -> None:
    assert figures.energy_kwh(a_record(ranks=[a_rank(energy_joules=1.8e6)])) == 0.5


def test_cost_is_pods_times_hours_times_price() -> None:
    # 2 pods x 1,800 s = 1 pod hour.
    assert figures.cost(two(wall_seconds=1_800.0), 3.0) == 3.0


def test_without_a_price_there_is_no_cost() -> None:
    assert figures.cost(a_record(), None) is None


@pytest.mark.parametrize(
    "figure",
    [
        figures.tokens_per_second,
        figures.padding_share,
        figures.model_flops_per_second,
        figures.peak_flops_per_second,
        figures.peak_kind,
        figures.phase_kind,
        figures.planned_bytes,
        figures.measured_bytes,
        figures.train_loss,
        figures.energy_kwh,
    ],
)
def test_what_a_run_that_ended_early_has_not_measured_is_none(figure: Callable[[Record], Any]) -> None:
    assert figure(as_record(a_failed_record())) is None


def test_every_figure_is_defined_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "figures.md").read_text(encoding="utf-8")
    kinds = [f"peak_{kind}_bytes" for kind in ("device_used", "reserved", "allocated", "resident", *PHASES)]
    keys = [*(figure.key for figure in FIGURES), *DERIVED]
    assert len(keys) > 30 and [key for key in keys if key not in kinds and f"`{key}`" not in text] == []


def test_an_interval_of_rates_ends_at_zero() -> None:
    # Half of it is 12.7062 x 8.4853 / sqrt(2) = 76.24.
    assert t_interval([10.0, 22.0]) == pytest.approx([0.0, 92.2372], abs=1e-3)


def test_the_interval_of_a_mean_is_students() -> None:
    # Mean 12, standard deviation 2, t(0.975, 2) = 4.303 from tables: 12 +- 4.303 x 2 / sqrt(3).
    assert t_interval([10.0, 12.0, 14.0]) == pytest.approx([7.0317, 16.9683], abs=1e-3)


def test_one_run_has_no_interval() -> None:
    assert t_interval([10.0]) is None
