"""Scores of five examples, computed by hand, and of the real dev split."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from scipy.stats import binom, bootstrap

from zeropods.data.wikisql import read_split
from zeropods.errors import UserError
from zeropods.evaluate.predictions import Prediction, write_predictions
from zeropods.evaluate.score import interval, score_predictions
from zeropods.sql.query import Condition, Query
from zeropods.sql.text import format_query, parse_query

HEADER = ["Name", "Goals"]
TABLES = [
    {"id": "known", "header": HEADER, "types": ["text", "real"], "rows": [["Ann", 3], ["Bob", 3]]},
    {"id": "new", "header": HEADER, "types": ["text", "text"], "rows": []},
]
GOLD = [
    ("known", Query(0, 0, (Condition(1, 0, "3"),))),
    ("known", Query(1, 0, (Condition(0, 0, "Ann"),))),
    ("known", Query(0, 3)),
    ("known", Query(0, 3, (Condition(1, 1, "9"),))),
    ("new", Query(0, 0, (Condition(0, 0, "Ann"), Condition(1, 0, "3")))),
]
ANSWERS = [
    "SELECT Name FROM table WHERE Goals > 2",
    "SELECT Goals FROM table WHERE Name = ann",
    "SELECT COUNT Name FROM",
    "SELECT COUNT Name FROM table WHERE Goals > 9",
    "SELECT Name FROM table WHERE Goals = 3 AND Name = Ann",
]


def _write_lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.fixture
def data(tmp_path):
    """Five dev examples on two tables, one of which train has too; no executable gold but the first three."""
    folder = tmp_path / "data"
    folder.mkdir()
    _write_lines(folder / "train.tables.jsonl", TABLES[:1])
    _write_lines(folder / "dev.tables.jsonl", TABLES)
    _write_lines(
        folder / "dev.jsonl",
        [
            {"phase": 1, "table_id": table, "question": f"question {index}", "sql": query.to_json()}
            for index, (table, query) in enumerate(GOLD)
        ],
    )
    return folder


def _answered(tmp_path, answers):
    path = tmp_path / "predictions.dev.jsonl"
    write_predictions(
        path,
        [
            Prediction(index=index, question=f"question {index}", text=text, query=parse_query(text, HEADER))
            for index, text in answers
        ],
    )
    return path


@pytest.fixture
def answers(tmp_path):
    return _answered(tmp_path, enumerate(ANSWERS))


def test_counts_are_the_hand_computed_ones(data, answers):
    score = score_predictions(answers, data, "dev")
    assert (score.examples, score.executable, score.unparseable) == (5, 3, 1)


def test_exact_match_compares_the_text(data, answers):
    assert score_predictions(answers, data, "dev").exact_match == 1 / 5


def test_logical_form_ignores_order_and_letter_case(data, answers):
    assert score_predictions(answers, data, "dev").logical_form_accuracy == 3 / 5


def test_execution_counts_equal_results_of_usable_gold_queries(data, answers):
    assert score_predictions(answers, data, "dev").execution_accuracy == 2 / 3


def test_groups_split_by_the_tables_of_train(data, answers):
    groups = score_predictions(answers, data, "dev").groups
    shown = {name: (score.examples, score.logical_form_accuracy) for name, score in groups.items()}
    assert shown == {"known_tables": (4, 2 / 4), "unseen_tables": (1, 1.0)}


def test_execution_accuracy_is_null_where_nothing_can_be_executed(data, answers):
    group = score_predictions(answers, data, "dev").groups["unseen_tables"]
    assert group.executable == 0
    assert group.execution_accuracy is group.intervals["execution_accuracy"] is None


def test_groups_are_null_without_a_train_file(data, answers):
    (data / "train.tables.jsonl").unlink()
    assert score_predictions(answers, data, "dev").groups is None


def test_groups_are_null_where_there_is_one_kind(data, tmp_path):
    path = _answered(tmp_path, [(0, ANSWERS[0])])
    assert score_predictions(path, data, "dev").groups is None


def test_score_file_lies_beside_the_predictions_with_its_keys(data, answers):
    score = score_predictions(answers, data, "dev")
    document = json.loads((answers.parent / "score.dev.json").read_text())
    assert document == json.loads(json.dumps(score.to_json()))
    assert list(document) == [
        "task",
        "examples",
        "exact_match",
        "logical_form_accuracy",
        "execution_accuracy",
        "executable",
        "unparseable",
        "intervals",
        "rouge",
        "groups",
        "own_metrics",
    ]


def test_subset_in_any_order_is_scored_by_index(data, tmp_path):
    path = _answered(tmp_path, [(4, ANSWERS[4]), (1, ANSWERS[1])])
    score = score_predictions(path, data, "dev")
    assert (score.examples, score.logical_form_accuracy, score.executable) == (2, 1.0, 1)


def test_official_form_is_scored_by_the_formatted_query(data, tmp_path):
    lines = [{"query": GOLD[0][1].to_json()}, {"error": "?"}, {"query": {"sel": 9, "agg": 3, "conds": []}}]
    score = score_predictions(_write_lines(tmp_path / "official.jsonl", lines), data, "dev")
    assert (score.exact_match, score.logical_form_accuracy, score.execution_accuracy) == (1 / 3,) * 3
    assert score.unparseable == 1


@pytest.mark.parametrize("value", ["many", "\ud800"])
def test_prediction_with_a_bad_value_is_wrong_not_an_error(data, tmp_path, value):
    path = _answered(tmp_path, [(0, f"SELECT Name FROM table WHERE Goals = {value}")])
    assert score_predictions(path, data, "dev").execution_accuracy == 0.0


def test_index_beyond_the_split_is_named(data, tmp_path):
    path = _answered(tmp_path, [(0, ANSWERS[0]), (5, "x")])
    with pytest.raises(UserError, match=r"jsonl:2: index 5; the examples of dev are 0 to 4"):
        score_predictions(path, data, "dev")


def test_predictions_of_another_split_are_refused(data, tmp_path):
    path = tmp_path / "p.jsonl"
    write_predictions(path, [Prediction(index=0, question="Another?", text="", query=None)])
    with pytest.raises(UserError, match=r"l:1: question 'Another\?', but example 0 of dev asks 'question 0'"):
        score_predictions(path, data, "dev")


def test_missing_split_is_named(data, answers):
    with pytest.raises(UserError, match=r"test\.tables\.jsonl: no such file"):
        score_predictions(answers, data, "test")


@pytest.mark.parametrize(
    ("correct", "examples", "expected"),
    [(0, 0, None), (1, 2, (0.0, 1.0)), (30, 100, (0.21, 0.39))],
)
def test_interval_is_the_hand_computed_one(correct, examples, expected):
    assert interval(correct, examples) == expected


@pytest.mark.parametrize(("correct", "expected"), [(0, (0.0, 0.43448)), (5, (0.56552, 1.0))])
def test_a_share_of_none_or_all_has_an_interval_with_a_width(correct, expected):
    # Wilson's ends for 0 and 5 of 5: z^2 / (n + z^2) = 3.84146 / 8.84146 = 0.43448, and 1 less that.
    assert interval(correct, 5) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize(("correct", "examples"), [(3, 10), (1_500, 1_935), (8_000, 8_421), (1, 56_355)])
def test_interval_is_that_of_the_binomial_distribution(correct, examples):
    expected = binom.ppf((0.025, 0.975), examples, correct / examples) / examples
    assert interval(correct, examples) == pytest.approx(tuple(expected), abs=1e-12)


def test_interval_agrees_with_the_drawn_bootstrap():
    sample = np.repeat([1, 0], [300, 200])
    drawn = bootstrap((sample,), np.mean, method="percentile", rng=0).confidence_interval
    assert interval(300, 500) == pytest.approx((drawn.low, drawn.high), abs=0.004)


def test_gold_answers_of_dev_are_all_right_within_seconds(shared_data, tmp_path):
    folder, path = shared_data / "wikisql", tmp_path / "predictions.dev.jsonl"
    write_predictions(
        path,
        [
            Prediction(
                index=example.index,
                question=example.question,
                text=format_query(example.query, example.table.header),
                query=example.query,
            )
            for example in read_split(folder, "dev")
        ],
    )
    started = time.perf_counter()
    score = score_predictions(path, folder, "dev")
    assert time.perf_counter() - started < 20
    assert (score.examples, score.executable, score.unparseable) == (8_421, 1_935, 0)
    assert (score.exact_match, score.logical_form_accuracy, score.execution_accuracy) == (1.0, 1.0, 1.0)
