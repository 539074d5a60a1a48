"""A WikiSQL query as its parts: one selected column, one aggregate, conditions joined by AND."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
OPERATORS = ("=", ">", "<", "OP")


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
