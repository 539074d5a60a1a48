"""Prediction and scoring of a trained run, by the verbs that users call."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from zeropods.cli import main
from zeropods.data.wikisql import read_split
from zeropods.evaluate.generate import Answerer, Generation
from zeropods.evaluate.predictions import read_predictions
from zeropods.sql.text import parse_query


def answers(run: Path, data: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    arguments = ["predict", "--model", str(run), "--data", str(data), "--split", "test", "--limit", "24"]
    assert main([*arguments, "--max-new-tokens", "40", "--out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("flags", [(), ("--num-beams", "3"), ("--batch-size", "1")])
def test_every_constrained_answer_is_a_query_on_its_table(
    trained: Path, sample: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    rows = answers(trained, sample, tmp_path / "p.jsonl", *flags)
    for row, example in zip(rows, itertools.islice(read_split(sample, "test"), 24), strict=True):
        assert (row["index"], row["question"]) == (example.index, example.question)
        parsed = parse_query(row["prediction"], example.table.header)
        assert parsed is not None
        assert row["query"] is not None


def test_answers_in_batches_are_those_one_at_a_time(trained: Path, sample: Path) -> None:
    answerer = Answerer.load(trained)
    examples = list(itertools.islice(read_split(sample, "test"), 16))
    single, batched = (answerer.answer(examples, Generation(max_new_tokens=30, batch_size=size)) for size in (1, 16))
    assert single == batched


def test_unconstrained_answers_may_be_no_query(trained: Path, sample: Path, tmp_path: Path) -> None:
    rows = answers(trained, sample, tmp_path / "p.jsonl", "--unconstrained")
    assert any(row["query"] is None for row in rows)


def test_predict_and_score_print_one_document_each(
    trained: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.jsonl"
    answers(trained, sample, out, "--json")
    speed = json.loads(capsys.readouterr().out)
    assert speed["questions_per_second"] == pytest.approx(24 / speed["seconds"])
    assert main(["score", str(out), "--data", str(sample), "--split", "test", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["examples"], score["unparseable"]) == (24, 0)
    assert json.loads((tmp_path / "score.test.json").read_text()) == score


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--model", "nowhere"], "no trained model"),
        (["--split", "validation"], "split 'validation'"),
        (["--limit", "0"], "--limit 0"),
        (["--batch-size", "0"], "--batch-size 0"),
    ],
)
def test_bad_calls_are_one_line_and_leave_the_old_file(
    trained: Path,
    sample: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: list[str],
    said: str,
) -> None:
    out = tmp_path / "p.jsonl"
    out.write_text("old")
    call = ["predict", "--model", str(trained), "--data", str(sample), "--split", "test", "--out", str(out)]
    assert main([*call, *changed]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert out.read_text() == "old"


def test_a_prediction_file_is_read_back_as_it_was_written(trained: Path, sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    rows = answers(trained, sample, out)
    assert [prediction.to_json() for prediction in read_predictions(out)] == rows
