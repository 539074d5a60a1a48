"""LLMSQL from its files to a score: a small set in its layout is prepared, trained on, answered and scored."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.full.conftest import TINY, run_several
from tests.made_llmsql import TEST, TRAIN, write_json_lines, write_llmsql
from zeropods.cli import main
from zeropods.data.manifest import read_manifest
from zeropods.data.wikisql import read_split
from zeropods.errors import UserError
from zeropods.evaluate.score import Prediction, score, write_predictions
from zeropods.measure.score_json import QueryScore, read_score
from zeropods.sql.query import format_query
from zeropods.train.sampler import load_split


@pytest.fixture
def llmsql(tmp_path: Path) -> Path:
    return write_llmsql(tmp_path / "llmsql")


def gold(folder: Path, out: Path, wrong: Iterable[int] = ()) -> Path:
    """A prediction file with the gold query of each question, but for those of some indices."""
    predictions = []
    for example in read_split(folder, "test"):
        query = None if example.index in wrong else example.query
        text = "nothing" if query is None else format_query(query, example.table.header)
        predictions.append(Prediction(index=example.index, question=example.question, text=text, query=query))
    write_predictions(out, predictions)
    return out


def json_of(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_answers_are_scored_by_both_rules_and_written_for_the_evaluator(
    llmsql: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = gold(llmsql, tmp_path / "predictions.test.jsonl", wrong=[0])
    result = json_of(capsys, "score", path, "--data", llmsql, "--split", "test")
    assert (result["examples"], result["unparseable"], result["logical_form_accuracy"]) == (8, 1, 7 / 8)
    # By LLMSQL's rules: the first is no query, the fourth's rows cannot be sorted, the eighth was not asked.
    assert result["llmsql"] == {
        "evaluator": "llmsql 0.1.16", "total": 9, "matches": 6, "accuracy": pytest.approx(6 / 9), "pred_none": 1,
        "gold_none": 1, "sql_errors": 1, "beyond_form": 1,
    }  # fmt: skip
    assert result["own_metrics"] == {"llmsql_execution": pytest.approx(6 / 9)}
    assert result["groups"]["known_tables"]["examples"] == 5
    saved = json.loads((tmp_path / "score.test.json").read_text())
    assert saved == result
    read_back = read_score(tmp_path / "score.test.json")
    assert isinstance(read_back, QueryScore) and read_back.own_metrics == saved["own_metrics"]

    lines = [json.loads(line) for line in (tmp_path / "llmsql.test.jsonl").read_text().splitlines()]
    assert [line["question_id"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert lines[0]["completion"] == "nothing"
    statement = 'SELECT COUNT("Time") FROM "2-200-3" WHERE "Year" = 2003 AND "Winner" = \'Ann Bee\';'
    assert lines[5]["completion"] == statement

    assert main(["score", str(path), "--data", str(llmsql), "--split", "test"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "llmsql execution 0.667 [" in first
    assert second == (
        "as llmsql 0.1.16 counts: 6 of 9 right; 1 statement failed, 1 found a lone NULL, as did 1 of the gold ones; "
        "1 question not of WikiSQL's form: counted as wrong"
    )


def test_a_file_of_its_evaluator_is_scored(llmsql: Path, tmp_path: Path) -> None:
    lines = [{"question_id": line["question_id"], "completion": f"Sure: {line['sql']}"} for line in reversed(TEST)]
    lines[0]["completion"] = 'SELECT "Time" FROM "Table" WHERE "Year" = 1999 AND "Winner" = "bo o\'hara"'
    path = write_json_lines(tmp_path / "theirs.jsonl", lines)
    result = score(path, llmsql, "test")
    assert isinstance(result, QueryScore)
    # The logical form of the last question is right but for its letter case, which it does not regard.
    assert (result.examples, result.logical_form_accuracy, result.unparseable) == (8, 1.0, 0)
    # All but the ninth and the fourth, whose rows cannot be sorted: a statement of any form can be right.
    assert result.own_metrics == {"llmsql_execution": pytest.approx(7 / 9)}
    assert not (tmp_path / "llmsql.test.jsonl").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"question_id": 77, "completion": ""}], "theirs.jsonl:1: question_id 77 is not one of the split; score the"),
        ([{"question_id": 1, "completion": ""}] * 2, "theirs.jsonl:2: question_id 1 occurs twice; keep one of them"),
        ([{"question_id": "1", "completion": ""}], "theirs.jsonl:1: question_id is '1'"),
        ([{"question_id": 1, "completion": None}], "theirs.jsonl:1: completion is None"),
        ([{"question_id": 8, "completion": ""}], "theirs.jsonl: no line answers a question whose gold statement is"),
    ],
)
def test_a_file_of_its_evaluator_that_does_not_fit_is_refused(
    llmsql: Path, tmp_path: Path, lines: list[object], message: str
) -> None:
    path = write_json_lines(tmp_path / "theirs.jsonl", lines)
    with pytest.raises(UserError, match=message):
        score(path, llmsql, "test")
    with pytest.raises(
        UserError, match=r"theirs.jsonl: is in the form of LLMSQL's evaluator, but .* does not have dev"
    ):
        score(path, tmp_path, "dev")


def test_a_set_in_its_layout_is_prepared_trained_on_and_answered(
    llmsql: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unlike = TRAIN[0] | {"question_id": 105, "sql": 'SELECT COUNT(*) FROM "1-100-1"'}
    write_json_lines(llmsql / "train_questions.jsonl", [TRAIN[0], unlike, *TRAIN[1:]])
    prepared = tmp_path / "prepared"
    call = ["prepare", "--data", str(llmsql), "--tokenizer", "t5-tiny", "--out", str(prepared)]
    assert main(call) == 0
    said = "1 row whose query cannot be read back from its text, so that no answer is right; correct or remove them"
    assert f"{said}, the first is row 2 of train: 'SELECT COUNT(*) FROM \"1-100-1\"'\n" in capsys.readouterr().out
    manifest = read_manifest(prepared)
    assert {name: split.rows for name, split in manifest.splits.items()} == {"train": 3, "dev": 1, "test": 8}
    assert list(manifest.source_sha256) == [
        "train_questions.jsonl", "tables.jsonl", "val_questions.jsonl", "test_questions.jsonl",
    ]  # fmt: skip
    split = load_split(prepared, "train")
    assert split is not None and len(split) == 3

    run = tmp_path / "run"
    flags = [*TINY, "--max_steps", "2", "--per_device_train_batch_size", "2", "--dataset_path", prepared]
    run_several(flags, (1, run, []))
    capsys.readouterr()
    # The raw data are found again; the test split is the one that the model has not seen.
    result = json_of(capsys, "predict", "--model", run, "--score", "--max-new-tokens", "24")
    assert (result["examples"], result["score"]["llmsql"]["total"]) == (8, 9)
    lines = [json.loads(line) for line in (run / "llmsql.test.jsonl").read_text().splitlines()]
    assert all(line["completion"].startswith("SELECT ") for line in lines)
