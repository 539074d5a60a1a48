"""The grammar of a query's text over a tokenizer's pieces, for constrained decoding.

`SELECT [AGG ]COLUMN FROM table[ WHERE COLUMN OP VALUE[ AND COLUMN OP VALUE]...]`, where a column is a name of
the table's header and a value is a span of the question. Any segmentation of such a text into pieces is
accepted. A prefix may have several readings (after `New York and` a value can go on, or another condition
begin): all are kept. The idea is PICARD's (Scholak et al. 2021, arXiv 2109.05093), which parses the text anew
at each step; here states are made when they are first reached, and remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zeropods.sql.query import AGGREGATES, OPERATORS, Query
from zeropods.sql.reading import Part, Reading, Role, Thread, finished, preferred
from zeropods.sql.spelling import BEGIN, Steps, ValueSpelling, spelling
from zeropods.sql.vocabulary import Vocabulary

MOST_CONDITIONS = 4
"""WikiSQL's own limit."""
OFFERED_OPERATORS = ("=", ">", "<")
"""None of WikiSQL's 64,776 train and dev queries has the operator `OP`."""

REMEMBERED_HEADERS = 1_024
"""Questions about the same table mostly come together."""

Way = tuple[Part, int, Steps]
"""A way on: the part that a piece would belong to, the number of its condition, and the pieces."""


class QueryAutomaton:
    """The texts of all queries on one table with values from one question."""

    def __init__(self, vocabulary: Vocabulary, header: Sequence[str], question: str) -> None:
        """Start an automaton; its states come later.

        Columns without a name cannot be spelled, and of equal names the first is meant. `ValueError` where
        no column has a name.
        """
        self.vocabulary = vocabulary
        self._followers = _followers(vocabulary, tuple(header))
        values = ValueSpelling(vocabulary, question)
        self._value = Part(Role.VALUE, values)
        self._has_values = bool(values.starts)
        beginning = Part(Role.BEGINNING, spelling(vocabulary, ""))
        self.start = State(self, (Thread(beginning, BEGIN, 0, vocabulary.pad, None),))

    @property
    def first_column(self) -> int:
        """The first column that has a name."""
        return self._followers[Role.AGGREGATE][0].index

    def follow(self, ids: Iterable[int]) -> State | None:
        """The state after these ids from the start; None where one of them is not allowed."""
        state: State | None = self.start
        for id_ in ids:
            if state is None:
                return None
            state = state.next(id_)
        return state

    def finish(self, ids: Iterable[int]) -> Query:
        """The query that generated ids spell, cut short or not.

        Ids may begin with the decoder's start id (T5: `<pad>`) and end with pads. At the first id that is
        not allowed reading stops, and what is complete up to there counts.
        """
        state = self.start
        for id_ in ids:
            if state is self.start and id_ == self.vocabulary.pad:
                continue
            following = state.next(id_)
            if following is None:
                break
            state = following
        return state.fallback_query()

    def ways(self, thread: Thread) -> Iterator[Way]:
        """How a thread can go on, `eos` aside."""
        part, offset, depth = thread[:3]
        steps = part.spelling.steps(offset)
        if steps:
            yield part, depth, steps
        if part.spelling.complete(offset):
            number = depth + 1 if part.role in (Role.WHERE, Role.AND) else depth
            for follower in self._after(part.role, depth):
                yield follower, number, follower.spelling.steps(BEGIN)

    def _after(self, role: Role, depth: int) -> tuple[Part, ...]:
        if role is Role.OPERATOR:
            return (self._value,)
        last = depth == MOST_CONDITIONS if role is Role.VALUE else role is Role.FROM and not self._has_values
        return () if last else self._followers[role]


@lru_cache(REMEMBERED_HEADERS)
def _followers(vocabulary: Vocabulary, header: tuple[str, ...]) -> dict[Role, tuple[Part, ...]]:
    """What can follow each part of a query on this table, values aside."""

    def parts(role: Role, texts: dict[str, int]) -> tuple[Part, ...]:
        return tuple(Part(role, spelling(vocabulary, f" {text}"), index) for text, index in texts.items())

    names = _numbered(map(vocabulary.normalize, header))
    if not names:
        raise ValueError(f"header {list(header)!r}; expected at least one column with a name")
    aggregates = {name: number for number, name in enumerate(AGGREGATES) if name}
    operators = {name: OPERATORS.index(name) for name in OFFERED_OPERATORS}
    selected, columns = parts(Role.SELECTED, names), parts(Role.COLUMN, names)
    return {
        Role.BEGINNING: parts(Role.SELECT, {"SELECT": 0}),
        Role.SELECT: parts(Role.AGGREGATE, aggregates) + selected,
        Role.AGGREGATE: selected,
        Role.SELECTED: parts(Role.FROM, {"FROM table": 0}),
        Role.FROM: parts(Role.WHERE, {"WHERE": 0}),
        Role.WHERE: columns,
        Role.COLUMN: parts(Role.OPERATOR, operators),
        Role.VALUE: parts(Role.AND, {"AND": 0}),
        Role.AND: columns,
    }


def _numbered(names: Iterable[str]) -> dict[str, int]:
    """Each name that is not blank, with the number of the first column that has it."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(names):
        if name:
            numbers.setdefault(name, number)
    return numbers


class State:
    """All readings of one sequence of ids. Each state has at least one way on to a complete query."""

    __slots__ = ("_allowed", "_automaton", "_next", "_threads", "_ways", "ended")

    def __init__(self, automaton: QueryAutomaton, threads: tuple[Thread, ...], ended: bool = False) -> None:
        self._automaton = automaton
        self._threads = threads
        self._next: dict[int, State | None] = {}
        self._ways: list[tuple[Thread, list[Way]]] | None = None
        self._allowed: NDArray[np.int64] | None = None
        self.ended = ended
        """Whether the last id was `eos`."""

    @property
    def allowed(self) -> NDArray[np.int64]:
        """The ids that can come next, each once; none after the end."""
        if self._allowed is None:
            ids: set[int] = set()
            for _, ways in self._found_ways():
                ids.update(*(steps for _, _, steps in ways))
            if not self.ended and any(thread.ends_query for thread in self._threads):
                ids.add(self._automaton.vocabulary.eos)
            self._allowed = np.fromiter(ids, np.int64, len(ids))
        return self._allowed

    @property
    def query(self) -> Query | None:
        """The query that the ids spell: of several readings the one that `parse_query` prefers."""
        complete = [thread for thread in self._threads if thread.ends_query]
        return Reading(preferred(complete)).query() if complete else None

    def next(self, id_: int) -> State | None:
        """The state after one more id; None where it is not allowed."""
        if id_ not in self._next:
            ends = id_ == self._automaton.vocabulary.eos
            self._next[id_] = self._last() if ends else self._stepped(id_)
        return self._next[id_]

    def fallback_query(self) -> Query:
        """A query in any state: what is complete so far, without the condition that is not."""
        return self.query or finished(preferred(self._threads), self._automaton.first_column)

    def _found_ways(self) -> list[tuple[Thread, list[Way]]]:
        if self._ways is None:
            threads = () if self.ended else self._threads
            self._ways = [(thread, list(self._automaton.ways(thread))) for thread in threads]
        return self._ways

    def _last(self) -> State | None:
        complete = () if self.ended else tuple(thread for thread in self._threads if thread.ends_query)
        return State(self._automaton, complete, ended=True) if complete else None

    def _stepped(self, id_: int) -> State | None:
        threads: dict[tuple[Part, int, int], Thread] = {}
        for thread, ways in self._found_ways():
            for part, depth, steps in ways:
                for end in steps.get(id_, ()):
                    key, step = (part, end, depth), Thread(part, end, depth, id_, thread)
                    threads[key] = preferred((threads[key], step)) if key in threads else step
        return State(self._automaton, tuple(threads.values())) if threads else None
