"""A query executed on its table by SQLite, by the rules of WikiSQL's official evaluator.

`lib/dbengine.py` of github.com/salesforce/WikiSQL: text is compared in lower case; on a `real` column the
value is a number, or the first number in it. There, two conditions on one column both get the last value;
here each gets its own (no query of train or dev has two).
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import Any, NamedTuple

from zeropods.data.wikisql import Cell, SQLTable
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query

_FIRST_NUMBER = re.compile(r"[-+]?\d*\.\d+|\d+")
_RUNNABLE = {"=", ">", "<"}


class Rows(NamedTuple):
    """Rows of a table as people read them: the header's names and the cells in their own spelling."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Execution:
    """A table in SQLite's memory, for as many queries as wanted; `close` frees it."""

    def __init__(self, table: SQLTable) -> None:
        self._table = table
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        columns = ", ".join(f"{_name(i)} {kind}" for i, kind in enumerate(table.types))
        places = ", ".join("?" * len(table.types))
        self._database.execute(f"CREATE TABLE cells ({columns})")
        self._database.executemany(f"INSERT INTO cells VALUES ({places})", map(self._stored, table.rows))

    def close(self) -> None:
        self._database.close()

    def execute(self, query: Query) -> list[Cell] | None:
        """The selected cells or the aggregate, in row order.

        None where SQLite cannot run the query: a column that the table has not, the operator `OP`, a sum
        beyond 64 bits. A value without a number matches no cell of a `real` column.
        """
        selected = _name(query.sel)
        if query.agg:
            selected = f"{AGGREGATES[query.agg]}({selected})"
        found = self._select(selected, query)
        return None if found is None else [cell for (cell,) in found]

    def matching_rows(self, query: Query) -> Rows | None:
        """The rows that meet the query's conditions, whole; None as for `execute`."""
        found = self._select("rowid", query)
        if found is None:
            return None
        return Rows(self._table.header, tuple(self._table.rows[rowid - 1] for (rowid,) in found))

    def _select(self, selected: str, query: Query) -> list[tuple[Any, ...]] | None:
        if not self._is_runnable(query):
            return None
        conditions = " AND ".join(f"{_name(c)} {OPERATORS[o]} ?" for c, o, _ in query.conds)
        statement = f"SELECT {selected} FROM cells" + (f" WHERE {conditions}" if conditions else "")
        try:
            return self._database.execute(statement, [self._bound(c) for c in query.conds]).fetchall()
        except sqlite3.OperationalError:
            return None

    def _is_runnable(self, query: Query) -> bool:
        columns = {query.sel, *(condition.column for condition in query.conds)}
        operators = {OPERATORS[condition.operator] for condition in query.conds}
        return columns <= set(range(len(self._table.header))) and operators <= _RUNNABLE

    def _bound(self, condition: Condition) -> str | float | None:
        if self._table.types[condition.column] == "real":
            return number(_lower(condition.value))
        return _lower(condition.value)

    def _stored(self, row: tuple[Cell, ...]) -> list[str | float | None]:
        return [_stored(cell, kind) for cell, kind in zip(row, self._table.types, strict=True)]


def execute(query: Query, table: SQLTable) -> list[Cell] | None:
    """`Execution.execute` of one query; keep an `Execution` for several on the same table."""
    with closing(Execution(table)) as execution:
        return execution.execute(query)


def matching_rows(query: Query, table: SQLTable) -> Rows | None:
    """`Execution.matching_rows` of one query."""
    with closing(Execution(table)) as execution:
        return execution.matching_rows(query)


def is_usable(query: Query, result: list[Cell] | None) -> bool:
    """Whether a gold query's result can be scored: it found something.

    That is some row, no lone NULL, no count of nothing. On the rows at hand it names exactly the examples
    of `{train,dev}.executable.json`: 45,281 and 1,935.
    """
    nothing = 0 if AGGREGATES[query.agg] == "COUNT" else None
    return result is not None and result not in ([], [nothing])


def number(text: str) -> float | None:
    """The number that `text` is (`1,234`, `−6`, `2e3`), else the first one in it (`12.5 km`), else None.

    The official parser looks for the first number with the commas still there, and leaves the choice of
    minus signs to its locale; the executable lists were made with commas dropped and `−` taken as `-`.
    """
    whole = _whole_number(text)
    found = _FIRST_NUMBER.search(_plain(text)) if whole is None else None
    return float(found.group()) if found else whole


def _whole_number(text: str) -> float | None:
    try:
        return float(_plain(text))
    except ValueError:
        return None


def _plain(text: str) -> str:
    return text.replace(",", "").replace("−", "-")


def _lower(text: str) -> str:
    """Lower case, without the lone surrogates that JSON allows and SQLite refuses."""
    return text.lower().encode("utf-8", "replace").decode("utf-8")


def _name(column: int) -> str:
    """Our own name of a column: the header's may repeat."""
    return f'"col{column}"'


def _stored(cell: Cell, kind: str) -> str | float | None:
    if cell is None:
        return None
    text = _lower(str(cell))
    numeric = _whole_number(text) if kind == "real" else None
    return text if numeric is None else numeric
