"""Prediction files: ours and the official form, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropods.errors import UserError
from zeropods.evaluate.score import Prediction, read_predictions, write_predictions
from zeropods.sql.query import Condition, Query

QUERY = Query(1, 3, (Condition(0, 0, "Ann"),))
READ = Prediction(index=7, question="How many?", text="SELECT COUNT Goals FROM table", query=QUERY)
GOOD = READ.to_json()
ANSWER = {"index": 0, "id": "q0", "question": "Who ran?", "prediction": 'a "quoted"\nlíne'}


def written(folder: Path, *documents: object) -> Path:
    path = folder / "predictions.dev.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_a_line_has_the_four_keys(tmp_path: Path) -> None:
    path = tmp_path / "predictions.dev.jsonl"
    write_predictions(path, [READ])
    assert json.loads(path.read_text()) == {
        "index": 7,
        "question": "How many?",
        "prediction": "SELECT COUNT Goals FROM table",
        "query": {"sel": 1, "agg": 3, "conds": [[0, 0, "Ann"]]},
    }


def test_answers_to_squad_are_read_and_written_with_their_ids(tmp_path: Path) -> None:
    (answer,) = read_predictions(written(tmp_path, ANSWER))
    assert (answer.id, answer.text, answer.query) == ("q0", ANSWER["prediction"], None)
    assert answer.to_json() == ANSWER


CONDITIONS = st.lists(st.builds(Condition, st.integers(0, 9), st.integers(0, 3), st.text()), max_size=3)
QUERIES = st.builds(Query, st.integers(0, 9), st.integers(0, 5), CONDITIONS.map(tuple))
PREDICTIONS = st.builds(
    Prediction, index=st.integers(0), question=st.text(), text=st.text(), query=st.none() | QUERIES, id=st.none()
)


@given(st.lists(PREDICTIONS, min_size=1, unique_by=lambda prediction: prediction.index))
def test_any_predictions_survive_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, predictions: list[Prediction]
) -> None:
    path = tmp_path_factory.mktemp("predictions") / "p.jsonl"
    write_predictions(path, predictions)
    assert read_predictions(path) == predictions


def test_the_official_form_is_read_in_the_order_of_the_split(tmp_path: Path) -> None:
    number = {"sel": 0, "agg": 0, "conds": [[1, 1, 3]]}
    path = written(
        tmp_path, {"query": QUERY.to_json()}, {"error": "?", "query": number}, {"query": None}, {"query": number}
    )
    found = read_predictions(path)
    assert [(p.index, p.question, p.text) for p in found] == [(index, None, None) for index in range(4)]
    assert [p.query for p in found] == [QUERY, None, None, Query(0, 0, (Condition(1, 1, "3"),))]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, GOOD | {"index": -1}], "2: index is -1"),
        ([GOOD | {"query": []}], r"1: query is \[\]"),
        ([GOOD | {"query": {"sel": 0, "agg": 6, "conds": []}}], "1: query.agg is 6"),
        ([{key: value for key, value in GOOD.items() if key != "question"}], "1: question: Field required"),
        ([ANSWER | {"id": 5}], "1: id is 5"),
        ([ANSWER, GOOD | {"index": 1}], "2: id: Field required"),
        ([GOOD, GOOD], "2: index 7 occurs twice"),
        ([{"query": None}, GOOD], "2: index is 7"),
        ([GOOD, {"query": None}], "2: index: Field required"),
        ([{"answer": 42}], "1: answer is 42"),
    ],
)  # fmt: skip
def test_the_first_fault_is_named_with_its_line(tmp_path: Path, lines: list[object], said: str) -> None:
    with pytest.raises(UserError, match=f"jsonl:{said}"):
        read_predictions(written(tmp_path, *lines))
