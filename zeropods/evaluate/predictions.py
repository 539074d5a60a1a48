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
from zeropods.files import json_lines, write_text
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
        query = None if self.query is None else self.query.to_json()
        of_task = {"query": query} if self.id is None else {"id": self.id}
        return {"index": self.index, "question": self.question, "prediction": self.text, **of_task}


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
    for number, line in json_lines(path, "predict again"):
        place = f"{path}:{number}"
        if number == 1 and "index" in line:
            keys = ANSWER_KEYS if "id" in line and "query" not in line else QUERY_KEYS
        prediction = _prediction(place, line, keys) if keys else _official(place, line, number - 1)
        if prediction.index in predictions:
            raise UserError(f"{place}: index {prediction.index} is there twice; keep one of them")
        predictions[prediction.index] = prediction
    return list(predictions.values())


def _prediction(place: str, line: dict[str, Any], keys: tuple[str, ...]) -> Prediction:
    if missing := [key for key in keys if key not in line]:
        raise UserError(f"{place}: {', '.join(missing)} missing; expected {', '.join(keys)} on every line")
    index = line["index"]
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UserError(f"{place}: index {index!r:.80}; expected the example's line number, from 0")
    texts = {key: line[key] for key in ("question", "prediction", "id") if key in keys}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise UserError(f"{place}: {key} {value!r:.80}; expected text")
    query = _query(place, line.get("query"))
    return Prediction(index=index, text=texts.pop("prediction"), query=query, **texts)


def _official(place: str, line: dict[str, Any], index: int) -> Prediction:
    if "index" in line or not {"query", "error"} & line.keys():
        raise UserError(f"{place}: {line!r:.80}; expected 'query' or 'error', as in the official form")
    return Prediction(index=index, query=None if line.get("error") else _query(place, line.get("query")))


def _query(place: str, document: object) -> Query | None:
    try:
        return None if document is None else Query.from_json(document, columns=sys.maxsize)
    except ValueError as error:
        raise UserError(f"{place}: {error}; correct it, or put null") from None
