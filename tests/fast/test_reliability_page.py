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


def line(*trials: dict[str, Any]) -> list[str]:
    """The cells of the fault's line."""
    text = page({"trials": list(trials), "runs": [], "environment": ENVIRONMENT})
    (found,) = [line for line in text.splitlines() if line.startswith("| rank killed ") and "SIGKILL" not in line]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_the_page_is_made_of_the_results() -> None:
    assert page(read_json(RESULTS)) == PAGE.read_text(encoding="utf-8")


def test_the_results_are_of_faults_that_are_explained() -> None:
    assert {one["fault"] for one in read_json(RESULTS)["trials"]} <= set(FAULTS)


def test_a_line_shows_the_median_and_the_worst() -> None:
    trials = [trial(), trial(seconds_to_find=11.25, steps_lost=0), trial(seconds_to_resume=61.0, steps_lost=5)]
    assert line(*trials) == ["3", "3", "3", "2, 5", "5.0, 11.2", "20.0, 61.0", "0", "not measured"]


def test_goodput_is_that_of_the_runs_that_were_broken_once() -> None:
    assert line(trial(), trial(goodput=0.5), trial(goodput=0.25), trial(goodput=0.75))[-1] == "50%, 25%"


def test_one_run_is_no_several_runs() -> None:
    run = {"faults": 1, "largest_difference": 0.0}
    assert "\n1 run came to its end, through 1 fault.\n" in page(
        {"trials": [], "runs": [run], "environment": ENVIRONMENT}
    )


def test_a_trial_that_came_to_nothing_is_counted_and_has_no_figures() -> None:
    nothing = dict.fromkeys(("steps_lost", "seconds_to_find", "seconds_to_resume", "left_over", "largest_difference"))
    assert line(trial(survived=False, **nothing)) == ["1", "0", "0", *["not measured"] * 3, "0", "not measured"]


def test_a_restart_that_lost_more_than_an_interval_is_counted() -> None:
    results = {"trials": [trial(steps_lost=5), trial(steps_lost=6)], "runs": [], "environment": ENVIRONMENT}
    assert "\n1 lost more steps than an interval" in page(results)


def test_a_fault_that_was_not_tried_is_shown_so() -> None:
    assert line() == ["0", "0", "0", *["not measured"] * 3, "0", "not measured"]


@pytest.mark.parametrize(("losses", "far"), [([], None), ([(1, 4.0), (2, 2.2)], 0.1), ([(1, 3.0)], 0.25)])
def test_the_difference_is_the_largest_relative_one(losses: list[tuple[int, float]], far: float | None) -> None:
    assert difference(losses, {1: 4.0, 2: 2.0}) == (None if far is None else pytest.approx(far))
