"""Time of a step by the closed form, against worked examples and the published times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeropods.plan.jobs import Job
from zeropods.plan.machines import Machines
from zeropods.plan.parameters import t5_parameters
from zeropods.plan.published import published, published_for
from zeropods.plan.shapes import T5Shape, t5_shape
from zeropods.plan.step_time import (
    PUBLISHED_REPORT,
    MeasuredStep,
    compute_seconds,
    fitted_bandwidth,
    step_time,
    traffic,
)
from zeropods.techniques import ZeroSettings, technique_named

SMALLEST = T5Shape(d_model=2, d_kv=1, d_ff=3, layers=1, heads=2, vocabulary=5)
P = 224
JOB = Job(shape=SMALLEST, rows=1, source_tokens=2, target_tokens=1)
LARGE = Job(shape=t5_shape("t5-large"), rows=32, source_tokens=96, target_tokens=96, checkpointing=True)
LINKED = Machines(pods=2, bandwidth=100.0, latency_seconds=0.0, flops=1e12)
OLD = ZeroSettings(reduce_elements=500_000_000, overlap=False, multi_rank_all_reduce=False)


@pytest.mark.parametrize(
    ("technique", "passes"),
    [("none", 0), ("ddp", 2), ("zero1", 3), ("zero2", 3), ("zero3", 3)],
)
def test_passes_round_the_ring_of_each_technique(technique: str, passes: int) -> None:
    # Half of 4 B x 224 over 100 B/s each pass; what stage 3 may keep gathered is next to nothing here.
    network = traffic(JOB, technique_named(technique), LINKED, ZeroSettings(live_elements=0))
    assert network.seconds == pytest.approx(passes * 4.48)


def test_gradients_that_go_to_their_owner_only_pass_once() -> None:
    network = traffic(JOB, technique_named("zero1"), LINKED, ZeroSettings(multi_rank_all_reduce=False))
    assert (network.backward_seconds, network.step_seconds) == pytest.approx((4.48, 4.48))


def test_parameters_that_stay_gathered_are_not_fetched_again() -> None:
    network = traffic(JOB, technique_named("zero3"), LINKED, ZeroSettings(live_elements=P // 2))
    assert (network.forward_seconds, network.backward_seconds) == pytest.approx((4.48, 4.48 / 2 + 4.48))


def test_slots_of_a_pod_add_no_traffic_to_its_link_but_another_part() -> None:
    # Of four processes three parts of four pass over each link.
    network = traffic(JOB, technique_named("ddp"), replace(LINKED, slots=2), ZeroSettings())
    assert network.seconds == pytest.approx(2 * 3 / 4 * 4 * P / 100)


def test_within_one_pod_the_link_is_pcie() -> None:
    machines = replace(LINKED, pods=1, slots=2, pcie_bandwidth=1_000.0)
    assert traffic(JOB, technique_named("ddp"), machines, ZeroSettings()).seconds == pytest.approx(4 * P / 1_000)


def test_each_message_waits_for_each_hop() -> None:
    machines = replace(LINKED, pods=3, bandwidth=1e30, latency_seconds=0.5)
    # 224 elements in buckets of 100 are three messages, over two hops, reduced in two passes; one gather afterwards.
    network = traffic(JOB, technique_named("zero2"), machines, ZeroSettings(reduce_elements=100))
    assert (network.backward_seconds, network.step_seconds) == pytest.approx((2 * 3 * 2 * 0.5, 2 * 0.5))


def test_overlapping_communication_is_waited_for_only_as_far_as_it_is_longer() -> None:
    machines = replace(LINKED, flops=1.0)
    forward, backward = compute_seconds(JOB, machines)
    time = step_time(JOB, technique_named("ddp"), machines, ZeroSettings())
    assert backward > 8.96 and time.seconds == pytest.approx(forward + backward)


def test_communication_that_does_not_overlap_is_added() -> None:
    time = step_time(JOB, technique_named("zero1"), replace(LINKED, flops=1.0), replace(OLD, reduce_elements=1_000))
    assert time.exposed_communication_seconds == pytest.approx(2 * 4.48)


def test_offloading_sends_gradients_down_and_weights_up_and_steps_on_the_processor() -> None:
    machines = replace(LINKED, pcie_bandwidth=64.0, host_bandwidth=28.0)
    time = step_time(JOB, technique_named("zero2_offload"), machines, ZeroSettings())
    # Half the parameters: 4 B down and 4 B up; Adam moves 28 B.
    assert (time.offload_seconds, time.processor_seconds) == pytest.approx((112 * 8 / 64, 112))


def test_stage_3_fetches_offloaded_weights_for_each_pass() -> None:
    machines = replace(LINKED, pcie_bandwidth=64.0)
    time = step_time(JOB, technique_named("zero3_offload"), machines, ZeroSettings())
    assert time.offload_seconds == pytest.approx(112 * 12 / 64)


def test_the_published_report_gives_a_10_gigabit_network() -> None:
    parameters = t5_parameters(t5_shape("t5-small"))
    assert parameters == pytest.approx(60.51e6, rel=1e-3)
    assert 1.0e9 <= fitted_bandwidth(PUBLISHED_REPORT, parameters, pods=3) <= 1.15e9


def test_a_fitted_bandwidth_by_hand() -> None:
    # Reducing takes 5 - 2 x 1 = 3 s, the step 1 s; two passes of half of 4 B x 1,000 each.
    step = MeasuredStep(forward_seconds=1.0, backward_seconds=5.0, step_seconds=1.0)
    assert fitted_bandwidth(step, parameters=1_000, pods=2) == 1_000


@pytest.mark.parametrize("zero", [OLD, ZeroSettings(reduce_elements=500_000_000)], ids=["as published", "as dsconfig"])
def test_the_fitted_bandwidth_gives_t5_large_on_three_pods_within_20_percent(zero: ZeroSettings) -> None:
    bandwidth = fitted_bandwidth(PUBLISHED_REPORT, t5_parameters(t5_shape("t5-small")), pods=3)
    time = step_time(LARGE, technique_named("zero1"), Machines(pods=3, bandwidth=bandwidth), zero)
    assert time.seconds == pytest.approx(10_530.3 / 1_764, rel=0.20)


def test_the_published_table_has_six_rows_and_leaves_empty_what_was_not_published() -> None:
    rows = published()
    assert len(rows) == 6
    assert [row.train_seconds for row in rows] == [742.5, 922.0, None, 10_530.3, None, 11_044.6]
    assert all(row.confounders and row.effective_batch_size == 32 * row.pods for row in rows)


def test_a_published_duration_gives_seconds_a_step() -> None:
    row = next(row for row in published_for("t5-large") if (row.technique, row.pods) == ("zero1", 3))
    assert row.step_seconds == pytest.approx(5.97, rel=1e-3)
