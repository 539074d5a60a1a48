"""Accuracy of WikiSQL queries for `evaluate.load`, from this folder and without a network.

The rules are those of WikiSQL's official evaluator (`evaluate.py` and `lib/query.py` of
github.com/salesforce/WikiSQL).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from statistics import fmean
from typing import Any

import datasets
import evaluate
from pydantic import TypeAdapter, ValidationError

from zeropods.sql.query import Execution, Query, format_query, is_usable, parse_query
from zeropods.sql.table import SQLTable

Values = list[bool | None]
"""One value per prediction; None where it could not be measured."""
QUERY = TypeAdapter(Query)


class QueryAccuracy(evaluate.Metric):
    """`compute(predictions=[text], references=[{"query": text, "header": [names]}])`.

    A query is its readable text or its JSON, `{"sel", "agg", "conds"}`, as text. The result holds
    the shares `exact_match` (of the text) and `logical_form_accuracy` (of the parts) and the count
    `unparseable`.

    Further arguments; `tables` and `queries` have one entry per prediction:
        tables: `zeropods.data.wikisql.SQLTable`s; then the result also has `execution_accuracy`,
            over the `executable` references, which are those that find something on the rows at
            hand.
        queries: the query that each prediction means, where it is known; otherwise it is read from
            the text.
        average: False for lists with one value per prediction, `execution_accuracy` None where it
            is not executable.
    """

    def _info(self) -> evaluate.MetricInfo:
        name = datasets.Value("string")
        reference = {"query": name, "header": datasets.Sequence(name)}
        return evaluate.MetricInfo(
            description=(
                "Exact match, logical-form and execution accuracy by WikiSQL's official rules."
            ),
            citation="Zhong, Xiong, Socher, 2017: Seq2SQL",
            inputs_description=(
                "predictions: queries; references: queries with their table's header"
            ),
            features=datasets.Features({"predictions": name, "references": reference}),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[dict[str, Any]],
        tables: Sequence[SQLTable] | None = None,
        queries: Sequence[Query | None] | None = None,
        average: bool = True,
    ) -> dict[str, Values] | dict[str, float | None]:
        headers = [reference["header"] for reference in references]
        if queries is None:
            pairs = zip(predictions, headers, strict=True)
            queries = [_read(text, header) for text, header in pairs]
        gold = [_gold(reference) for reference in references]
        lists = _compared(predictions, queries, gold, headers)
        if tables is not None:
            lists["execution_accuracy"] = _executed(queries, gold, tables)
        return _averages(lists) if average else lists


def _gold(reference: dict[str, Any]) -> Query:
    """The query of a reference; `ValueError` if it is no query on the reference's columns."""
    query = _read(reference["query"], reference["header"])
    if query is None:
        fault = f"is not a query on columns {reference['header']}"
        raise ValueError(f"reference {reference['query']!r} {fault}")
    return query


def _compared(
    predictions: Sequence[str],
    queries: Sequence[Query | None],
    gold: Sequence[Query],
    headers: Sequence[Sequence[str]],
) -> dict[str, Values]:
    """Each prediction compared with its reference, by text and by logical form."""
    exact_match: Values = []
    logical_form_accuracy: Values = []
    unparseable: Values = []
    for text, query, right, header in zip(predictions, queries, gold, headers, strict=True):
        readable = text
        if query is not None and text.startswith("{"):
            # A prediction in JSON is first formatted as readable text.
            readable = format_query(query, header)
        exact_match.append(readable == format_query(right, header))
        has_right_form = query is not None and _logical_form(query) == _logical_form(right)
        logical_form_accuracy.append(has_right_form)
        unparseable.append(query is None)
    return {
        "exact_match": exact_match,
        "logical_form_accuracy": logical_form_accuracy,
        "unparseable": unparseable,
    }


def _averages(lists: dict[str, Values]) -> dict[str, float | None]:
    """Shares of the measured values, and the numbers of what is unparseable and executable."""
    averages: dict[str, float | None] = {}
    for name, values in lists.items():
        measured = _measured(values)
        averages[name] = fmean(measured) if measured else None
    averages["unparseable"] = sum(_measured(lists["unparseable"]))
    if "execution_accuracy" in lists:
        averages["executable"] = len(_measured(lists["execution_accuracy"]))
    return averages


def _measured(values: Values) -> list[bool]:
    return [value for value in values if value is not None]


def _logical_form(query: Query) -> tuple[int, int, frozenset[tuple[int, int, str]]]:
    """Column, aggregate and the set of conditions; values as text in lower case."""
    conditions = set()
    for column, operator, value in query.conds:
        conditions.add((column, operator, value.lower()))
    return query.sel, query.agg, frozenset(conditions)


def _executed(
    queries: Sequence[Query | None], gold: Sequence[Query], tables: Sequence[SQLTable]
) -> Values:
    """Whether both queries find the same result; None where the gold query finds nothing.

    Queries on the same table are executed together, so that each table is loaded once.
    """
    numbers_by_table: dict[str, list[int]] = {}
    for number, table in enumerate(tables):
        if table.rows:
            numbers_by_table.setdefault(table.id, []).append(number)
    results: Values = [None] * len(gold)
    for numbers in numbers_by_table.values():
        table = tables[numbers[0]]
        with closing(Execution(table)) as execution:
            for number in numbers:
                expected = execution.execute(gold[number])
                if not is_usable(gold[number], expected):
                    continue
                query = queries[number]
                results[number] = query is not None and execution.execute(query) == expected
    return results


def _read(text: str, header: Sequence[str]) -> Query | None:
    """The query of a text in either form; None if it is no query on these columns."""
    if not text.startswith("{"):
        return parse_query(text, header)
    try:
        query = QUERY.validate_json(text)
    except ValidationError:
        return None
    return query if query.fits(len(header)) else None
