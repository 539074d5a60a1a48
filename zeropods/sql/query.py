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
"""The aggregates by WikiSQL's numbers; the empty one stands for none."""
OPERATORS = ("=", ">", "<", "OP")
"""The operators by WikiSQL's numbers; `OP` is a filler of WikiSQL's that cannot be executed."""
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
    # A word is empty where there is no aggregate, or where the column has no name.
    return " ".join(word for word in words if word)


def parse_query(text: str, header: Sequence[str]) -> Query | None:
    """The query that `text` stands for on a table with this header; None where it stands for none.

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
    """The query with its values in the letter case of the question, where they first stand in it.

    A value that does not stand in the question as whole words stays as it is.
    """
    conditions = []
    for condition in query.conds:
        whole_words = rf"(?<!\w){re.escape(condition.value)}(?!\w)"
        match = re.search(whole_words, question, re.IGNORECASE)
        if match is None:
            conditions.append(condition)
        else:
            conditions.append(condition._replace(value=match[0]))
    return Query(query.sel, query.agg, tuple(conditions))


KEYWORDS = frozenset({"SELECT", "FROM", "table", "WHERE", "AND", *AGGREGATES, *OPERATORS})
"""The words by which `parse_query` finds the parts of a query."""


def is_restored(query: Query, header: tuple[str, ...]) -> bool:
    """Whether `parse_query` makes the same query again from a query's text.

    It does not where a value is empty or begins or ends with a blank, or where two columns have the
    same name; it may not where a name or a value holds a keyword. Most queries hold nothing of the
    kind, and their text is not parsed here.
    """
    values_are_plain = all(_is_plain_value(condition.value) for condition in query.conds)
    if values_are_plain and _has_plain_names(header):
        return True
    return parse_query(format_query(query, header), header) == query


@lru_cache(maxsize=1)
def _has_plain_names(header: tuple[str, ...]) -> bool:
    """Whether no name of a header is empty, occurs twice, or holds a keyword."""
    distinct_names = {tuple(name.split()) for name in header}
    is_any_empty = () in distinct_names
    is_any_twice = len(distinct_names) < len(header)
    if is_any_empty or is_any_twice:
        return False
    return all(KEYWORDS.isdisjoint(words) for words in distinct_names)


def _is_plain_value(value: str) -> bool:
    """Whether a value is not empty, has no blank at either end, and does not hold the word AND."""
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
    """A condition, and the longest chain of conditions that can follow it.

    Every chain ends with the empty chain, which has neither a condition nor a rest.
    """

    length: int
    """Number of conditions."""
    keyword_at: int
    """Index of the word that is its `WHERE` or `AND`; for the empty chain, the number of words."""
    condition: Condition | None = None
    rest: _Chain | None = None


class _Reading:
    """One text, read word by word against one header.

    The conditions are found from the end of the text, each once, so that the time stays linear.
    """

    def __init__(self, text: str, header: Sequence[str]) -> None:
        self.text = text
        self.spans = [match.span() for match in _WORD.finditer(text)]
        """Where each word begins and ends in the text."""
        self.words = tuple(text[start:end] for start, end in self.spans)
        self.names = _columns_by_name(header)
        """The words of each column's name, and its index; the longest name first."""
        self.empty = _Chain(0, len(self.words))
        self.following = [self.empty] * (len(self.words) + 1)
        """For each word, the longest chain whose `AND` stands there or later; one more entry for
        the end of the text."""
        self._find_chains()

    def _find_chains(self) -> None:
        """Fill `following` from the last word on: a chain is made of those that begin after it."""
        for index in reversed(range(len(self.words))):
            later = self.following[index + 1]
            here = self.empty
            if self.words[index] == "AND":
                here = self._longest(index)
            # Of equal lengths the earlier keyword wins: the value before it is shorter.
            if later.length > here.length:
                self.following[index] = later
            else:
                self.following[index] = here

    def query(self) -> Query | None:
        """The preferred one of the queries that the text can be read as; None if there is none.

        `parse_query` says which one is preferred.
        """
        queries = []
        for agg, aggregate in enumerate(AGGREGATES):
            head = ("SELECT", aggregate) if aggregate else ("SELECT",)
            if self.words[: len(head)] != head:
                continue
            for sel, end in self._columns_at(len(head)):
                conditions = self._conditions(end)
                if conditions is not None:
                    queries.append(Query(sel, agg, conditions))
        # Of queries with equally many conditions `max` takes the first.
        return max(queries, key=lambda query: len(query.conds), default=None)

    def _conditions(self, start: int) -> tuple[Condition, ...] | None:
        """The conditions of a query whose `FROM table` stands at the word `start`.

        None where `FROM table` does not stand there, or where no conditions can be read after it.
        """
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
        # `WHERE` without a condition is no query.
        return tuple(conditions) or None

    def _longest(self, keyword_at: int) -> _Chain:
        """The longest chain whose first condition stands right after the keyword at this word; the
        empty chain if none does. Chains further on must be known already."""
        best = self.empty
        for column, operator_at in self._columns_at(keyword_at + 1):
            value_at = operator_at + 1
            has_value = value_at < len(self.words)
            if not has_value or self.words[operator_at] not in OPERATORS:
                continue
            # The next condition begins one word later at the earliest, since no value is empty.
            rest = self.following[value_at + 1]
            length = 1 + rest.length
            # Of equal lengths the first chain stays, whose column has the longer name.
            if length <= best.length:
                continue
            # The value ends before the keyword of the rest, or at the end of the text.
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
# column the value is a number, or the first number in it. In that file, two conditions on one
# column both get the last value; here each gets its own (no query of train or dev has two).

_FIRST_NUMBER = re.compile(r"[-+]?\d*\.\d+|\d+")


class Execution:
    """A table in SQLite's memory, for any number of queries; `close` frees it."""

    def __init__(self, table: SQLTable) -> None:
        self._table = table
        # With `isolation_level=None` nothing needs to be committed.
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
        """The table's rows that meet the query's conditions, spelled as in the table; None as for
        `execute`."""
        row_ids = self._select("rowid", query)
        if row_ids is None:
            return None
        # SQLite numbers the rows from 1, in the order in which they were inserted.
        return [self._table.rows[row_id - 1] for row_id in row_ids]

    def _select(self, selected: str, query: Query) -> list[Any] | None:
        """What SQLite selects from the rows that meet the query's conditions, one value a row; None
        as for `execute`."""
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
            # The operator `OP`, or a sum beyond 64 bits.
            return None


def execute(query: Query, table: SQLTable) -> list[Cell] | None:
    """`Execution.execute` of one query; keep an `Execution` for several on the same table."""
    with closing(Execution(table)) as execution:
        return execution.execute(query)


def is_usable(query: Query, result: list[Cell] | None) -> bool:
    """Whether a gold query's result can be scored, because the query found something.

    That means at least one row, no lone NULL, and no count of 0. The examples of WikiSQL for which
    this holds are exactly those of `{train,dev}.executable.json`: 45,281 and 1,935.
    """
    if not result:
        return False
    if AGGREGATES[query.agg] == "COUNT":
        return result != [0]
    return result != [None]


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
    """The number that the whole text is, signs and decimal places included, else None; the words
    `nan` and `infinity` are no numbers."""
    try:
        value = float(_plain(text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    """A text without commas, and with `-` for the minus sign."""
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
