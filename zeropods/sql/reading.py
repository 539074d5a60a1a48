"""What a sequence of pieces says: the query that one reading of them spells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from zeropods.sql.query import Condition, Query
from zeropods.sql.spelling import AFTER_SPACE, Spelling, ValueSpelling


class Role(Enum):
    """What a part of the text does in the query."""

    BEGINNING = auto()
    SELECT = auto()
    AGGREGATE = auto()
    SELECTED = auto()
    FROM = auto()
    WHERE = auto()
    COLUMN = auto()
    OPERATOR = auto()
    VALUE = auto()
    AND = auto()


@dataclass(frozen=True, eq=False)
class Part:
    """A keyword, a name or a value, with its leading space: no piece reaches from one part into the next."""

    role: Role
    spelling: Spelling
    index: int = 0
    """Which aggregate, column or operator it is."""


class Thread(NamedTuple):
    """One piece as one reading takes it, linked to the piece before it."""

    part: Part
    end: int
    """The offset in the part's spelling to which the piece leads."""
    depth: int
    """The number of the condition, from 1; 0 before the first."""
    id: int
    before: Thread | None

    @property
    def ends_part(self) -> bool:
        return self.part.spelling.complete(self.end)

    @property
    def ends_query(self) -> bool:
        return self.part.role in (Role.FROM, Role.VALUE) and self.ends_part


class Reading:
    """The parts of a query as far as one thread has spelled them."""

    def __init__(self, thread: Thread) -> None:
        steps = list(_from_first(thread))
        self._parts = {(step.part.role, step.depth): step.part for step in steps}
        self.values: dict[int, str] = {}
        """Each condition's value, by the condition's number."""
        for step in steps:
            if step.part.role is Role.VALUE and step.end != AFTER_SPACE:
                self.values[step.depth] = (self.values.get(step.depth, "") + _spelled(step)).lstrip()

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts the preferred reading first, in `parse_query`'s order.

        That is: most conditions, no aggregate, longest column names, shortest values. Only what `<unk>`
        covers is not seen in the text: there the longer value comes first.
        """
        aggregated = (Role.AGGREGATE, 0) in self._parts
        conditions = [
            (-self._words(Role.COLUMN, depth), len(value.split()), -len(value)) for depth, value in self.values.items()
        ]
        return -len(conditions), aggregated, -self._words(Role.SELECTED, 0), conditions

    def query(self, unfinished: int = 0, selected: int = 0) -> Query:
        """The query, less the condition of number `unfinished`; `selected` where no column is named yet."""
        conditions = (
            Condition(self._parts[Role.COLUMN, depth].index, self._parts[Role.OPERATOR, depth].index, value)
            for depth, value in self.values.items()
            if depth != unfinished
        )
        aggregate = self._index(Role.AGGREGATE, 0)
        return Query(self._index(Role.SELECTED, selected), aggregate, tuple(conditions))

    def _index(self, role: Role, default: int) -> int:
        part = self._parts.get((role, 0))
        return part.index if part else default

    def _words(self, role: Role, depth: int) -> int:
        part = self._parts.get((role, depth))
        return len(part.spelling.text.split()) if part else 0


def preferred(threads: Iterable[Thread]) -> Thread:
    """The thread with the preferred reading; the first of equals."""
    first, *others = threads
    return min((first, *others), key=lambda thread: Reading(thread).rank) if others else first


def finished(thread: Thread, selected: int) -> Query:
    """A query from a reading that was cut short: what is complete of it, with column `selected` at worst."""
    cut = thread.part.role is Role.VALUE and not thread.ends_part
    return Reading(thread).query(thread.depth if cut else 0, selected)


def _spelled(step: Thread) -> str:
    assert isinstance(step.part.spelling, ValueSpelling)
    start = step.before.end if step.before and step.before.part is step.part else AFTER_SPACE
    return step.part.spelling.spelled(step.id, start, step.end)


def _from_first(thread: Thread) -> Iterator[Thread]:
    steps = []
    step: Thread | None = thread
    while step is not None:
        steps.append(step)
        step = step.before
    return reversed(steps)
