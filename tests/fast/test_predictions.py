"""Prediction files: ours and the official form, whole and broken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropods.errors import UserError
from zeropods.evaluate.predictions import Prediction, read_predictions, write_predictions
from zeropods.sql.query import Condition, Query

QUERY = Query(1, 3, (Condition(0, 0, "Ann"),))
READ = Prediction(index=7, question="How many?", text="SELECT COUNT Goals FROM table", query=QUERY)
UNREAD = Prediction(index=2, question="Who, Čech?\n\u2028", text="SELECT SELECT \ud800", query=None)
GOOD = READ.to_json()


def _written(tmp_path, *documents):
    path = tmp_path / "predictions.dev.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_written_predictions_are_read_back(tmp_path):
    path = tmp_path / "predictions.dev.jsonl"
    write_predictions(path, [READ, UNREAD])
    assert read_predictions(path) == [READ, UNREAD]


def test_line_has_the_four_keys(tmp_path):
    path = tmp_path / "predictions.dev.jsonl"
    write_predictions(path, [READ])
    assert json.loads(path.read_text()) == {
        "index": 7,
        "question": "How many?",
        "prediction": "SELECT COUNT Goals FROM table",
        "query": {"sel": 1, "agg": 3, "conds": [[0, 0, "Ann"]]},
    }


CONDITIONS = st.lists(st.builds(Condition, st.integers(0, 9), st.integers(0, 3), st.text()), max_size=3)
QUERIES = st.builds(Query, st.integers(0, 9), st.integers(0, 5), CONDITIONS.map(tuple))
PREDICTIONS = st.builds(Prediction, index=st.integers(0), question=st.text(), text=st.text(), query=st.none() | QUERIES)


@given(st.lists(PREDICTIONS, min_size=1, unique_by=lambda prediction: prediction.index))
def test_any_predictions_survive_the_round_trip(tmp_path_factory, predictions):
    path = tmp_path_factory.mktemp("predictions") / "p.jsonl"
    write_predictions(path, predictions)
    assert read_predictions(path) == predictions


def test_failed_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "predictions.dev.jsonl"
    write_predictions(path, [READ])

    def broken():
        yield UNREAD
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(path, broken())
    assert read_predictions(path) == [READ]
    assert list(tmp_path.iterdir()) == [path]


def test_official_form_is_read_in_the_order_of_the_split(tmp_path):
    path = _written(tmp_path, {"query": QUERY.to_json()}, {"error": "no idea"}, {"query": None})
    assert read_predictions(path) == [
        Prediction(index=0, question=None, text=None, query=QUERY),
        Prediction(index=1, question=None, text=None, query=None),
        Prediction(index=2, question=None, text=None, query=None),
    ]


def test_official_error_outweighs_a_query_beside_it(tmp_path):
    path = _written(tmp_path, {"error": "timeout", "query": QUERY.to_json()})
    assert read_predictions(path)[0].query is None


def test_official_number_as_a_value_is_read_as_text(tmp_path):
    path = _written(tmp_path, {"query": {"sel": 0, "agg": 0, "conds": [[1, 1, 3]]}})
    assert read_predictions(path)[0].query == Query(0, 0, (Condition(1, 1, "3"),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": -1}, "index -1; expected the example's line number"),
        ({"index": "7"}, "index '7'; expected"),
        ({"index": True}, "index True; expected"),
        ({"question": None}, "question None; expected text"),
        ({"prediction": 3}, "prediction 3; expected text"),
        ({"query": []}, r"query \[\]; expected"),
        ({"query": {"sel": 0, "agg": 6, "conds": []}}, "agg 6; expected 0 to 5"),
        ({"query": {"sel": -1, "agg": 0, "conds": []}}, "sel -1; expected"),
        ({"query": {"sel": 0, "agg": 0, "conds": [[0, 0]]}}, r"condition \[0, 0\]; expected"),
        ({"query": {"sel": 0, "agg": 0, "conds": [[0, 0, None]]}}, "condition value None; expected"),
    ],
)
def test_bad_value_is_named_with_its_line(tmp_path, changes, message):
    path = _written(tmp_path, GOOD | {"index": 1}, GOOD | changes)
    with pytest.raises(UserError, match=f"jsonl:2: {message}"):
        read_predictions(path)


@pytest.mark.parametrize("key", ["question", "prediction", "query"])
def test_missing_key_is_named_with_its_line(tmp_path, key):
    path = _written(tmp_path, {name: value for name, value in GOOD.items() if name != key})
    with pytest.raises(UserError, match=f"jsonl:1: {key} missing"):
        read_predictions(path)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"\xff{}", b"[" * 100_000, b'{"index": ' + b"9" * 5_000 + b"}", b'{"index": 1} {}']
)
def test_broken_json_is_named_with_its_line(tmp_path, line):
    path = _written(tmp_path, GOOD)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=r"jsonl:2: .* is broken JSON"):
        read_predictions(path)


@pytest.mark.parametrize("document", [[], 3, "text", None])
def test_line_that_is_no_object_is_rejected(tmp_path, document):
    with pytest.raises(UserError, match=r"jsonl:1: .*; expected a JSON object"):
        read_predictions(_written(tmp_path, document))


def test_duplicate_index_is_rejected(tmp_path):
    with pytest.raises(UserError, match="jsonl:2: index 7 stands there twice"):
        read_predictions(_written(tmp_path, GOOD, GOOD))


def test_forms_are_not_mixed(tmp_path):
    with pytest.raises(UserError, match=r"jsonl:2: .*expected 'query' or 'error'"):
        read_predictions(_written(tmp_path, {"query": None}, GOOD))


def test_official_line_after_ours_is_rejected(tmp_path):
    with pytest.raises(UserError, match="jsonl:2: index, question, prediction missing"):
        read_predictions(_written(tmp_path, GOOD, {"query": None}))


def test_object_of_neither_form_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"jsonl:1: .*expected 'query' or 'error'"):
        read_predictions(_written(tmp_path, {"answer": 42}))


def test_empty_file_is_rejected(tmp_path):
    with pytest.raises(UserError, match="the file is empty"):
        read_predictions(_written(tmp_path))
