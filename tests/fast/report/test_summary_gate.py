"""The regression gate: what is worse, what is allowed, and what cannot be judged."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.report.gate import Values, compare, read_rows
from zeropods.report.summary import read_runs


def rows(
    folder: Path,
    *,
    seconds: Sequence[float] = (0.8,),
    rank: Mapping[str, Any] | None = None,
    score: dict[str, Any] | None = None,
    **values: Any,
) -> list[Values]:
    """The rows of a summary of repeats with steps of those seconds.

    Args:
        rank: what the rank of each run measured besides.
        score: the score of each run on the test split.
        values: keys of the records.
    """
    files = {}
    if score is not None:
        files["score_test"] = score
    for number, of_step in enumerate(seconds):
        measured = a_rank(step_seconds=[of_step] * 20, **(rank or {}))
        record = a_record(ranks=[measured], run_id=str(number), **values)
        write_run(folder / str(number), record, **files)
    return summarized(folder)


def summarized(runs: Path) -> list[Values]:
    """The rows of a summary, without its plots, as its file has them."""
    (runs / "summary.json").write_text(json.dumps(read_runs([runs]).to_json()))
    return read_rows(runs / "summary.json")


def loss(value: float) -> dict[str, Any]:
    return {"rank": {"eval_losses": [{"step": 20, "loss": value}]}}


def answers(f1: float) -> dict[str, Any]:
    score = {
        "task": "squad",
        "examples": 200,
        "exact_match": 0.25,
        "f1": f1,
        "intervals": {"exact_match": [0.2, 0.3], "f1": [0.4, 0.6]},
    }
    return {"task": "squad", "score": score}


def text(nats: float) -> dict[str, Any]:
    score = {"task": "lm", "tokens": 1_000, "loss": nats, "perplexity": math.exp(nats)}
    return {"task": "lm", "score": score}


def resident(peak: int) -> dict[str, Any]:
    return {"rank": {"peak_resident_bytes": peak}}


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        # 32 samples in 0.8 s: 40 per second; in 0.84 s 38.1, in 0.85 s 37.6; 38.0 are allowed.
        ({"seconds": [0.8]}, {"seconds": [0.84]}, []),
        ({"seconds": [0.8]}, {"seconds": [0.85]}, ["samples_per_second"]),
        # 40, 20 and 26.7 samples/s: 28.9 +- 4.303 x 10.18 / sqrt(3) = 28.9 +- 25.3.
        ({"seconds": [0.8, 1.6, 1.2]}, {"seconds": [3.2, 1.6, 2.4]}, []),
        ({"seconds": [0.8, 0.8, 0.8]}, {"seconds": [0.81, 0.81, 0.81]}, ["samples_per_second"]),
        (resident(100), resident(105), []),
        (resident(100), resident(106), ["peak_memory_bytes"]),
        # Accuracy may fall to the end of the old interval.
        ({"score": a_score()}, {"score": a_score(execution_accuracy=0.5)}, []),
        (
            {"score": a_score()},
            {"score": a_score(execution_accuracy=0.49)},
            ["execution_accuracy"],
        ),
        (loss(2.0), loss(2.02), []),
        (loss(2.0), loss(2.03), ["eval_loss"]),
        (answers(0.5), answers(0.41), []),
        (answers(0.5), answers(0.39), ["f1"]),
        # 1 % of 2 nats: up to exp(2.02).
        (text(2.0), text(2.019), []),
        (text(2.0), text(2.03), ["perplexity"]),
        # A row that is gone is worse; other versions are the same row.
        ({}, {"precision": "bf16"}, ["status"]),
        ({}, {"versions": {"python": "3.12"}}, []),
    ],
)
def test_a_row_may_get_worse_by_so_much(
    tmp_path: Path,
    old: dict[str, Any],
    new: dict[str, Any],
    worse: list[str],
) -> None:
    verdict = compare(rows(tmp_path / "old", **old), rows(tmp_path / "new", **new))
    assert [change.figure for change in verdict.worse] == worse
    assert verdict.judged == 1


def test_a_row_that_fails_now_is_worse_and_one_that_had_failed_cannot_be(tmp_path: Path) -> None:
    write_run(tmp_path / "failed", a_failed_record("oom"))
    failed = summarized(tmp_path / "failed")
    well = rows(tmp_path / "well")
    assert [change.figure for change in compare(well, failed).worse] == ["status"]
    assert compare(failed, well).judged == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({}, {"hardware": {"cpu": "slow"}}, "0: was measured on other hardware"),
        (
            {"rank": {"peak_resident_bytes": 1}},
            {"rank": {"peak_allocated_bytes": 9}},
            "0: peak_memory_bytes, resident and allocated: not measured in both",
        ),
        ({"score": a_score()}, {}, "0: execution_accuracy: not measured in both"),
    ],
)
def test_what_cannot_be_judged_is_named(
    tmp_path: Path,
    old: dict[str, Any],
    new: dict[str, Any],
    said: str,
) -> None:
    verdict = compare(rows(tmp_path / "old", **old), rows(tmp_path / "new", **new))
    assert verdict.worse == ()
    assert verdict.not_comparable == (said,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "broken JSON"),
        ('{"schema_version": 1, "groups": []}', "not a summary.json of version 2"),
        (None, "No such file"),
    ],
)
def test_an_old_summary_that_cannot_be_judged_is_refused(
    tmp_path: Path,
    text: str | None,
    said: str,
) -> None:
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    with pytest.raises(UserError, match=rf"old\.json: .*{said}"):
        read_rows(tmp_path / "old.json")


def test_a_summary_from_before_there_were_causal_runs_is_still_judged() -> None:
    old = read_rows(Path(__file__).parents[1] / "data" / "summary-before-causal.json")
    verdict = compare(old, old)
    assert verdict.worse == ()
    assert verdict.not_comparable == ()
    assert verdict.judged == len(old)
    assert "f1" not in old[0]


def test_people_read_rows_new_and_allowed(tmp_path: Path) -> None:
    verdict = compare(rows(tmp_path / "old"), rows(tmp_path / "new", seconds=[1.0]))
    assert "1 figure got worse in 1 compared row" in str(verdict)
    assert "| 40  | 32  | 38 " in str(verdict)


def test_a_summary_may_be_judged_by_the_one_that_it_replaces(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows(tmp_path, seconds=[0.4])
    run = tmp_path / "0"
    summary = tmp_path / "summary.json"
    (run / "record.json").write_text(json.dumps(a_record(run_id="0")))
    argv = ["summary", str(run), "--out", str(tmp_path), "--against", str(summary), "--json"]
    assert main(argv) == 1
    (worse,) = json.loads(capsys.readouterr().out)["against"]["worse"]
    assert worse["figure"] == "samples_per_second"
    assert worse["old"] == pytest.approx(80.0)
    assert worse["new"] == pytest.approx(40.0)
