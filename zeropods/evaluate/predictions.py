"""Prediction files of every task: one JSON object a line, each naming its example."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.files import write_text
from zeropods.sql.query import Query

# What prediction files of every task have in common: one JSON object a line, each naming its example.


def prediction_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place (`FILE:LINE`) and object of each line; `UserError` at the first that is none, and for an empty file."""
    empty = True
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            empty = False
            place = f"{path}:{number}"
            yield place, _document(place, line)
    if empty:
        raise UserError(f"{path}: the file is empty; expected one prediction a line")


def refuse_missing(place: str, document: dict[str, Any], keys: tuple[str, ...]) -> None:
    """`UserError` for keys that a line lacks."""
    missing = [key for key in keys if key not in document]
    if missing:
        raise UserError(f"{place}: {', '.join(missing)} missing; expected {', '.join(keys)} on every line")


def index_of(place: str, document: dict[str, Any]) -> int:
    """The example's index; `UserError` where it is none."""
    index = document["index"]
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UserError(f"{place}: index {shown(index)}; expected the example's line number, from 0")
    return index


def text_of(place: str, document: dict[str, Any], key: str) -> str:
    """A text of a line; `UserError` where it is none."""
    value = document[key]
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} {shown(value)}; expected text")
    return value


def refuse_twice(place: str, index: int, seen: set[int]) -> None:
    """Note an example's index; `UserError` where it was there before."""
    if index in seen:
        raise UserError(f"{place}: index {index} stands there twice; keep one of them")
    seen.add(index)


def shown(value: object) -> str:
    """A value as a message shows it."""
    return repr(value)[:80]


def _document(place: str, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        start = line[:60].decode("utf-8", "replace").strip()
        raise UserError(f"{place}: {start!r} is broken JSON ({error}); predict again") from None
    if not isinstance(document, dict):
        raise UserError(f"{place}: {shown(document)}; expected a JSON object")
    return document


# Prediction files: one JSON object a line, ours or the official evaluator's.
#
# Ours names its example, so that a file may hold any part of a split:
# `{"index", "question", "prediction", "query": {"sel", "agg", "conds"} | null}`.
# The official one has a line for each example in the split's order: `{"query": {...}}` or `{"error": "..."}`.

_KEYS = ("index", "question", "prediction", "query")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model answered to one example."""

    index: int
    """The example's `index`: its line in the split's file, from 0."""
    question: str | None
    """None in the official form, as `text`."""
    text: str | None
    query: Query | None
    """None where the answer could not be read as a query."""

    def to_json(self) -> dict[str, Any]:
        """The prediction in our form."""
        query = None if self.query is None else self.query.to_json()
        return {"index": self.index, "question": self.question, "prediction": self.text, "query": query}


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a file in our form; it appears when it is complete."""
    write_text(path, "".join(json.dumps(prediction.to_json()) + "\n" for prediction in predictions))


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions in file order, in the form that the first line has; `UserError` at the first fault.

    Columns are not checked against a table, which the file does not name.
    """
    predictions: list[Prediction] = []
    seen: set[int] = set()
    ours = False
    for number, (place, document) in enumerate(prediction_lines(path), 1):
        ours = "index" in document if number == 1 else ours
        prediction = _ours(place, document) if ours else _official(place, document, number - 1)
        refuse_twice(place, prediction.index, seen)
        predictions.append(prediction)
    return predictions


def _ours(place: str, document: dict[str, Any]) -> Prediction:
    refuse_missing(place, document, _KEYS)
    index = index_of(place, document)
    question = text_of(place, document, "question")
    text = text_of(place, document, "prediction")
    return Prediction(index=index, question=question, text=text, query=_query(place, document["query"]))


def _official(place: str, document: dict[str, Any], index: int) -> Prediction:
    if "index" in document or not {"query", "error"} & document.keys():
        raise UserError(f"{place}: {shown(document)}; expected 'query' or 'error', as in the official form")
    query = None if document.get("error") else _query(place, document.get("query"))
    return Prediction(index=index, question=None, text=None, query=query)


def _query(place: str, document: object) -> Query | None:
    if document is None:
        return None
    try:
        return Query.from_json(document, columns=sys.maxsize)
    except ValueError as error:
        raise UserError(f"{place}: {error}; correct it, or put null") from None


# Answers of a model to SQuAD's questions: `{"index", "id", "question", "prediction"}`, one a line.

KEYS = ("index", "id", "question", "prediction")


@dataclass(frozen=True, kw_only=True)
class SquadAnswer:
    """What a model answered to one question."""

    index: int
    """The question's place in its split, from 0."""
    id: str
    """The question's own, as the data set has it."""
    question: str
    text: str

    def to_json(self) -> dict[str, int | str]:
        """The line of a prediction file."""
        return {"index": self.index, "id": self.id, "question": self.question, "prediction": self.text}


def write_answers(path: Path, answers: Iterable[SquadAnswer]) -> None:
    """Write a prediction file; it appears when it is complete."""
    write_text(path, "".join(json.dumps(answer.to_json()) + "\n" for answer in answers))


def read_answers(path: Path) -> list[SquadAnswer]:
    """The answers in file order; `UserError` at the first fault."""
    answers: list[SquadAnswer] = []
    seen: set[int] = set()
    for place, document in prediction_lines(path):
        refuse_missing(place, document, KEYS)
        index = index_of(place, document)
        refuse_twice(place, index, seen)
        id_, question, text = (text_of(place, document, key) for key in KEYS[1:])
        answers.append(SquadAnswer(index=index, id=id_, question=question, text=text))
    return answers


def holds_answers(path: Path) -> bool:
    """Whether a prediction file answers SQuAD's questions: its first line names one by its id.

    Of a line that cannot be read it is not known; whoever reads the file says what is wrong with it.
    """
    with open(path, "rb") as file:
        line = file.readline()
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "id" in first and "query" not in first
