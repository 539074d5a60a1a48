"""A question about a table, and the query that answers it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeropods.sql.query import Query, format_query
from zeropods.sql.table import SQLTable


@dataclass(frozen=True)
class Example:
    """A question about a table, and the query that answers it."""

    index: int
    """Line number in the file of its split, from 0."""
    question: str
    table: SQLTable
    query: Query

    @property
    def query_text(self) -> str:
        """The readable form of the query, with names and values as they are."""
        return format_query(self.query, self.table.header)


def lower_cased(example: Example) -> Example:
    """The example with its question, the names of its columns and its values in lower case.

    The cells of its table stay as they are: comparing them regards no letter case anyway.
    """
    header = tuple(name.lower() for name in example.table.header)
    conditions = []
    for condition in example.query.conds:
        conditions.append(condition._replace(value=condition.value.lower()))
    return replace(
        example,
        question=example.question.lower(),
        table=replace(example.table, header=header),
        query=replace(example.query, conds=tuple(conditions)),
    )
