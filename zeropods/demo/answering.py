"""One question to one model about one table: its query, what the query finds, and whether that is right."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from zeropods.data.prompts import source_text
from zeropods.data.wikisql import Cell, Example, Table
from zeropods.demo.bounded import BoundedExecution
from zeropods.demo.models import TrainedModel
from zeropods.errors import UserError
from zeropods.sql.execute import Rows, is_usable
from zeropods.sql.query import AGGREGATES, Query

if TYPE_CHECKING:
    from zeropods.evaluate.generate import Answerer

MAX_CHARACTERS = 1_000
"""Of a question; WikiSQL's longest has 300."""
LOADED = 2
"""Models in memory: as many as stand side by side."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a query gives on its table."""

    query: Query
    cells: list[Cell] | None
    """The selected cells as they are written, or the aggregate; None where SQLite could not run the query."""
    executed: list[Cell] | None
    """The same as SQLite holds them, in lower case: what is right is decided by these."""
    rows: Rows | None
    """The rows that meet the conditions, whole."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one model says."""

    found: Found
    generated_seconds: float
    expected: Found | None
    """Of the data set's own query, where the question is one of its."""
    right: bool | None
    """Whether both find the same; None where nothing is expected, or the expected query finds nothing."""


def ask(model: TrainedModel, table: Table, question: str, example: Example | None) -> Answer:
    """Let a model answer.

    Args:
        example: the data set's own query for this question, if it has one.

    Raises:
        UserError: a question that is empty or too long, a table whose columns the model cannot write.
    """
    question = checked(question)
    answerer = loaded(model)
    _check_length(answerer, model, table, question)
    began = time.perf_counter()
    query = _generated(answerer, table, question)
    generated = time.perf_counter() - began
    found = run_query(query, table)
    expected = run_query(example.query, table) if example else None
    return Answer(found=found, generated_seconds=generated, expected=expected, right=_is_right(found, expected))


def checked(question: str | None) -> str:
    """The question in one line, without control characters and halves of characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in question or "").split())
    if not any(letter.isalnum() for letter in line):
        raise UserError("there is no question yet; type one, or choose an example")
    if len(line) > MAX_CHARACTERS:
        raise UserError(f"the question has {len(line):,} characters; ask in at most {MAX_CHARACTERS:,}")
    return line


@lru_cache(maxsize=LOADED)
def loaded(model: TrainedModel) -> Answerer:
    """A model in memory, warmed up; the one that was not asked for longest makes room.

    Raises:
        UserError: it has gone, or its weights are damaged.
    """
    from safetensors import SafetensorError

    from zeropods.evaluate.generate import Answerer

    try:
        answerer = Answerer.load(model.folder)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        why = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{model.folder}: the model cannot be read ({why}); export or train it again") from None
    _generated(answerer, Table("warm", ("Name", "Age"), ("text", "real"), ()), "How many names are there?")
    return answerer


def run_query(query: Query, table: Table) -> Found:
    """Execute a query read-only and timed; `UserError` where it takes too long."""
    with closing(BoundedExecution(table)) as execution:
        began = time.perf_counter()
        executed = execution.execute(query)
        rows = execution.matching_rows(query)
        seconds = time.perf_counter() - began
        if execution.overdue:
            raise UserError("the query took too long on this table and was stopped; ask for less, or take fewer rows")
    cells = executed
    if rows is not None and not AGGREGATES[query.agg]:
        cells = [row[query.sel] for row in rows.rows]
    return Found(query=query, cells=cells, executed=executed, rows=rows, seconds=seconds)


def _generated(answerer: Answerer, table: Table, question: str) -> Query:
    from zeropods.evaluate.generate import Generation

    example = Example(0, question, table, Query(0, 0))
    try:
        (prediction,) = answerer.answer([example], Generation())
    except ValueError:  # The grammar's: no column of the table has a name that the tokenizer can write.
        raise UserError("the model cannot write any of this table's column names; give them others") from None
    if prediction.query is None:
        raise UserError("the model wrote no query; ask in other words")
    return prediction.query


def _check_length(answerer: Answerer, model: TrainedModel, table: Table, question: str) -> None:
    source = source_text(answerer.prompt, question, table.header, table.types)
    tokens = len(answerer.tokenizer.backend_tokenizer.encode(source).ids)
    if tokens > model.source_limit:
        raise UserError(
            f"question and column names make {tokens:,} tokens; {model.name} was trained on at most "
            f"{model.source_limit}: ask in fewer words, or take a table of fewer columns"
        )


def _is_right(found: Found, expected: Found | None) -> bool | None:
    if expected is None or not is_usable(expected.query, expected.executed):
        return None
    return found.executed == expected.executed
