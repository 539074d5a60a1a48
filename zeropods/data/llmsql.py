"""LLMSQL, a revision of WikiSQL whose gold queries are statements of SQL: a reader of its layout.

The questions of a split lie in a file of JSON lines each, or all of them in `questions.jsonl`; the
tables that they are about lie in `tables.jsonl` and, as a database, in `sqlite_tables.db`. Names
and keys are those that the package llmsql 0.1.16 reads; further keys are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import Field

from zeropods.errors import UserError
from zeropods.files import no_file, validated_lines
from zeropods.sql.query import Query
from zeropods.sql.statement import query_of_statement
from zeropods.sql.table import Cell, SQLTable, Text, check_width

QUESTION_FILES = {
    "train": ("train_questions.jsonl",),
    "dev": ("val_questions.jsonl",),
    "test": ("test_questions.jsonl", "questions.jsonl"),
}
"""Names of the file that has the questions of a split; the first that exists counts."""
TABLES_FILE = "tables.jsonl"
DATABASE_FILE = "sqlite_tables.db"
FETCH = "fetch it together with the questions"
"""What to do where a file beside the questions is missing."""


@dataclass(frozen=True)
class _QuestionLine:
    question_id: Annotated[int, Field(strict=True)]
    table_id: Text
    question: Text
    sql: Text


@dataclass(frozen=True)
class _TableLine:
    table_id: Text
    header: Annotated[tuple[str, ...], MinLen(1)]
    types: tuple[Literal["text", "real"], ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class SQLQuestion:
    """A question about a table, and the statement that answers it."""

    index: int
    """Line number in the file of its split, from 0."""
    question_id: int
    question: str
    table: SQLTable
    sql: str
    query: Query | None
    """The statement as a query; None where it is not of WikiSQL's form."""


def question_file(folder: Path, split: str) -> Path | None:
    """The file with the questions of a split; None where the folder does not have them in this
    layout."""
    for name in QUESTION_FILES[split]:
        path = Path(folder) / name
        if path.is_file():
            return path
    return None


def tables_file(questions: Path) -> Path:
    """The file with the tables of these questions, which must exist."""
    path = questions.with_name(TABLES_FILE)
    if not path.is_file():
        raise UserError(
            f"{path}: {no_file(path)}; the questions of {questions.name} are about its tables: "
            f"{FETCH}"
        )
    return path


def read_questions(questions: Path) -> Iterator[SQLQuestion]:
    """Yield the questions of a file in its order; `UserError` at the first fault, with its line.

    The tables are all read before the first question.
    """
    tables = _tables_by_id(tables_file(questions))
    ids: set[int] = set()
    for index, (place, line) in enumerate(validated_lines(_QuestionLine, questions)):
        if line.question_id in ids:
            raise UserError(
                f"{place}: question_id {line.question_id} occurs twice; keep one of them"
            )
        ids.add(line.question_id)
        table = tables.get(line.table_id)
        if table is None:
            raise UserError(
                f"{place}: table_id {line.table_id!r} is missing from {TABLES_FILE} beside it"
            )
        query = query_of_statement(line.sql, table)
        yield SQLQuestion(
            index=index,
            question_id=line.question_id,
            question=line.question,
            table=table,
            sql=line.sql,
            query=query,
        )


def _tables_by_id(path: Path) -> dict[str, SQLTable]:
    """The tables of a file by their ids; `UserError` at the first fault, with its line."""
    tables: dict[str, SQLTable] = {}
    for place, line in validated_lines(_TableLine, path):
        if line.table_id in tables:
            raise UserError(f"{place}: table_id {line.table_id!r} occurs twice; keep one of them")
        table = SQLTable(line.table_id, line.header, line.types, line.rows)
        check_width(place, table)
        tables[line.table_id] = table
    return tables
