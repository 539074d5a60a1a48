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
from zeropods.evaluate.prediction_lines import (
    index_of,
    prediction_lines,
    refuse_missing,
    refuse_twice,
    shown,
    text_of,
)
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
