"""The plan beside runs that others published, and the tables of them in the manual."""

import json
from pathlib import Path

import pytest

from benchmarks.published import PAGE, Comparison, comparisons, page_with, tables
from zeropods.errors import UserError


@pytest.fixture(scope="module")
def compared(shared_data: Path) -> list[Comparison]:
    folder = shared_data / "published"
    if not folder.is_dir():
        pytest.skip(f"no published runs at {folder}")
    return comparisons(folder)


def test_every_verdict_on_a_published_run_is_right(compared: list[Comparison]) -> None:
    assert [comparison.run for comparison in compared if comparison.is_wrong] == []


def test_the_tables_of_the_manual_are_those_of_the_plan_as_it_is(compared: list[Comparison]) -> None:
    assert PAGE.read_text() == page_with(tables(compared)), "make bench-plan-published"


RUN = {
    "id": "a run", "argv": ["--model", "t5-small", "--gpu-memory", "16"], "technique": "none", "quality": "exact",
    "fits": False, "total_gib": 1.0, "largest_batch": 1,
}  # fmt: skip


def test_a_wrong_verdict_and_an_error_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text(json.dumps(RUN))
    by_kind = {comparison.kind: comparison for comparison in comparisons(tmp_path)}
    verdict = by_kind["fits"]
    assert (verdict.planned, verdict.is_wrong, verdict.error) == (True, True, None)
    total = by_kind["total, kind not stated (GiB)"]
    assert not total.is_wrong and total.planned is not None
    assert total.error == pytest.approx(total.planned - 1)
    assert "WRONG" in tables(list(by_kind.values()))


@pytest.mark.parametrize(("text", "message"), [(None, "has no runs.jsonl"), ("{}", "line 1: KeyError")])
def test_what_is_no_published_run_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "runs.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        comparisons(tmp_path)
