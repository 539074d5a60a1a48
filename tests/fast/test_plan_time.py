"""Time of a step by the closed form, against worked examples and the published times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fast.test_plan_memory import PUBLISHED
from tests.fast.test_plan_shapes import LLAMA_WORK, T5_WORK
from zeropods.plan.estimate import compute_seconds, step_time, traffic
from zeropods.plan.machines import Machines
from zeropods.plan.published import BANDWIDTH, published
from zeropods.techniques import ZeroSettings, technique_named

P = 224
LINKED = Machines(pods=2, bandwidth=100.0, latency_seconds=0.0, flops=1e12, pcie_bandwidth=64.0, host_bandwidth=28.0)
OLD = ZeroSettings(reduce_elements=500_000_000, overlap=False, multi_rank_all_reduce=False)


@pytest.mark.parametrize(
    ("technique", "machines", "zero", "seconds"),
    [
        # Half of 4 B x 224 over 100 B/s each pass: 4.48 s. What stage 3 may keep gathered is next to nothing here.
        ("none", {}, {}, (0, 0, 0)),
        ("ddp", {}, {}, (0, 2 * 4.48, 0)),
        ("zero1", {}, {}, (0, 2 * 4.48, 4.48)),
        ("zero2", {}, {}, (0, 2 * 4.48, 4.48)),
        ("zero3", {}, {}, (4.48, 2 * 4.48, 0)),
        # Gradients that go to their owner only pass once.
        ("zero1", {}, {"multi_rank_all_reduce": False}, (0, 4.48, 4.48)),
        # Parameters that stay gathered are not fetched again.
        ("zero3", {}, {"live_elements": P // 2}, (4.48, 4.48 / 2 + 4.48, 0)),
        # Slots add no traffic to a pod's link, but of four processes three parts of four pass over each.
        ("ddp", {"slots": 2}, {}, (0, 2 * 3 / 4 * 4 * P / 100, 0)),
        # Within one pod the link is PCIe.
        ("ddp", {"pods": 1, "slots": 2, "pcie_bandwidth": 1_000.0}, {}, (0, 4 * P / 1_000, 0)),
        # Three buckets of at most 100 elements, over two hops, reduced in two passes; one gather afterwards.
        ("zero2", {"pods": 3, "bandwidth": 1e30, "latency_seconds": 0.5}, {"reduce_elements": 100}, (0, 6, 1)),
    ],
)
def test_seconds_on_the_network(
    technique: str, machines: dict[str, Any], zero: dict[str, Any], seconds: tuple[float, ...]
) -> None:
    settings = ZeroSettings(**{"live_elements": 0, **zero})
    found = traffic(T5_WORK, technique_named(technique), replace(LINKED, **machines), settings)
    assert (found.forward_seconds, found.backward_seconds, found.step_seconds) == pytest.approx(seconds)


def test_overlapping_communication_is_waited_for_only_as_far_as_it_is_longer() -> None:
    machines = replace(LINKED, flops=1.0)
    forward, backward = compute_seconds(T5_WORK, machines)
    time = step_time(T5_WORK, technique_named("ddp"), machines, ZeroSettings())
    assert backward > 8.96 and time.seconds == pytest.approx(forward + backward)


@pytest.mark.parametrize(
    ("technique", "passes", "offload", "processor"),
    [
        # Half the parameters: 4 B down and 4 B up; Adam moves 28 B, once; stage 3 fetches weights for each pass.
        ("zero2_offload", 1, 112 * 8 / 64, 112),
        ("zero3_offload", 1, 112 * 12 / 64, 112),
        ("zero2_offload", 4, 112 * (4 * 4 + 4) / 64, 112),
    ],
)
def test_offloading_sends_gradients_down_and_weights_up(
    technique: str, passes: int, offload: float, processor: float
) -> None:
    time = step_time(T5_WORK, technique_named(technique), LINKED, ZeroSettings(), passes)
    assert (time.offload_seconds, time.processor_seconds) == pytest.approx((offload, processor))


def test_passes_of_a_step_send_what_their_technique_cannot_keep() -> None:
    # Half of 2 B x 136 over 100 B/s is 1.36 s; stage 2 reduces in two passes round the ring, after each of four.
    seconds = [
        step_time(LLAMA_WORK, technique_named(name), LINKED, ZeroSettings(live_elements=0), 4).communication_seconds
        for name in ("ddp", "zero1", "zero2", "zero3")
    ]
    assert seconds == pytest.approx([2 * 1.36, 3 * 1.36, (4 * 2 + 1) * 1.36, 4 * 3 * 1.36])


@pytest.mark.parametrize("zero", [OLD, ZeroSettings(reduce_elements=500_000_000)], ids=["as published", "as dsconfig"])
def test_the_fitted_bandwidth_gives_t5_large_on_three_pods_within_20_percent(zero: ZeroSettings) -> None:
    assert 1.0e9 <= BANDWIDTH <= 1.15e9
    time = step_time(PUBLISHED, technique_named("zero1"), Machines(pods=3, bandwidth=BANDWIDTH), zero)
    row = next(row for row in published("t5-large") if (row.technique, row.pods) == ("zero1", 3))
    assert time.seconds == pytest.approx(row.step_seconds, rel=0.20)


def test_the_published_table_leaves_empty_what_was_not_published() -> None:
    rows = published()
    assert [row.train_seconds for row in rows] == [742.5, 922.0, None, 10_530.3, None, 11_044.6]
    assert all(row.confounders and row.effective_batch_size == 32 * row.pods for row in rows)
