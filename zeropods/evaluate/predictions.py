"""Prediction files: one JSON object per line, each naming its example.

Text-to-SQL: `{"index", "question", "prediction", "query": {"sel", "agg", "conds"} | null}`, so that a file may hold any
part of a split; or the official evaluator's form, a line per example in the split's order: `{"query": {...}}` or
`{"error": "..."}`. SQuAD: `{"index", "id", "question", "prediction"}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.files import write_text
from zeropods.sql.query import Query

QUERY_KEYS = ("index", "question", "prediction", "query")
ANSWER_KEYS = ("index", "question", "prediction", "id")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model answered to one question."""

    index: int
    """The example's place in its split, from 0."""
    question: str | None = None
    """None in the official form, as `text`."""
    text: str | None = None
    query: Query | None = None
    """None where the answer could not be read as a query, and for SQuAD."""
    id: str | None = None
    """The question's id in SQuAD; None for text-to-SQL."""

    def to_json(self) -> dict[str, Any]:
        """The line of a prediction file, in our form."""
        if self.id is not None:
            return {"index": self.index, "id": self.id, "question": self.question, "prediction": self.text}
        query = None if self.query is None else self.query.to_json()
        return {"index": self.index, "question": self.question, "prediction": self.text, "query": query}


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a prediction file; it appears when it is complete."""
    write_text(Path(path), "".join(json.dumps(prediction.to_json()) + "\n" for prediction in predictions))


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions in file order, in the form that the first line has.

    Columns of a query are not checked against a table, which the file does not name.

    Raises:
        UserError: the first fault, with its line; an empty file.
    """
    predictions: dict[int, Prediction] = {}
    keys: tuple[str, ...] = ()
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            place = f"{path}:{number + 1}"
            document = _document(place, line)
            if number == 0 and "index" in document:
                keys = ANSWER_KEYS if "id" in document and "query" not in document else QUERY_KEYS
            prediction = _prediction(place, document, keys) if keys else _official(place, document, number)
            if prediction.index in predictions:
                raise UserError(f"{place}: index {prediction.index} is there twice; keep one of them")
            predictions[prediction.index] = prediction
    if not predictions:
        raise UserError(f"{path}: the file is empty; expected one prediction per line")
    return list(predictions.values())


def _document(place: str, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        start = line[:60].decode("utf-8", "replace").strip()
        raise UserError(f"{place}: {start!r} is broken JSON ({error}); predict again") from None
    if not isinstance(document, dict):
        raise UserError(f"{place}: {document!r:.80}; expected a JSON object")
    return document


def _prediction(place: str, document: dict[str, Any], keys: tuple[str, ...]) -> Prediction:
    if missing := [key for key in keys if key not in document]:
        raise UserError(f"{place}: {', '.join(missing)} missing; expected {', '.join(keys)} on every line")
    index = document["index"]
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UserError(f"{place}: index {index!r:.80}; expected the example's line number, from 0")
    for key in keys[1:]:
        if key != "query" and not isinstance(document[key], str):
            raise UserError(f"{place}: {key} {document[key]!r:.80}; expected text")
    return Prediction(
        index=index,
        question=document["question"],
        text=document["prediction"],
        query=_query(place, document.get("query")),
        id=document["id"] if "id" in keys else None,
    )


def _official(place: str, document: dict[str, Any], index: int) -> Prediction:
    if "index" in document or not {"query", "error"} & document.keys():
        raise UserError(f"{place}: {document!r:.80}; expected 'query' or 'error', as in the official form")
    return Prediction(index=index, query=None if document.get("error") else _query(place, document.get("query")))


def _query(place: str, document: object) -> Query | None:
    if document is None:
        return None
    try:
        return Query.from_json(document, columns=sys.maxsize)
    except ValueError as error:
        raise UserError(f"{place}: {error}; correct it, or put null") from None
