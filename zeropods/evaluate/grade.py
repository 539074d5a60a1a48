"""Each prediction against its example, by the rules of WikiSQL's official evaluator.

`evaluate.py` and `lib/query.py` of github.com/salesforce/WikiSQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import groupby

from zeropods.data.wikisql import Example
from zeropods.evaluate.predictions import Prediction
from zeropods.sql.execute import Execution, is_usable
from zeropods.sql.query import Query
from zeropods.sql.text import format_query

Pair = tuple[Prediction, Example]


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What is right about one prediction."""

    table_id: str
    predicted_text: str
    """The model's own text; in the official form, which has none, the query's text or nothing."""
    gold_text: str
    parsed: bool
    logical_form: bool
    execution: bool | None
    """None where the gold query finds nothing on the rows at hand."""
    rouge: dict[str, float] | None = None
    """F1 by name; None where it was not asked for."""


def grades(pairs: Iterable[Pair]) -> Iterator[Grade]:
    """Grade predictions table by table, so that each table is loaded once."""
    ordered = sorted(pairs, key=lambda pair: pair[1].table.id)
    for _, group in groupby(ordered, key=lambda pair: pair[1].table.id):
        yield from _grades_on_one_table(list(group))


def same_logical_form(predicted: Query | None, gold: Query) -> bool:
    """Whether column, aggregate and the set of conditions agree; values as text in lower case."""
    return predicted is not None and _logical_form(predicted) == _logical_form(gold)


def _logical_form(query: Query) -> tuple[int, int, frozenset[tuple[int, int, str]]]:
    conditions = frozenset((column, operator, value.lower()) for column, operator, value in query.conds)
    return query.sel, query.agg, conditions


def _grades_on_one_table(pairs: list[Pair]) -> Iterator[Grade]:
    table = pairs[0][1].table
    with closing(Execution(table)) if table.rows else nullcontext() as execution:
        for prediction, example in pairs:
            yield Grade(
                table_id=example.table.id,
                predicted_text=_predicted_text(prediction, example),
                gold_text=format_query(example.query, example.table.header),
                parsed=prediction.query is not None,
                logical_form=same_logical_form(prediction.query, example.query),
                execution=_same_result(prediction.query, example, execution),
            )


def _predicted_text(prediction: Prediction, example: Example) -> str:
    if prediction.text is not None:
        return prediction.text
    try:
        return format_query(prediction.query, example.table.header) if prediction.query else ""
    except IndexError:
        return ""


def _same_result(predicted: Query | None, example: Example, execution: Execution | None) -> bool | None:
    if execution is None:
        return None
    gold = execution.execute(example.query)
    if not is_usable(example.query, gold):
        return None
    return predicted is not None and execution.execute(predicted) == gold
