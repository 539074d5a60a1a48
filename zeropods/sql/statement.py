"""A WikiSQL query as a statement that SQLite runs, and back.

The form is the one in which LLMSQL writes its gold statements: `SELECT COUNT("Player") FROM
"1-23-4" WHERE "Club" = 'Ajax' AND "Goals" > 5.0;`. Names stand in double quotes, texts in single
ones, and a quote inside is doubled.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query
from zeropods.sql.table import SQLTable

_NAME = r'"(?:[^"]|"")*"'
_TEXT = r"'(?:[^']|'')*'"
_NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
# `COMPARISON` without its groups, since a group's name can occur only once in a pattern.
_COMPARISON = rf"{_NAME}\s*[=<>]\s*(?:{_TEXT}|{_NAME}|{_NUMBER})"
_FLAGS = re.IGNORECASE | re.ASCII
BARE_NUMBER = re.compile(_NUMBER, _FLAGS)
"""A number that is written without quotes."""
STATEMENT = re.compile(
    r"\s*SELECT\s+(?:(?P<aggregate>MAX|MIN|COUNT|SUM|AVG)\s*\(\s*)?"
    rf"(?P<column>{_NAME})(?(aggregate)\s*\))"
    rf"\s+FROM\s+(?P<table>{_NAME})"
    rf"(?:\s+WHERE\s+(?P<conditions>{_COMPARISON}(?:\s+AND\s+{_COMPARISON})*))?"
    r"\s*;?\s*",
    _FLAGS,
)
"""A whole statement of the form."""
COMPARISON = re.compile(
    rf"(?P<column>{_NAME})\s*(?P<operator>[=<>])\s*(?P<value>{_TEXT}|{_NAME}|{_NUMBER})", _FLAGS
)
"""One of the comparisons that AND joins after WHERE."""
WHOLE_NUMBER = re.compile(r"(-?\d+)\.0+", re.ASCII)


def statement_of(query: Query, table: SQLTable) -> str:
    """The statement of a query on a table, which must have all the columns that the query names.

    A value is written without quotes if it is a number and its column is one of numbers.
    """
    selected = _quoted_name(table.header[query.sel])
    aggregate = AGGREGATES[query.agg]
    if aggregate:
        selected = f"{aggregate}({selected})"
    statement = f"SELECT {selected} FROM {_quoted_name(table.id)}"
    comparisons = []
    for column, operator, value in query.conds:
        is_number = table.types[column] == "real" and BARE_NUMBER.fullmatch(value) is not None
        literal = value if is_number else _quoted_text(value)
        name = _quoted_name(table.header[column])
        comparisons.append(f"{name} {OPERATORS[operator]} {literal}")
    if comparisons:
        statement += f" WHERE {' AND '.join(comparisons)}"
    return f"{statement};"


def query_of_statement(statement: str, table: SQLTable) -> Query | None:
    """The query that a statement about this table stands for.

    None where it is of another form, or names another table or a column that this one lacks. A
    whole number loses its decimal places (`2003.0` becomes `2003`), since a model copies its values
    from the question, where they are written without.
    """
    parts = STATEMENT.fullmatch(statement)
    if parts is None or _unquoted(parts["table"]) != table.id:
        return None
    columns: dict[str, int] = {}
    for number, name in enumerate(table.header):
        # SQLite compares names without regard to letter case.
        columns.setdefault(name.lower(), number)

    selected = columns.get(_unquoted(parts["column"]).lower())
    if selected is None:
        return None
    aggregate = (parts["aggregate"] or "").upper()
    conditions = []
    for comparison in COMPARISON.finditer(parts["conditions"] or ""):
        column = columns.get(_unquoted(comparison["column"]).lower())
        value = _value(comparison["value"], columns)
        if column is None or value is None:
            return None
        conditions.append(Condition(column, OPERATORS.index(comparison["operator"]), value))
    return Query(selected, AGGREGATES.index(aggregate), tuple(conditions))


def _value(literal: str, columns: Collection[str]) -> str | None:
    """The text of a value; None for the name of a column, since a `Query` compares no two columns.

    Args:
        literal: the value as the statement has it. In double quotes it is a text to SQLite, unless
            a column has that name.
        columns: the names of the table's columns in lower case.
    """
    if literal.startswith('"'):
        text = _unquoted(literal)
        return None if text.lower() in columns else text
    if literal.startswith("'"):
        return _unquoted(literal)
    whole = WHOLE_NUMBER.fullmatch(literal)
    return literal if whole is None else whole[1]


def _quoted_name(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


def _quoted_text(text: str) -> str:
    doubled = text.replace("'", "''")
    return f"'{doubled}'"


def _unquoted(quoted: str) -> str:
    """What stands between the quotes, in which each quote is doubled."""
    quote = quoted[0]
    return quoted[1:-1].replace(quote * 2, quote)
