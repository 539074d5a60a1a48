"""A WikiSQL query as its parts, and as readable text.

One selected column, one aggregate, conditions joined by AND. The text is WikiSQL's printed form with the header's
names: `SELECT COUNT Nationality FROM table WHERE NHL team = New Jersey Devils AND Age > 30`. Nothing is quoted, so
where a name or a value holds `=`, `AND` or another name, the text can be read in several ways.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
OPERATORS = ("=", ">", "<", "OP")
_WORD = re.compile(r"\S+")


class Condition(NamedTuple):
    """`header[column] OPERATORS[operator] value`."""

    column: int
    operator: int
    value: str


@dataclass(frozen=True)
class Query:
    """`SELECT AGGREGATES[agg] header[sel] FROM table WHERE conds`.

    The names are those of WikiSQL's files (github.com/salesforce/WikiSQL).
    """

    sel: int
    agg: int
    conds: tuple[Condition, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The query in WikiSQL's form."""
        return {"sel": self.sel, "agg": self.agg, "conds": [list(c) for c in self.conds]}

    @classmethod
    def from_json(cls, document: object, columns: int) -> Query:
        """Read WikiSQL's form for a table of `columns` columns; `ValueError` names what is wrong."""
        if not isinstance(document, dict) or not {"sel", "agg", "conds"} <= document.keys():
            raise ValueError(f"query {document!r}; expected {{'sel', 'agg', 'conds'}}")
        if not isinstance(document["conds"], list):
            raise ValueError(f"conds {document['conds']!r}; expected a list")
        return cls(
            sel=_index("sel", document["sel"], columns),
            agg=_index("agg", document["agg"], len(AGGREGATES)),
            conds=tuple(_condition(c, columns) for c in document["conds"]),
        )


def _condition(document: object, columns: int) -> Condition:
    if not isinstance(document, list) or len(document) != 3:
        raise ValueError(f"condition {document!r}; expected [column, operator, value]")
    column, operator, value = document
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"condition value {value!r}; expected text or a number")
    return Condition(
        _index("condition column", column, columns),
        _index("condition operator", operator, len(OPERATORS)),
        str(value),
    )


def _index(name: str, value: object, length: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < length:
        raise ValueError(f"{name} {value!r}; expected 0 to {length - 1}")
    return value


# A query as text, and back.


def format_query(query: Query, header: Sequence[str]) -> str:
    """The readable form; names and values stand in it as they are."""
    words = ["SELECT", AGGREGATES[query.agg], header[query.sel], "FROM table"]
    conditions = (f"{header[column]} {OPERATORS[op]} {value}" for column, op, value in query.conds)
    if query.conds:
        words += ["WHERE", " AND ".join(conditions)]
    return " ".join(word for word in words if word)


def parse_query(text: str, header: Sequence[str]) -> Query | None:
    """The query that `text` stands for on a table with this header, or None.

    Of several readings the one with the most conditions is taken, which is right for each of WikiSQL's
    64,776 train and dev queries; then, from left to right, a column `MAX Speed` before the `MAX` of a column
    `Speed`, the longer column name, the shorter value; of equal names the first. Words are separated by
    whitespace of any kind and length, which is kept inside a value and dropped around it. Letter case counts,
    and no value is empty.
    A text that cannot be read as it is, is read once more after NFKC, the form in which T5's tokenizer
    writes names such as `V²`. Time is linear in words x columns.
    """
    query = _Reading(text, header).query()
    if query is None:
        query = _Reading(_nfkc(text), [_nfkc(name) for name in header]).query()
    return query


def cells_text(cells: Sequence[str | int | float | None] | None) -> str:
    """Cells that a query gives, as people read it; None stands for a query that cannot be run."""
    if cells is None:
        return "cannot be run"
    known = [f"{cell:.10g}" if isinstance(cell, float) else str(cell) for cell in cells if cell is not None]
    return ", ".join(known) or "nothing"


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


class _Chain(NamedTuple):
    """A condition and the best chain that can follow it."""

    length: int
    keyword: int
    """Where `WHERE` or `AND` stands, as an index of words; likewise `value`, where the value begins."""
    column: int
    operator: int
    value: int
    rest: _Chain | None


class _Reading:
    """One text against one header, word by word."""

    def __init__(self, text: str, header: Sequence[str]) -> None:
        self.text = text
        self.spans = [match.span() for match in _WORD.finditer(text)]
        self.words = [text[start:end] for start, end in self.spans]
        columns: dict[tuple[str, ...], int] = {}
        for column, name in enumerate(header):
            columns.setdefault(tuple(name.split()), column)
        longest_first = sorted(columns.items(), key=lambda item: len(item[0]), reverse=True)
        self.columns = [(column, list(name)) for name, column in longest_first]

    def query(self) -> Query | None:
        readings = (self._completed(*selection) for selection in self._selections())
        found = [reading for reading in readings if reading is not None]
        return max(found, key=lambda query: len(query.conds), default=None)

    def _selections(self) -> Iterator[tuple[int, int, int]]:
        """Column, aggregate and the index after `FROM table`, the preferred reading first."""
        for agg, aggregate in enumerate(AGGREGATES):
            start = ["SELECT", aggregate] if aggregate else ["SELECT"]
            if self.words[: len(start)] == start:
                for column, end in self._columns(len(start)):
                    if self.words[end : end + 2] == ["FROM", "table"]:
                        yield column, agg, end + 2

    def _completed(self, sel: int, agg: int, end: int) -> Query | None:
        if end == len(self.words):
            return Query(sel, agg)
        chain = _longest(self._heads(end, self.following), None) if self.words[end] == "WHERE" else None
        return Query(sel, agg, tuple(self._conditions(chain))) if chain else None

    @cached_property
    def following(self) -> list[_Chain | None]:
        """For each word, the longest chain whose `AND` stands there or later; found from right to left."""
        following: list[_Chain | None] = [None] * (len(self.words) + 1)
        for index in range(len(self.words) - 1, -1, -1):
            following[index] = following[index + 1]
            if self.words[index] == "AND":
                following[index] = _longest(self._heads(index, following), following[index])
        return following

    def _heads(self, keyword: int, following: list[_Chain | None]) -> Iterator[_Chain]:
        """Every chain whose first condition stands right after this keyword."""
        for column, end in self._columns(keyword + 1):
            value = end + 1
            if value < len(self.words) and self.words[end] in OPERATORS:
                rest = following[value + 1]
                length = 1 + (rest.length if rest else 0)
                yield _Chain(length, keyword, column, OPERATORS.index(self.words[end]), value, rest)

    def _columns(self, start: int) -> Iterator[tuple[int, int]]:
        """Each column whose name stands at this word, longest name first, and the index after it."""
        for column, name in self.columns:
            if self.words[start : start + len(name)] == name:
                yield column, start + len(name)

    def _conditions(self, chain: _Chain | None) -> Iterator[Condition]:
        while chain is not None:
            last = (chain.rest.keyword if chain.rest else len(self.words)) - 1
            value = self.text[self.spans[chain.value][0] : self.spans[last][1]]
            yield Condition(chain.column, chain.operator, value)
            chain = chain.rest


def _longest(chains: Iterator[_Chain], other: _Chain | None) -> _Chain | None:
    best = max(chains, key=lambda chain: chain.length, default=None)
    if best is None or (other is not None and other.length > best.length):
        return other
    return best
