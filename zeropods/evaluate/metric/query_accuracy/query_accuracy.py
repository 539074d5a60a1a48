"""Accuracy of WikiSQL queries for `evaluate.load`, from this folder and without a network.

The rules are those of WikiSQL's official evaluator (`evaluate.py` and `lib/query.py` of github.com/salesforce/WikiSQL).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from statistics import fmean
from typing import Any

import datasets
import evaluate
from pydantic import TypeAdapter, ValidationError

from zeropods.sql.query import Execution, Query, format_query, is_usable, parse_query
from zeropods.sql.table import SQLTable

Values = list[bool | None]
QUERY = TypeAdapter(Query)


class QueryAccuracy(evaluate.Metric):
    """`compute(predictions=[text], references=[{"query": text, "header": [names]}])`.

    A query is its readable text or its JSON, `{"sel", "agg", "conds"}`, as text. The result holds the shares
    `exact_match` (of the text) and `logical_form_accuracy` (of the parts) and the count `unparseable`.

    Further arguments; `tables` and `queries` have one entry per prediction:
        tables: `zeropods.data.wikisql.SQLTable`s; then the result also has `execution_accuracy`, over the `executable`
            references, which are those that find something on the rows at hand.
        queries: the query that each prediction means, where it is known; otherwise it is read from the text.
        average: False for lists with one value per prediction, `execution_accuracy` None where it is not executable.
    """

    def _info(self) -> evaluate.MetricInfo:
        name = datasets.Value("string")
        reference = {"query": name, "header": datasets.Sequence(name)}
        return evaluate.MetricInfo(
            description="Exact match, logical-form and execution accuracy by WikiSQL's official rules.",
            citation="Zhong, Xiong, Socher, 2017: Seq2SQL",
            inputs_description="predictions: queries; references: queries with their table's header",
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
            queries = [_read(text, header) for text, header in zip(predictions, headers, strict=True)]
        gold: list[Query] = []
        for reference in references:
            query = _read(reference["query"], reference["header"])
            if query is None:
                raise ValueError(f"reference {reference['query']!r} is not a query on columns {reference['header']}")
            gold.append(query)
        lists: dict[str, Values] = {"exact_match": [], "logical_form_accuracy": [], "unparseable": []}
        for text, query, right, header in zip(predictions, queries, gold, headers, strict=True):
            # A prediction in JSON is first formatted as readable text.
            words = format_query(query, header) if query is not None and text.startswith("{") else text
            lists["exact_match"].append(words == format_query(right, header))
            is_right = query is not None and _logical_form(query) == _logical_form(right)
            lists["logical_form_accuracy"].append(is_right)
            lists["unparseable"].append(query is None)
        if tables is not None:
            lists["execution_accuracy"] = _executed(queries, gold, tables)
        if not average:
            return lists
        found = {name: [value for value in values if value is not None] for name, values in lists.items()}
        shares = {name: fmean(values) if values else None for name, values in found.items()}
        executable = {} if tables is None else {"executable": len(found["execution_accuracy"])}
        return {**shares, "unparseable": sum(found["unparseable"]), **executable}


def _logical_form(query: Query) -> tuple[int, int, frozenset[tuple[int, int, str]]]:
    """Column, aggregate and the set of conditions; values as text in lower case."""
    conditions = frozenset((column, operator, value.lower()) for column, operator, value in query.conds)
    return query.sel, query.agg, conditions


def _executed(queries: Sequence[Query | None], gold: Sequence[Query], tables: Sequence[SQLTable]) -> Values:
    """Whether both queries find the same result; None where the gold query finds nothing. Each table is loaded once."""
    results: Values = [None] * len(gold)
    order = sorted((i for i, table in enumerate(tables) if table.rows), key=lambda i: tables[i].id)
    for _, places in groupby(order, key=lambda i: tables[i].id):
        numbers = list(places)
        with closing(Execution(tables[numbers[0]])) as execution:
            for i in numbers:
                right, predicted = execution.execute(gold[i]), queries[i]
                if is_usable(gold[i], right):
                    results[i] = predicted is not None and execution.execute(predicted) == right
    return results


def _read(text: str, header: Sequence[str]) -> Query | None:
    if not text.startswith("{"):
        return parse_query(text, header)
    try:
        query = QUERY.validate_json(text)
    except ValidationError:
        return None
    return query if query.fits(len(header)) else None
