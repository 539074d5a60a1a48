"""A WikiSQL query as its parts, as readable text, and executed on its table.

It has one selected column, at most one aggregate, and conditions joined by AND. The text is
WikiSQL's printed form with the header's names: `SELECT COUNT Nationality FROM table WHERE NHL team
= New Jersey Devils AND Age > 30`. Nothing is quoted, so if a name or a value holds `=`, `AND` or
another name, the text can be read in several ways.
"""

from __future__ import annotations

import math
import re
import sqlite3
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from zeropods.sql.table import Cell, SQLTable

AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
OPERATORS = ("=", ">", "<", "OP")
_WORD = re.compile(r"\S+")


def _number_as_text(value: object) -> object:
    """A number as text, as in the official evaluator: pydantic would turn 1939.0 into `1939`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        return str(value)
    return value


class Condition(NamedTuple):
    """`header[column] OPERATORS[operator] value`."""

    column: Annotated[int, Field(strict=True, ge=0)]
    operator: Annotated[int, Field(strict=True, ge=0, lt=len(OPERATORS))]
    value: Annotated[str, BeforeValidator(_number_as_text)]


@dataclass(frozen=True)
class Query:
    """`SELECT AGGREGATES[agg] header[sel] FROM table WHERE conds`.

    The names are those of WikiSQL's files (github.com/salesforce/WikiSQL).
    """

    sel: Annotated[int, Field(strict=True, ge=0)]
    agg: Annotated[int, Field(strict=True, ge=0, lt=len(AGGREGATES))]
    conds: tuple[Condition, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The query in WikiSQL's form."""
        conditions = [list(condition) for condition in self.conds]
        return {"sel": self.sel, "agg": self.agg, "conds": conditions}

    @property
    def columns(self) -> list[int]:
        """The columns that the query names: the selected one, then those of its conditions."""
        return [self.sel, *(condition.column for condition in self.conds)]

    def fits(self, number_of_columns: int) -> bool:
        """Whether a table with this number of columns has all that the query names."""
        return max(self.columns) < number_of_columns


# A query to text, and back.


def format_query(query: Query, header: Sequence[str]) -> str:
    """The readable form of a query, with names and values as they are."""
    words = ["SELECT", AGGREGATES[query.agg], header[query.sel], "FROM table"]
    conditions = []
    for column, operator, value in query.conds:
        conditions.append(f"{header[column]} {OPERATORS[operator]} {value}")
    if conditions:
        words += ["WHERE", " AND ".join(conditions)]
    # Empty are the name of no aggregate, and that of a column without a name.
    return " ".join(word for word in words if word)


def parse_query(text: str, header: Sequence[str]) -> Query | None:
    """The query that `text` stands for on a table with this header, or None.

    Of several readings the one with the most conditions is taken, which is right for each of
    WikiSQL's 64,776 train and dev queries; then, from left to right, a column `MAX Speed` before
    the `MAX` of a column `Speed`, the longer column name, the shorter value; of equal names the
    first. Words are separated by whitespace of any kind and length, which is kept inside a value
    and dropped around it. No value is empty.

    If a text cannot be read as it is, it is read again after NFKC, the form in which T5's tokenizer
    writes names such as `V²`, and at last with all names in lower case, as a model writes them that
    was trained with the prompt `schema`. The time is linear in words x columns.
    """
    query = _Reading(text, header).query()
    if query is not None:
        return query
    normal_text = _nfkc(text)
    normal_header = [_nfkc(name) for name in header]
    query = _Reading(normal_text, normal_header).query()
    if query is not None:
        return query
    return _Reading(normal_text, [name.lower() for name in normal_header]).query()


def with_values_of(question: str, query: Query) -> Query:
    """The query with its values in the letter case that the question's words have; a value that is
    no words of the question stays as it is."""
    conditions = []
    for condition in query.conds:
        whole_words = rf"(?<!\w){re.escape(condition.value)}(?!\w)"
        place = re.search(whole_words, question, re.IGNORECASE)
        if place is not None:
            condition = condition._replace(value=place[0])
        conditions.append(condition)
    return Query(query.sel, query.agg, tuple(conditions))


KEYWORDS = frozenset({"SELECT", "FROM", "table", "WHERE", "AND", *AGGREGATES, *OPERATORS})


def is_restored(query: Query, header: tuple[str, ...]) -> bool:
    """Whether `parse_query` reads from a query's text the very query.

    It does not where a value is empty or begins or ends with a blank, or where two columns have the
    same name; it may not where a name or a value holds a keyword. Most queries are restored by
    construction and need no parsing.
    """
    values_are_plain = all(_is_plain_value(condition.value) for condition in query.conds)
    if values_are_plain and _has_plain_names(header):
        return True
    return parse_query(format_query(query, header), header) == query


@lru_cache(maxsize=1)
def _has_plain_names(header: tuple[str, ...]) -> bool:
    """Whether no name of a header is empty, occurs twice, or holds a keyword."""
    names = {tuple(name.split()) for name in header}
    is_any_empty = () in names
    is_any_twice = len(names) < len(header)
    if is_any_empty or is_any_twice:
        return False
    return all(KEYWORDS.isdisjoint(name) for name in names)


def _is_plain_value(value: str) -> bool:
    """Whether a value begins and ends with a letter or sign, and does not hold the word that joins
    conditions."""
    words = value.split()
    is_empty = not words
    is_padded = value != value.strip()
    return not is_empty and not is_padded and "AND" not in words


def cells_text(cells: Sequence[str | int | float | None] | None) -> str:
    """The cells that a query returns, as text for people; None stands for a query that cannot be
    run."""
    if cells is None:
        return "cannot be run"
    texts = []
    for cell in cells:
        if isinstance(cell, float):
            texts.append(f"{cell:.10g}")
        elif cell is not None:
            texts.append(str(cell))
    return ", ".join(texts) or "nothing"


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


class _Chain(NamedTuple):
    """A condition, and the longest chain of conditions that can follow it."""

    length: int
    keyword_at: int
    """Index of the word that is its `WHERE` or `AND`; for the empty chain, the number of words."""
    condition: Condition | None = None
    rest: _Chain | None = None


class _Reading:
    """One text, read word by word against one header."""

    def __init__(self, text: str, header: Sequence[str]) -> None:
        self.text = text
        self.spans = [match.span() for match in _WORD.finditer(text)]
        self.words = tuple(text[start:end] for start, end in self.spans)
        self.names = _columns_by_name(header)
        """The words of each column's name, and its index; the longest name first."""
        self.empty = _Chain(0, len(self.words))
        self.following = [self.empty] * (len(self.words) + 1)
        """For each word, the longest chain whose `AND` stands there or later."""
        self._find_chains()

    def _find_chains(self) -> None:
        """Fill `following` from the last word on: a chain is made of those that begin after it."""
        for index in reversed(range(len(self.words))):
            later = self.following[index + 1]
            here = self.empty
            if self.words[index] == "AND":
                here = self._longest(index)
            # Of equal lengths the earlier keyword wins: the value before it is shorter.
            self.following[index] = later if later.length > here.length else here

    def query(self) -> Query | None:
        """The preferred reading."""
        queries = []
        for agg, aggregate in enumerate(AGGREGATES):
            head = ("SELECT", aggregate) if aggregate else ("SELECT",)
            if self.words[: len(head)] != head:
                continue
            for sel, end in self._columns_at(len(head)):
                conditions = self._conditions(end)
                if conditions is not None:
                    queries.append(Query(sel, agg, conditions))
        # Of equal lengths the first one stays.
        return max(queries, key=lambda query: len(query.conds), default=None)

    def _conditions(self, start: int) -> tuple[Condition, ...] | None:
        """The conditions after `FROM table`, which must stand at a word; None where the rest is no
        query."""
        where_at = start + 2
        if self.words[start:where_at] != ("FROM", "table"):
            return None
        if where_at == len(self.words):
            return ()
        if self.words[where_at] != "WHERE":
            return None
        chain = self._longest(where_at)
        conditions = []
        while chain.condition is not None and chain.rest is not None:
            conditions.append(chain.condition)
            chain = chain.rest
        # After `WHERE` there must be one.
        return tuple(conditions) or None

    def _longest(self, keyword_at: int) -> _Chain:
        """The longest chain whose first condition stands right after the keyword at this word."""
        best = self.empty
        for column, operator_at in self._columns_at(keyword_at + 1):
            value_at = operator_at + 1
            has_value = value_at < len(self.words)
            if not has_value or self.words[operator_at] not in OPERATORS:
                continue
            # The value has one word at least.
            rest = self.following[value_at + 1]
            length = 1 + rest.length
            # Of equal lengths the first chain stays, whose column has the longer name.
            if length <= best.length:
                continue
            # The value goes as far as the keyword of the rest, or to the end of the text.
            value_start, _ = self.spans[value_at]
            _, value_end = self.spans[rest.keyword_at - 1]
            value = self.text[value_start:value_end]
            operator = OPERATORS.index(self.words[operator_at])
            best = _Chain(length, keyword_at, Condition(column, operator, value), rest)
        return best

    def _columns_at(self, start: int) -> Iterator[tuple[int, int]]:
        """Each column whose name stands at this word, longest name first, and the index of the word
        after its name."""
        for name, column in self.names:
            end = start + len(name)
            if self.words[start:end] == name:
                yield column, end


def _columns_by_name(header: Sequence[str]) -> list[tuple[tuple[str, ...], int]]:
    """The words of each name of a header, with its column, longest names first; of equal names only
    the first."""
    column_by_name: dict[tuple[str, ...], int] = {}
    for column, name in enumerate(header):
        column_by_name.setdefault(tuple(name.split()), column)
    return sorted(column_by_name.items(), key=lambda item: len(item[0]), reverse=True)


# A query executed on its table by SQLite, following the rules of WikiSQL's official evaluator.
#
# `lib/dbengine.py` of github.com/salesforce/WikiSQL: text is compared in lower case; on a `real`
# column the value is a number, or the first number in it. There, two conditions on one column both
# get the last value; here each gets its own (no query of train or dev has two).

_FIRST_NUMBER = re.compile(r"[-+]?\d*\.\d+|\d+")


class Execution:
    """A table in SQLite's memory, for any number of queries; `close` frees it."""

    def __init__(self, table: SQLTable) -> None:
        self._table = table
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        # The columns get names of our own, since those of the header may repeat.
        columns = ", ".join(f"col{number} {kind}" for number, kind in enumerate(table.types))
        self._database.execute(f"CREATE TABLE cells ({columns})")
        placeholders = ", ".join("?" * len(table.types))
        rows = (_stored_row(row, table.types) for row in table.rows)
        self._database.executemany(f"INSERT INTO cells VALUES ({placeholders})", rows)

    def close(self) -> None:
        self._database.close()

    def execute(self, query: Query) -> list[Cell] | None:
        """The selected cells or the aggregate, in row order.

        None if the query cannot be run: it has a column that the table lacks, the operator `OP`, or
        a sum beyond 64 bits. A value without a number matches no cell of a `real` column.
        """
        return self._select(f"{AGGREGATES[query.agg]}(col{query.sel})", query)

    def matching_rows(self, query: Query) -> list[tuple[Cell, ...]] | None:
        """The whole rows that meet the query's conditions, in their own spelling; None as for
        `execute`."""
        row_ids = self._select("rowid", query)
        if row_ids is None:
            return None
        return [self._table.rows[row_id - 1] for row_id in row_ids]

    def _select(self, selected: str, query: Query) -> list[Any] | None:
        """What SQLite selects from the rows that meet the query's conditions; None as for
        `execute`."""
        if not query.fits(len(self._table.header)):
            return None
        conditions = []
        values: list[str | float | None] = []
        for column, operator, value in query.conds:
            conditions.append(f"col{column} {OPERATORS[operator]} ?")
            if self._table.types[column] == "real":
                values.append(number(value.lower()))
            else:
                values.append(value.lower())
        statement = f"SELECT {selected} FROM cells"
        if conditions:
            statement += f" WHERE {' AND '.join(conditions)}"
        try:
            rows = self._database.execute(statement, values)
            return [cell for (cell,) in rows]
        except sqlite3.OperationalError:
            return None


def execute(query: Query, table: SQLTable) -> list[Cell] | None:
    """`Execution.execute` of one query; keep an `Execution` for several on the same table."""
    with closing(Execution(table)) as execution:
        return execution.execute(query)


def is_usable(query: Query, result: list[Cell] | None) -> bool:
    """Whether a gold query's result can be scored, because the query found something.

    That means at least one row, no lone NULL, and no count of 0. Where tables have rows, it selects
    exactly the examples of `{train,dev}.executable.json`: 45,281 and 1,935.
    """
    if not result:
        return False
    nothing = 0 if AGGREGATES[query.agg] == "COUNT" else None
    return result != [nothing]


def number(text: str) -> float | None:
    """The number that `text` is (`1,234`, `−6`, `2e3`), else the first one in it (`12.5 km`), else
    None.

    The official parser looks for the first number without removing commas, and leaves the choice of
    minus signs to its locale; the executable lists were made with commas removed and `−` taken as
    `-`.
    """
    whole = _whole_number(text)
    if whole is not None:
        return whole
    match = _FIRST_NUMBER.search(_plain(text))
    return None if match is None else float(match[0])


def _whole_number(text: str) -> float | None:
    """The number that the whole text is, else None; the words `nan` and `infinity` are no
    numbers."""
    try:
        value = float(_plain(text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    return text.replace(",", "").replace("−", "-")


def _stored_row(row: Sequence[Cell], kinds: Sequence[str]) -> list[str | float | None]:
    """The cells of a row as SQLite holds them."""
    return [_stored(cell, kind) for cell, kind in zip(row, kinds, strict=True)]


def _stored(cell: Cell, kind: str) -> str | float | None:
    """A cell as SQLite holds it: in lower case or, in a `real` column, as a number if the whole
    cell is one."""
    if cell is None:
        return None
    text = str(cell).lower()
    if kind != "real":
        return text
    value = _whole_number(text)
    return text if value is None else value
