"""The local metric modules, loaded from their folders."""

from __future__ import annotations

import json
from pathlib import Path

import evaluate
import pytest

import zeropods.evaluate
from zeropods.data.wikisql import read_split
from zeropods.evaluate.predictions import Prediction, write_predictions
from zeropods.evaluate.score import score_predictions
from zeropods.sql.query import Condition, Query
from zeropods.sql.text import format_query

METRICS = Path(zeropods.evaluate.__file__).parent / "metric"
HEADER = ["Name", "Goals"]
GOLD = Query(0, 3, (Condition(1, 1, "3"), Condition(0, 0, "Ann")))
REFERENCE = {"query": format_query(GOLD, HEADER), "header": HEADER}


@pytest.fixture(scope="module")
def accuracy():
    return evaluate.load(str(METRICS / "query_accuracy"), keep_in_memory=True)


@pytest.fixture(scope="module")
def rouge():
    return evaluate.load(str(METRICS / "rouge_f1"), keep_in_memory=True)


def test_query_accuracy_is_the_hand_computed_one(accuracy):
    predictions = [
        "SELECT COUNT Name FROM table WHERE Goals > 3 AND Name = Ann",
        "SELECT COUNT Name FROM table WHERE Name = ann AND Goals > 3",
        "SELECT MAX Name FROM table",
        "SELECT",
    ]
    assert accuracy.compute(predictions=predictions, references=[REFERENCE] * 4) == {
        "exact_match": 1 / 4,
        "logical_form_accuracy": 2 / 4,
        "unparseable": 1,
    }


def test_query_accuracy_reads_json_on_both_sides(accuracy):
    document = json.dumps(GOLD.to_json())
    result = accuracy.compute(
        predictions=[document, '{"sel": 9, "agg": 0, "conds": []}', "{"],
        references=[REFERENCE, REFERENCE | {"query": document}, REFERENCE],
    )
    assert result == {"exact_match": 1 / 3, "logical_form_accuracy": 1 / 3, "unparseable": 2}


def test_reference_that_is_no_query_is_rejected(accuracy):
    with pytest.raises(ValueError, match="reference 'SELECT' is no query on the columns"):
        accuracy.compute(predictions=["x"], references=[REFERENCE | {"query": "SELECT"}])


def test_rouge_is_the_hand_computed_one(rouge):
    """`a b c` against `a b d e`: 2 of 3 and 4 words in common, 1 of 2 and 3 pairs, F1 4/7 and 2/5."""
    result = rouge.compute(predictions=["a b c"], references=["a b d e"])
    assert result == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7, "rougeLsum": 4 / 7})


def test_rouge_without_average_has_a_value_for_each_pair(rouge):
    result = rouge.compute(predictions=["a b", "a b"], references=["a b", "c d"], average=False)
    assert result["rouge2"] == [1.0, 0.0]


def test_score_of_a_file_holds_the_mean_rouge_of_its_texts(shared_data, tmp_path):
    folder, path = shared_data / "wikisql", tmp_path / "predictions.dev.jsonl"
    first, second, *_ = read_split(folder, "dev")
    right = format_query(first.query, first.table.header)
    texts = [(first, right), (second, "nothing alike")]
    write_predictions(
        path,
        [Prediction(index=e.index, question=e.question, text=text, query=None) for e, text in texts],
    )
    rouge = score_predictions(path, folder, "dev", rouge=True).rouge
    assert rouge == {"rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5, "rougeLsum": 0.5}
