"""A question about a table, and the query that answers it."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.sql.query import Query
from zeropods.sql.table import SQLTable


@dataclass(frozen=True)
class Example:
    """A question about a table, and the query that answers it."""

    index: int
    """Line number in the file of its split, from 0."""
    question: str
    table: SQLTable
    query: Query
