"""Accuracy of WikiSQL queries for `evaluate.load`, from this folder and without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import datasets
import evaluate

from zeropods.evaluate.score import same_logical_form
from zeropods.sql.query import Query
from zeropods.sql.text import format_query, parse_query


class QueryAccuracy(evaluate.Metric):
    """`compute(predictions=[text], references=[{"query": text, "header": [names]}])`.

    A query is its readable text or its JSON, `{"sel", "agg", "conds"}`, as text. The result holds the shares
    `exact_match` and `logical_form_accuracy`, and the count `unparseable`. Execution accuracy needs the
    tables' rows: `zeropods.evaluate.score` has it.
    """

    def _info(self) -> evaluate.MetricInfo:
        name = datasets.Value("string")
        reference = {"query": name, "header": datasets.Sequence(name)}
        return evaluate.MetricInfo(
            description="Exact match and logical-form accuracy by WikiSQL's official rules.",
            citation="Zhong, Xiong, Socher, 2017: Seq2SQL",
            inputs_description="predictions: queries; references: queries with their table's header",
            features=datasets.Features({"predictions": name, "references": reference}),
        )

    def _compute(self, predictions: list[str], references: list[dict[str, Any]]) -> dict[str, float]:
        headers = [reference["header"] for reference in references]
        predicted = [_read(text, header) for text, header in zip(predictions, headers, strict=True)]
        gold = [_gold(reference) for reference in references]
        texts = [format_query(query, header) for query, header in zip(gold, headers, strict=True)]
        shown = [_shown(*each) for each in zip(predictions, predicted, headers, strict=True)]
        return {
            "exact_match": fmean(map(str.__eq__, shown, texts)),
            "logical_form_accuracy": fmean(map(same_logical_form, predicted, gold)),
            "unparseable": predicted.count(None),
        }


def _read(text: str, header: Sequence[str]) -> Query | None:
    if not text.startswith("{"):
        return parse_query(text, header)
    try:
        return Query.from_json(json.loads(text), len(header))
    except ValueError:
        return None


def _gold(reference: dict[str, Any]) -> Query:
    query = _read(reference["query"], reference["header"])
    if query is None:
        raise ValueError(f"reference {reference['query']!r} is no query on the columns {reference['header']}")
    return query


def _shown(text: str, query: Query | None, header: Sequence[str]) -> str:
    """The text that exact match compares: JSON is put into words first."""
    return format_query(query, header) if query is not None and text.startswith("{") else text
