"""Random queries with a usable answer, in about WikiSQL's mix of aggregates, operators and conditions."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from random import Random

from zeropods.data.sample_facts import FactTable
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query

CONDITION_WEIGHTS = (1.3, 65, 24, 6, 4)
AGGREGATE_WEIGHTS = (66, 12, 12, 7, 12, 7)
"""Chosen so that what is left after senseless draws are dropped is about WikiSQL's mix."""
OPERATOR_WEIGHTS = (55, 22, 22)
KEY_SHARE = 0.5
"""How often a plain look-up is by the row's name."""

Row = tuple[str | int | float, ...]


@dataclass(frozen=True)
class Draw:
    """A query, and how many rows of its table it matches."""

    query: Query
    matches: int


def draw(table: FactTable, rng: Random) -> Draw | None:
    """One query, or None where what the dice say makes no sense for the table."""
    agg = rng.choices(range(6), AGGREGATE_WEIGHTS)[0]
    number = rng.choices(range(5), CONDITION_WEIGHTS)[0]
    selectable = [i for i, column in enumerate(table.columns) if _selectable(column.kind, AGGREGATES[agg])]
    if not selectable:
        return None
    sel = rng.choice(selectable)
    columns = _condition_columns(table, sel, agg, number, rng)
    if columns is None:
        return None
    row = rng.choice(table.rows)
    conds = tuple(_condition(table, column, row, rng) for column in columns)
    matches = sum(all(_holds(r, c, table) for c in conds) for r in table.rows)
    sensible = _sensible(table, agg, conds, matches)
    return Draw(Query(sel, agg, conds), matches) if sensible else None


def _selectable(kind: str, aggregate: str) -> bool:
    allowed = {
        "": ("name", "who", "text", "person", "amount", "level", "year", "count"),
        "COUNT": ("name", "who"),
        "MAX": ("amount", "level", "year", "count"),
        "MIN": ("amount", "level", "year", "count"),
        "SUM": ("amount", "count"),
        "AVG": ("amount", "level", "count"),
    }
    return kind in allowed[aggregate]


def _condition_columns(table: FactTable, sel: int, agg: int, number: int, rng: Random) -> list[int] | None:
    if agg == 0 and number == 1 and sel != table.key and rng.random() < KEY_SHARE:
        return [table.key]
    others = [i for i in range(len(table.columns)) if i not in (sel, table.key)]
    return rng.sample(others, number) if number <= len(others) else None


def _condition(table: FactTable, column: int, row: Row, rng: Random) -> Condition:
    """A condition that the row meets; comparisons part a column at its quartiles, so that limits recur."""
    operator = rng.choices(range(3), OPERATOR_WEIGHTS)[0] if table.columns[column].type == "real" else 0
    values = sorted({Decimal(str(r[column])) for r in table.rows}) if operator else []
    if len(values) < 2:
        return Condition(column, 0, str(row[column]))
    at = values.index(Decimal(str(row[column])))
    cuts = sorted({(len(values) - 1) * quarter // 4 for quarter in (1, 2, 3)})
    below = [cut for cut in cuts if cut < at]
    above = [cut for cut in cuts if cut >= at]
    if not (below if operator == 1 else above):
        operator = 3 - operator
    cut = rng.choice(below if operator == 1 else above)
    return Condition(column, operator, _round_number(values[cut], values[cut + 1], OPERATORS[operator]))


def _round_number(low: Decimal, high: Decimal, operator: str) -> str:
    """The roundest number that parts `low` from `high`: `> n` holds for `high` only, `< n` for `low` only."""
    for exponent in range(9, -5, -1):
        step = Decimal(1).scaleb(exponent)
        if operator == ">":
            number = (low / step).to_integral_value(ROUND_CEILING) * step
        else:
            number = (high / step).to_integral_value(ROUND_FLOOR) * step
        if (low <= number < high) if operator == ">" else (low < number <= high):
            break
    return f"{number.normalize() + 0:f}"


def _holds(row: Row, condition: Condition, table: FactTable) -> bool:
    column, operator, value = condition
    if table.columns[column].type == "text":
        return row[column] == value
    cell, limit = float(row[column]), float(value)
    return (cell == limit, cell > limit, cell < limit)[operator]


def _sensible(table: FactTable, agg: int, conds: tuple[Condition, ...], matches: int) -> bool:
    """No `1 moons`, no statistics of a single row, no condition that every row meets."""
    if any(table.columns[c.column].kind == "count" and c.value == "1" for c in conds):
        return False
    if conds and matches == len(table.rows):
        return False
    return matches >= (2 if AGGREGATES[agg] in ("MAX", "MIN", "SUM", "AVG") else 1)
