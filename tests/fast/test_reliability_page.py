"""docs/reliability.md states what results/reliability.json holds; and what a fault's line says of its trials."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reliability.faults import FAULTS
from benchmarks.reliability.page import PAGE, RESULTS, page
from benchmarks.reliability.seen import difference
from zeropods.measure.record import read_json

ENVIRONMENT = {"hardware": {"cpu": "a processor", "cores": 2}}


def trial(**other: Any) -> dict[str, Any]:
    plain = {
        "fault": "rank killed", "launcher": "pdsh", "survived": True, "by_itself": True, "steps_lost": 2,
        "seconds_to_find": 5.0, "seconds_to_resume": 20.0, "left_over": 0, "largest_difference": 0.0,
        "goodput": None,
    }  # fmt: skip
    return plain | other


SEVERAL = [
    trial(goodput=0.75),
    trial(seconds_to_find=11.25, steps_lost=0, goodput=0.25),
    trial(seconds_to_resume=61.0, steps_lost=6),
]


def made_of(*trials: dict[str, Any], **run: Any) -> str:
    """The page of some trials, and of a run that came to its end if one is given."""
    return page({"trials": list(trials), "runs": [run] if run else [], "environment": ENVIRONMENT})


def test_the_page_is_made_of_the_results_and_explains_their_faults() -> None:
    results = read_json(RESULTS)
    assert page(results) == PAGE.read_text(encoding="utf-8")
    assert {one["fault"] for one in results["trials"]} <= set(FAULTS)


def test_what_is_over_the_limits_is_counted() -> None:
    said = made_of(*SEVERAL, faults=1, largest_difference=0.0)
    assert "\n1 took more than 10 s to find, 1 more than 60 s to resume.\n1 lost more steps than an interval" in said
    assert "\n1 run came to its end, through 1 fault.\n" in said


@pytest.mark.parametrize(("losses", "far"), [([], None), ([(1, 4.0), (2, 2.2)], 0.1), ([(1, 3.0)], 0.25)])
def test_the_difference_is_the_largest_relative_one(losses: list[tuple[int, float]], far: float | None) -> None:
    assert difference(losses, {1: 4.0, 2: 2.0}) == (None if far is None else pytest.approx(far))
