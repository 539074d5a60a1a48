"""Varied copies of text-to-SQL examples, from which a model learns to read the schema.

A model that sees each question with its table in one order of columns learns tables by heart. A
varied copy asks about another table in the same words: its columns stand in another order, some
that the query does not need are left out, some have names of other tables' columns, and values are
those of other rows. Its query is the answer to the new question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

from zeropods.sql.example import Example
from zeropods.sql.query import Condition, Query
from zeropods.sql.table import Cell, SQLTable

LEFT_OUT_SHARE = 0.3
"""Share of the copies that leave out some of the columns that their query does not need."""
OTHER_NAME_SHARE = 0.5
"""Share of the columns that get another name, of those that can."""
OTHER_VALUE_SHARE = 0.5
"""Share of the values that are replaced, of those that occur once in their question."""
MOST_WORDS = 8
"""A cell of more words than this is not put into a question."""
MOST_WORDS_OF_NAME = 4
"""A name of more words than this is not given to another column."""
REMEMBERED_NAMES = 16_384
"""Number of names whose patterns are kept."""

NamesByType = Mapping[str, Sequence[str]]
"""Names that columns can be given, by the type of a column, `text` or `real`."""


def names_of_columns(examples: Iterable[Example]) -> NamesByType:
    """The names that the columns of some examples have, each once, in the order of the examples."""
    # Dicts without values: unlike sets, they keep the order of the examples.
    names_by_type: dict[str, dict[str, None]] = {}
    for example in examples:
        for name, kind in zip(example.table.header, example.table.types, strict=True):
            is_short = 0 < len(name.split()) <= MOST_WORDS_OF_NAME
            if is_short:
                names_by_type.setdefault(kind, {})[name] = None
    return {kind: tuple(names) for kind, names in names_by_type.items()}


def varied(example: Example, rng: Random, names: NamesByType) -> Example:
    """A varied copy of an example; its table has no rows.

    Args:
        rng: decides what is varied; its state moves on.
        names: names that columns may get.
    """
    question, query = _with_other_values(example.question, example.query, example.table, rng)
    question, table = _with_other_names(question, example.table, query, names, rng)
    table, query = _with_other_columns(table, query, rng)
    return replace(example, question=question, table=table, query=query)


# Other values.


def _with_other_values(
    question: str, query: Query, table: SQLTable, rng: Random
) -> tuple[str, Query]:
    """Question and query with other values in some of the conditions."""
    conditions = []
    for condition in query.conds:
        value = _other_value(table, condition, rng)
        if value is not None and rng.random() < OTHER_VALUE_SHARE:
            question, condition = _with_value(question, condition, value)
        conditions.append(condition)
    return question, replace(query, conds=tuple(conditions))


def _other_value(table: SQLTable, condition: Condition, rng: Random) -> str | None:
    """The text of a random cell in a condition's column; None where it is the old value, or nothing
    to put into a question."""
    if not table.rows:
        return None
    text = _text(rng.choice(table.rows)[condition.column])
    is_other = text.lower() != condition.value.lower()
    is_short = 0 < len(text.split()) <= MOST_WORDS
    return text if is_other and is_short else None


def _text(cell: Cell) -> str:
    """A cell as people write it: `12` for 12.0, and single spaces."""
    if cell is None:
        return ""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return " ".join(str(cell).split())


def _with_value(question: str, condition: Condition, value: str) -> tuple[str, Condition]:
    """Question and condition with another value; unchanged unless the question has the old one
    exactly once, as whole words."""
    old_value = condition.value
    whole_words = re.compile(rf"(?<!\w){re.escape(old_value)}(?!\w)", re.IGNORECASE)
    matches = list(whole_words.finditer(question))
    if len(matches) != 1:
        return question, condition
    has_no_capitals = value == value.lower()
    had_capitals = old_value != old_value.lower()
    if has_no_capitals and had_capitals:
        # WikiSQL's cells are in lower case, the names in its questions often are not.
        value = value.title()
    reworded = _reworded(question, matches[0], old_value, value)
    return reworded, condition._replace(value=value)


def _reworded(question: str, match: re.Match[str], old: str, new: str) -> str:
    """The question with a new value or name in the place of the old one, where `match` has found
    it; in lower case where the question has the old one in lower case."""
    is_lowered = match[0] == old.lower()
    if is_lowered:
        new = new.lower()
    return question[: match.start()] + new + question[match.end() :]


# Other names of columns.


def _with_other_names(
    question: str, table: SQLTable, query: Query, names: NamesByType, rng: Random
) -> tuple[str, SQLTable]:
    """Question and table with other names for some of the columns."""
    header = list(table.header)
    for column, kind in enumerate(table.types):
        if kind in names and rng.random() < OTHER_NAME_SHARE:
            name = rng.choice(names[kind])
            reworded = _with_name(question, header, column, name, query)
            if reworded is not None:
                question = reworded
                header[column] = name
    return question, replace(table, header=tuple(header))


def _with_name(
    question: str, header: Sequence[str], column: int, name: str, query: Query
) -> str | None:
    """The question that calls a column by another name; None where the column cannot be renamed.

    A column can be renamed in two cases: where the question has its name exactly once, alone or
    with the `s` of a plural, and no value of the query has a word of the name; or where neither the
    question nor the query names the column.
    """
    old_name = header[column]
    has_old_name = bool(old_name.strip())
    is_taken = name.lower() in {other.lower() for other in header}
    if not has_old_name or is_taken:
        return None
    # With a name that the question has already, the question would seem to ask about the column.
    if _matches(name, question):
        return None
    matches = _matches(old_name, question)
    if not matches and column not in query.columns:
        return question
    if len(matches) != 1:
        return None
    is_in_a_value = any(_words(old_name) & _words(condition.value) for condition in query.conds)
    if is_in_a_value:
        return None
    return _reworded(question, matches[0], old_name, name)


def _matches(name: str, question: str) -> list[re.Match[str]]:
    """Where a question has a name as whole words, in any letter case; the `s` of a plural may
    follow."""
    return list(_whole_words(name).finditer(question))


@lru_cache(REMEMBERED_NAMES)
def _whole_words(name: str) -> re.Pattern[str]:
    """The pattern of a name in a question.

    It is remembered: compiling it takes longer than a search, and a name is searched for in
    thousands of questions.
    """
    return re.compile(rf"(?<!\w){re.escape(name)}(?=s?(?!\w))", re.IGNORECASE)


def _words(text: str) -> set[str]:
    return set(text.lower().split())


# Other columns, in another order.


def _with_other_columns(table: SQLTable, query: Query, rng: Random) -> tuple[SQLTable, Query]:
    """The table with its columns in another order, some of them left out, and the query on it."""
    needed = set(query.columns)
    others = [column for column in range(len(table.header)) if column not in needed]
    if others and rng.random() < LEFT_OUT_SHARE:
        # `randrange` stops below its argument, so at least one is left out.
        number_kept = rng.randrange(len(others))
        others = rng.sample(others, number_kept)
    order = [*sorted(needed), *others]
    rng.shuffle(order)
    return _reordered(table, order), _renumbered(query, order)


def _reordered(table: SQLTable, order: Sequence[int]) -> SQLTable:
    """The table with these of its columns, in this order, and without rows."""
    header = tuple(table.header[column] for column in order)
    types = tuple(table.types[column] for column in order)
    return SQLTable(table.id, header, types, rows=())


def _renumbered(query: Query, order: Sequence[int]) -> Query:
    """The query with the numbers that its columns have in a new order."""
    selected = order.index(query.sel)
    conditions = []
    for condition in query.conds:
        column = order.index(condition.column)
        conditions.append(condition._replace(column=column))
    return replace(query, sel=selected, conds=tuple(conditions))
