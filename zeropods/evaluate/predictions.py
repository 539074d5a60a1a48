"""Prediction files: one JSON object a line, ours or the official evaluator's.

Ours names its example, so that a file may hold any part of a split:
`{"index", "question", "prediction", "query": {"sel", "agg", "conds"} | null}`.
The official one has a line for each example in the split's order: `{"query": {...}}` or `{"error": "..."}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.atomic import write_text
from zeropods.errors import UserError
from zeropods.sql.query import Query

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
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            document = _document(place, line)
            ours = "index" in document if number == 1 else ours
            prediction = _ours(place, document) if ours else _official(place, document, number - 1)
            if prediction.index in seen:
                raise UserError(f"{place}: index {prediction.index} stands there twice; keep one of them")
            seen.add(prediction.index)
            predictions.append(prediction)
    if not predictions:
        raise UserError(f"{path}: the file is empty; expected one prediction a line")
    return predictions


def _document(place: str, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        raise UserError(f"{place}: {shown!r} is broken JSON ({error}); predict again") from None
    if not isinstance(document, dict):
        raise UserError(f"{place}: {_shown(document)}; expected a JSON object")
    return document


def _ours(place: str, document: dict[str, Any]) -> Prediction:
    missing = [key for key in _KEYS if key not in document]
    if missing:
        raise UserError(f"{place}: {', '.join(missing)} missing; expected {', '.join(_KEYS)} on every line")
    index = document["index"]
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UserError(f"{place}: index {_shown(index)}; expected the example's line number, from 0")
    question = _text(place, document, "question")
    text = _text(place, document, "prediction")
    return Prediction(index=index, question=question, text=text, query=_query(place, document["query"]))


def _official(place: str, document: dict[str, Any], index: int) -> Prediction:
    if "index" in document or not {"query", "error"} & document.keys():
        raise UserError(f"{place}: {_shown(document)}; expected 'query' or 'error', as in the official form")
    query = None if document.get("error") else _query(place, document.get("query"))
    return Prediction(index=index, question=None, text=None, query=query)


def _text(place: str, document: dict[str, Any], key: str) -> str:
    value = document[key]
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} {_shown(value)}; expected text")
    return value


def _query(place: str, document: object) -> Query | None:
    if document is None:
        return None
    try:
        return Query.from_json(document, columns=sys.maxsize)
    except ValueError as error:
        raise UserError(f"{place}: {error}; correct it, or put null") from None


def _shown(value: object) -> str:
    return repr(value)[:80]
