"""A strict, streaming reader of WikiSQL's official layout: SPLIT.jsonl and SPLIT.tables.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.files import json_lines, text_of
from zeropods.sql.query import Query

SPLITS = ("train", "dev", "test")
TYPES = ("text", "real")

Cell = str | int | float | None


@dataclass(frozen=True)
class SQLTable:
    """A table that questions are asked about."""

    id: str
    header: tuple[str, ...]
    types: tuple[str, ...]
    """`text` or `real`, one for each column."""
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Example:
    """A question about a table, and the query that answers it."""

    index: int
    """Line number in SPLIT.jsonl, from 0."""
    question: str
    table: SQLTable
    query: Query


def read_split(folder: Path, split: str) -> Iterator[Example]:
    """Stream the examples of a split in file order; `UserError` at the first fault, with its line."""
    tables = read_tables(split_file(folder, split, "tables.jsonl"))
    path = split_file(folder, split, "jsonl")
    for number, document in json_lines(path):
        yield _example(f"{path}:{number}", number - 1, document, tables)


def read_tables(path: Path) -> dict[str, SQLTable]:
    """All tables of a file, by id."""
    tables: dict[str, SQLTable] = {}
    for number, document in json_lines(path):
        table = _table(f"{path}:{number}", document)
        if table.id in tables:
            raise UserError(f"{path}:{number}: table id {table.id!r} stands there twice; keep one of them")
        tables[table.id] = table
    return tables


def split_file(folder: Path, split: str, suffix: str) -> Path:
    """The path of a split's file, which must be there."""
    if split not in SPLITS:
        raise UserError(f"split {split!r}; expected {', '.join(SPLITS)}")
    path = Path(folder) / f"{split}.{suffix}"
    if not path.is_file():
        raise UserError(f"{path}: no such file; the official release has it: zeropods data get wikisql --out DIR")
    return path


def _example(place: str, index: int, document: dict[str, Any], tables: dict[str, SQLTable]) -> Example:
    question = text_of(place, document, "question")
    table = tables.get(text_of(place, document, "table_id"))
    if table is None:
        raise UserError(f"{place}: table_id {document['table_id']!r} has no table in the tables file beside it")
    try:
        query = Query.from_json(document.get("sql"), len(table.header))
    except ValueError as error:
        raise UserError(f"{place}: {error} (table {table.id})") from None
    return Example(index, question, table, query)


def _table(place: str, document: dict[str, Any]) -> SQLTable:
    header = _list(place, document, "header")
    types = _list(place, document, "types")
    rows = _list(place, document, "rows")
    if not header or not all(isinstance(name, str) for name in header):
        raise UserError(f"{place}: header {header!r}; expected column names")
    if len(types) != len(header) or not set(types) <= set(TYPES):
        raise UserError(f"{place}: types {types!r}; expected 'text' or 'real' for each of {len(header)} columns")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list) or len(row) != len(header):
            raise UserError(f"{place}: row {number} is {row!r}; expected {len(header)} cells")
    return SQLTable(text_of(place, document, "id"), tuple(header), tuple(types), tuple(map(tuple, rows)))


def _list(place: str, document: dict[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise UserError(f"{place}: {key} is {value!r}; expected a list")
    return value
