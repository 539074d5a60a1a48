"""The precision that runs were measured in: composed from ranks, shown, and kept apart where runs differ in it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_config, a_failed_record, a_rank, a_record, a_run, write_run
from zeropods.measure.record import (
    MeasuredPrecision,
    RankMeasurement,
    compose_record,
    read_record,
)
from zeropods.report.gate import compare
from zeropods.report.run import Run, technique_table
from zeropods.report.summary import Summary, read_runs

FP32 = MeasuredPrecision(
    weights="fp32", master_weights="fp32", optimizer_states="fp32", gradients_sent="fp32", linear_output="fp32"
)
"""What an FP32 run of several ranks measures."""
ALONE = replace(FP32, gradients_sent=None)
BF16 = replace(FP32, weights="bf16", gradients_sent="bf16", linear_output="bf16")


def measured(precision: MeasuredPrecision, **values: Any) -> dict[str, Any]:
    """Values of a run that measured this precision."""
    return {"measured_precision": asdict(precision), **values}


def two(folder: Path, one: dict[str, Any], other: dict[str, Any]) -> Summary:
    """The summary of two runs, `a` and `b`."""
    a_run(folder / "a", **one)
    a_run(folder / "b", **other)
    return read_runs([folder])


def composed(folder: Path, *precisions: MeasuredPrecision | None) -> MeasuredPrecision | None:
    """What the record says of ranks that measured these."""
    (folder / "config.json").write_text(json.dumps(a_config(pods=len(precisions))))
    for rank, precision in enumerate(precisions):
        RankMeasurement(rank=rank, host=f"pod{rank}", status="ok", measured_precision=precision).write(folder)
    return compose_record(folder).measured_precision


def test_a_record_has_what_all_ranks_measured(tmp_path: Path) -> None:
    assert composed(tmp_path, FP32, FP32) == FP32


def test_a_rank_that_measured_nothing_leaves_what_the_others_measured(tmp_path: Path) -> None:
    assert composed(tmp_path, None, FP32) == FP32
    assert composed(tmp_path, None, None) is None


def test_where_ranks_differ_the_record_and_the_summary_name_them(tmp_path: Path) -> None:
    different = composed(tmp_path, FP32, replace(FP32, weights="bf16"), FP32)
    assert different == replace(FP32, weights="fp32 on ranks 0, 2; bf16 on rank 1")
    ranks = [a_rank(0, measured_precision=FP32), a_rank(1, measured_precision=replace(FP32, weights="bf16"))]
    weights = "fp32 on rank 0; bf16 on rank 1"
    record = a_record(ranks=ranks, **measured(replace(FP32, weights=weights)))
    write_run(tmp_path / "runs" / "a", record)
    said = f"a: its ranks computed in different precisions: weights {weights}"
    assert said in read_runs([tmp_path / "runs"]).remarks()


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (FP32, "fp32"),
        (ALONE, "fp32"),
        (BF16, "bf16; master weights, optimizer states in fp32"),
        (replace(ALONE, linear_output="fp16"), "fp16; weights, master weights, optimizer states in fp32"),
    ],
)  # fmt: skip
def test_people_read_the_format_of_the_arithmetic_first(precision: MeasuredPrecision, text: str) -> None:
    assert precision.text == text


def test_the_summary_of_a_run_whose_formats_were_not_measured_has_the_precision_that_was_asked_for(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "a", a_record())
    assert read_record(run).measured_precision is None
    table = dict(Run(run).summary(whole=True).rows)
    assert table["precision"] == "fp32" and "measured precision" not in table


def test_the_table_of_a_run_and_the_summary_say_what_ran(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", pods=2, precision="bf16", **measured(BF16))
    said = "bf16; master weights, optimizer states in fp32"
    assert dict(Run(run).summary().rows)["measured precision"] == said
    summary = read_runs([tmp_path])
    assert said in summary.to_markdown()
    (row,) = summary.to_json()["groups"]
    assert (row["precision_weights"], row["precision_master_weights"]) == ("bf16", "fp32")


@pytest.mark.parametrize("part", [*asdict(FP32)])
def test_runs_that_differ_in_any_measured_format_are_neither_repeats_nor_compared(tmp_path: Path, part: str) -> None:
    other = replace(FP32, **{part: "bf16"})
    summary = two(tmp_path, measured(FP32, pods=2), measured(other, pods=2))
    assert [(row["repeats"], row["speed_up"]) for row in summary.to_json()["groups"]] == [(1, None), (1, None)]
    assert f"measured precision {part}: fp32 (A ddp x2); bf16 (B ddp x2)" in summary.differences()


def test_one_process_that_sends_no_gradients_is_compared_with_several_that_do(tmp_path: Path) -> None:
    summary = two(tmp_path, measured(ALONE), measured(FP32, pods=2, seconds=0.4))
    assert [row["speed_up"] for row in summary.to_json()["groups"]] == pytest.approx([1, 2])
    assert summary.differences() == []


def test_a_run_that_computed_otherwise_than_it_was_asked_to_is_remarked(tmp_path: Path) -> None:
    a_run(tmp_path / "a", **measured(replace(ALONE, linear_output="fp16")))
    assert "a: was asked for fp32, but its linear layers returned fp16" in read_runs([tmp_path]).remarks()


def test_a_repeat_that_failed_early_is_still_one_and_an_unmeasured_one_where_the_others_agree(tmp_path: Path) -> None:
    a_run(tmp_path / "a", **measured(ALONE))
    write_run(tmp_path / "b", a_failed_record("oom", effective_batch_size=48, run_id="b"))
    (row,) = read_runs([tmp_path]).to_json()["groups"]
    assert (row["status"], row["repeats"], row["precision_weights"]) == ("1 ok, 1 oom", 1, "fp32")
    a_run(tmp_path / "c")
    assert [row["repeats"] for row in read_runs([tmp_path]).to_json()["groups"]] == [2]
    a_run(tmp_path / "d", **measured(replace(ALONE, linear_output="bf16")))
    assert [row["repeats"] for row in read_runs([tmp_path]).to_json()["groups"]] == [1, 1, 1]


def test_the_table_of_techniques_compares_no_run_of_another_precision(tmp_path: Path) -> None:
    runs = [
        Run(a_run(tmp_path / "a", **measured(ALONE))),
        Run(a_run(tmp_path / "b", "zero1", **measured(ALONE))),
        Run(a_run(tmp_path / "c", "zero2", **measured(replace(ALONE, linear_output="bf16")))),
    ]
    table = technique_table(runs)
    lines = [dict(zip(table.header, line, strict=True)) for line in table.rows]
    assert [line["against the first"] for line in lines] == ["1.00 x", "1.00 x", "other precision"]
    assert [line["loss difference"] for line in lines] == ["0", "0", "other precision"]
    assert lines[0]["precision"] == "fp32" and lines[2]["precision"].startswith("bf16; ")


def test_the_gate_judges_no_row_that_ran_in_another_precision_and_says_why(tmp_path: Path) -> None:
    def rows(name: str, **values: Any) -> list[dict[str, Any]]:
        a_run(tmp_path / name / "run", **values)
        return json.loads(json.dumps(read_runs([tmp_path / name]).to_json()["groups"]))

    old, new = rows("old", **measured(ALONE)), rows("new", seconds=9.0, **measured(replace(ALONE, weights="bf16")))
    verdict = compare(old, new)
    assert (verdict.worse, verdict.judged) == ((), 0)
    assert verdict.not_comparable == ("run: measured precision weights was fp32, now bf16",)
    # A row of runs that did not measure it is still one to compare with.
    before = rows("before")
    assert compare(before, rows("after", **measured(ALONE))).judged == 1
