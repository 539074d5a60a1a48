"""The regression gate: what is worse, what is allowed, and what cannot be judged."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.report.gate import Values, compare, read_rows
from zeropods.report.summary import read_runs


def rows(folder: Path, *seconds: float, **values: Any) -> list[Values]:
    """The rows of a summary of repeats with steps of those seconds."""
    for number, each in enumerate(seconds or (0.8,)):
        rank = a_rank(step_seconds=[each] * 20, **values.get("rank", {}))
        files = {"score_test": values["score"]} if "score" in values else {}
        record = {key: value for key, value in values.items() if key not in ("rank", "score")}
        write_run(folder / str(number), a_record(ranks=[rank], run_id=str(number), **record), **files)
    return summarized(folder)


def summarized(runs: Path) -> list[Values]:
    """The rows of a summary, without its plots, as its file has them."""
    (runs / "summary.json").write_text(json.dumps(read_runs([runs]).to_json()))
    return read_rows(runs / "summary.json")


def loss(value: float) -> dict[str, Any]:
    return {"rank": {"eval_losses": [{"step": 20, "loss": value}]}}


def answers(f1: float) -> dict[str, Any]:
    spans = {"exact_match": [0.2, 0.3], "f1": [0.4, 0.6]}
    score = {"task": "squad", "examples": 200, "exact_match": 0.25, "f1": f1, "intervals": spans}
    return {"task": "squad", "score": score}


def text(nats: float) -> dict[str, Any]:
    score = {"task": "lm", "tokens": 1_000, "loss": nats, "perplexity": math.exp(nats)}
    return {"task": "lm", "score": score}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        # 32 samples in 0.8 s: 40 per second; in 0.84 s 38.1, in 0.85 s 37.6; 38.0 are allowed.
        ((0.8,), (0.84,), []),
        ((0.8,), (0.85,), ["samples_per_second"]),
        # 40, 20 and 26.7 samples/s: 28.9 +- 4.303 x 10.18 / sqrt(3) = 28.9 +- 25.3.
        ((0.8, 1.6, 1.2), (3.2, 1.6, 2.4), []),
        ((0.8, 0.8, 0.8), (0.81, 0.81, 0.81), ["samples_per_second"]),
        ({"rank": {"peak_resident_bytes": 100}}, {"rank": {"peak_resident_bytes": 105}}, []),
        ({"rank": {"peak_resident_bytes": 100}}, {"rank": {"peak_resident_bytes": 106}}, ["peak_memory_bytes"]),
        # Accuracy may fall to the end of the old interval.
        ({"score": a_score()}, {"score": a_score(execution_accuracy=0.5)}, []),
        ({"score": a_score()}, {"score": a_score(execution_accuracy=0.49)}, ["execution_accuracy"]),
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
def test_a_row_may_get_worse_by_so_much(tmp_path: Path, old: Any, new: Any, found: list[str]) -> None:
    before, now = (
        rows(tmp_path / name, **values) if isinstance(values, dict) else rows(tmp_path / name, *values)
        for name, values in (("old", old), ("new", new))
    )
    verdict = compare(before, now)
    assert ([one.figure for one in verdict.worse], verdict.judged) == (found, 1)


def test_a_row_that_fails_now_is_worse_and_one_that_had_failed_cannot_be(tmp_path: Path) -> None:
    write_run(tmp_path / "failed", a_failed_record("oom"))
    failed, well = summarized(tmp_path / "failed"), rows(tmp_path / "well")
    assert [one.figure for one in compare(well, failed).worse] == ["status"]
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
def test_what_cannot_be_judged_is_named(tmp_path: Path, old: dict[str, Any], new: dict[str, Any], said: str) -> None:
    found = compare(rows(tmp_path / "old", **old), rows(tmp_path / "new", **new))
    assert (found.worse, found.not_comparable) == ((), (said,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "broken JSON"),
        ('{"schema_version": 1, "groups": []}', "not a summary.json of version 2"),
        (None, "No such file"),
    ],
)
def test_an_old_summary_that_cannot_be_judged_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    with pytest.raises(UserError, match=rf"old\.json: .*{said}"):
        read_rows(tmp_path / "old.json")


def test_a_summary_from_before_there_were_causal_runs_is_still_judged() -> None:
    old = read_rows(Path(__file__).parent / "data" / "summary-before-causal.json")
    verdict = compare(old, old)
    assert (verdict.worse, verdict.not_comparable, verdict.judged) == ((), (), len(old)) and "f1" not in old[0]


def test_people_read_rows_new_and_allowed(tmp_path: Path) -> None:
    text = str(compare(rows(tmp_path / "old"), rows(tmp_path / "new", 1.0)))
    assert "1 figure got worse in 1 compared row" in text and "| 40  | 32  | 38 " in text


def test_a_summary_may_be_judged_by_the_one_that_it_replaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(tmp_path, 0.4)
    (tmp_path / "0" / "record.json").write_text(json.dumps(a_record(run_id="0")))
    argv = ["summary", str(tmp_path / "0"), "--out", str(tmp_path), "--against", str(tmp_path / "summary.json")]
    assert main([*argv, "--json"]) == 1
    (worse,) = json.loads(capsys.readouterr().out)["against"]["worse"]
    assert (worse["figure"], worse["old"], worse["new"]) == ("samples_per_second", *map(pytest.approx, (80.0, 40.0)))
