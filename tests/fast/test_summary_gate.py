"""The regression gate: what is worse, what is allowed, and what cannot be judged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.cli import summary as cli_summary
from zeropods.errors import UserError
from zeropods.report.gate import compare, gate_text, read_old
from zeropods.report.summary import read_runs

Document = dict[str, Any]


def a_document(folder: Path, seconds: tuple[float, ...] = (0.8,), **values: Any) -> Document:
    """The summary of repeats with steps of those seconds."""
    for number, each in enumerate(seconds):
        rank = a_rank(step_seconds=[each] * 20, **values.get("rank", {}))
        files = {"score_test": values["score"]} if "score" in values else {}
        record = {key: value for key, value in values.items() if key not in ("rank", "score")}
        write_run(folder / str(number), a_record(ranks=[rank], run_id=str(number), **record), **files)
    return read_runs([folder]).to_json()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("samples_per_second", float("nan")),
        ("samples_per_second", "fast"),
        ("eval_loss", True),
        ("samples_per_second_interval", [1, 2, 3]),
        ("execution_accuracy_interval", [0.5, float("nan")]),
        ("settings", None),
        ("status", 5),
        ("memory_kind", 1),
    ],
)
def test_an_old_summary_that_cannot_be_judged_is_refused(tmp_path: Path, key: str, value: object) -> None:
    document = a_document(tmp_path / "old")
    document["groups"][0][key] = value
    (tmp_path / "old.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=rf"old\.json: groups\.0\.{key} is "):
        read_old(tmp_path / "old.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_damaged_old_summary_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(UserError, match=r"old\.json: no JSON object; .* summarize the old runs again"):
        read_old(tmp_path / "old.json")


def worse(old: Document, new: Document) -> list[str]:
    return [one["figure"] for one in compare(old, new).to_json()["worse"]]


@pytest.mark.parametrize(("seconds", "found"), [(0.8, []), (0.84, []), (0.85, ["samples_per_second"]), (0.5, [])])
def test_single_runs_may_lose_five_percent_of_their_speed(tmp_path: Path, seconds: float, found: list[str]) -> None:
    # 32 samples in 0.8 s: 40 a second; in 0.84 s 38.1, in 0.85 s 37.6; 38.0 are allowed.
    old, new = a_document(tmp_path / "old"), a_document(tmp_path / "new", (seconds,))
    assert worse(old, new) == found


def test_repeats_may_lose_what_both_intervals_allow(tmp_path: Path) -> None:
    # 40 and 20 samples/s: 30 +- 12.706 x 14.142 / sqrt(2) = 30 +- 127.
    old, new = a_document(tmp_path / "old", (0.8, 1.6)), a_document(tmp_path / "new", (3.2, 1.6))
    assert worse(old, new) == []


def test_repeats_without_spread_may_lose_nothing(tmp_path: Path) -> None:
    old, new = a_document(tmp_path / "old", (0.8, 0.8)), a_document(tmp_path / "new", (0.81, 0.81))
    assert worse(old, new) == ["samples_per_second"]


@pytest.mark.parametrize(("size", "found"), [(105, []), (106, ["peak_memory_bytes"])])
def test_memory_may_grow_by_five_percent(tmp_path: Path, size: int, found: list[str]) -> None:
    old, new = (a_document(tmp_path / str(n), rank={"peak_resident_bytes": n}) for n in (100, size))
    assert worse(old, new) == found


@pytest.mark.parametrize(("share", "found"), [(0.5, []), (0.49, ["execution_accuracy"])])
def test_accuracy_may_fall_to_the_end_of_the_old_interval(tmp_path: Path, share: float, found: list[str]) -> None:
    old = a_document(tmp_path / "old", score=a_score())
    assert worse(old, a_document(tmp_path / "new", score=a_score(execution_accuracy=share))) == found


@pytest.mark.parametrize(("loss", "found"), [(2.02, []), (2.03, ["eval_loss"])])
def test_evaluation_loss_may_rise_by_one_percent(tmp_path: Path, loss: float, found: list[str]) -> None:
    old, new = (
        a_document(tmp_path / str(one), rank={"eval_losses": [{"step": 20, "loss": one}]}) for one in (2.0, loss)
    )
    assert worse(old, new) == found


def test_a_row_that_is_gone_is_worse(tmp_path: Path) -> None:
    old, new = a_document(tmp_path / "old"), a_document(tmp_path / "new", precision="bf16")
    assert worse(old, new) == ["status"]


def test_a_row_that_fails_now_is_worse(tmp_path: Path) -> None:
    write_run(tmp_path / "new", a_failed_record("oom"))
    assert worse(a_document(tmp_path / "old"), read_runs([tmp_path / "new"]).to_json()) == ["status"]


def test_a_row_that_had_failed_cannot_get_worse(tmp_path: Path) -> None:
    write_run(tmp_path / "old", a_failed_record())
    old = read_runs([tmp_path / "old"]).to_json()
    assert compare(old, a_document(tmp_path / "new")).judged == 0


def test_other_versions_are_judged(tmp_path: Path) -> None:
    old, new = a_document(tmp_path / "old"), a_document(tmp_path / "new", versions={"python": "3.12"})
    assert compare(old, new).judged == 1


def test_other_hardware_is_not_judged(tmp_path: Path) -> None:
    old, new = a_document(tmp_path / "old"), a_document(tmp_path / "new", (9.0,), hardware={"cpu": "slow"})
    found = compare(old, new)
    assert (found.worse, found.not_comparable) == ((), ("0: was measured on other hardware",))


def test_another_kind_of_memory_is_not_judged(tmp_path: Path) -> None:
    old = a_document(tmp_path / "old", rank={"peak_resident_bytes": 1})
    new = a_document(tmp_path / "new", rank={"peak_allocated_bytes": 9})
    assert compare(old, new).not_comparable == ("0: peak_memory_bytes, resident and allocated: not measured in both",)


def test_an_accuracy_that_is_not_measured_any_more_is_named(tmp_path: Path) -> None:
    old, new = a_document(tmp_path / "old", score=a_score()), a_document(tmp_path / "new")
    assert compare(old, new).not_comparable == ("0: execution_accuracy: not measured in both",)


def test_people_read_old_new_and_allowed(tmp_path: Path) -> None:
    old, new = a_document(tmp_path / "old"), a_document(tmp_path / "new", (1.0,))
    text = gate_text(compare(old, new).to_json())
    assert "1 figures got worse, of 1 rows compared" in text and "| 40  | 32  | 38 " in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema_version": 1}', "schema_version 1"),
        ('{"schema_version": 2}', "groups are not those"),
    ],
)
def test_what_is_no_summary_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(UserError, match=reason):
        read_old(tmp_path / "old.json")


def test_a_summary_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_old(tmp_path / "old.json")


def verb(*argv: str) -> tuple[dict[str, Any], int]:
    """Result and exit status of `zeropods summary ARGV`."""
    root = argparse.ArgumentParser()

    def add(verbs: Any, name: str, help_: str, run: Callable[..., Any]) -> Any:
        parser = verbs.add_parser(name)
        parser.set_defaults(run=run)
        return parser

    cli_summary.add_verbs(root.add_subparsers(), add)
    arguments = root.parse_args(["summary", *argv])
    result = arguments.run(arguments)
    return result, arguments.status(result)


def test_a_summary_may_be_judged_by_the_one_that_it_replaces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = a_document(tmp_path / "runs", (0.4,))
    out.mkdir()
    (out / "summary.json").write_text(json.dumps(old))
    (tmp_path / "runs" / "0" / "record.json").write_text(json.dumps(a_record(run_id="0")))
    result, status = verb(str(tmp_path / "runs"), "--out", str(out), "--against", str(out / "summary.json"))
    assert ([one["figure"] for one in result["against"]["worse"]], status) == (["samples_per_second"], 1)


@pytest.mark.parametrize("price", ["-1", "nan", "much"])
def test_a_price_is_a_number_of_at_least_zero(tmp_path: Path, price: str) -> None:
    with pytest.raises(SystemExit):
        verb("--out", str(tmp_path), "--price-per-hour", price)
