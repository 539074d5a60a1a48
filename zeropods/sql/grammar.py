"""The grammar of a query's text over a tokenizer's pieces, for constrained decoding."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The pieces of a SentencePiece tokenizer, indexed by what they spell.

SPACE = "▁"
"""What SentencePiece writes for a space (U+2581)."""


class Vocabulary:
    """Which pieces begin a given text, with letter case or without.

    A piece that has a space anywhere but in front is left out: with T5's pre-tokenizer, which cuts before
    every space, no text is ever encoded with one (T5's own vocabulary has none).
    """

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        eos: int,
        unk: int,
        pad: int,
        special: Collection[int] = (),
        normalizer: Callable[[str], str] | None = None,
    ) -> None:
        """Index the pieces.

        Args:
            pieces: the spelling of each id, `▁` for a space.
            special: ids that spell nothing; `eos`, `unk` and `pad` are among them in any case.
            normalizer: what the tokenizer does to a text first; NFKC by default.
        """
        self.eos, self.unk, self.pad = eos, unk, pad
        silent = {eos, unk, pad, *special}
        self.pieces = [piece.replace(SPACE, " ") for piece in pieces]
        self._normalizer = normalizer or (lambda text: unicodedata.normalize("NFKC", text))
        self._index: dict[str, tuple[int, ...]] = {}
        """Ids by folded piece; no ids for a text that only begins longer pieces."""
        for id_, piece in enumerate(self.pieces):
            if id_ not in silent and piece and " " not in piece[1:]:
                folded = fold(piece)
                self._index[folded] = (*self._index.get(folded, ()), id_)
                for end in range(1, len(folded)):
                    self._index.setdefault(folded[:end], ())
        self._known = {self.pieces[id_] for ids in self._index.values() for id_ in ids}
        self.longest = max(map(len, self._index), default=0)
        if " " not in self._known:
            raise ValueError("vocabulary: no piece '▁'; expected the pieces of a SentencePiece tokenizer")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """The vocabulary of a fast tokenizer of T5's kind. Takes about 0.2 s: build it once."""
        backend = tokenizer.backend_tokenizer
        return cls(
            tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))),
            eos=tokenizer.eos_token_id,
            unk=tokenizer.unk_token_id,
            pad=tokenizer.pad_token_id,
            special=backend.get_added_tokens_decoder().keys(),
            normalizer=backend.normalizer.normalize_str if backend.normalizer else None,
        )

    def normalize(self, text: str) -> str:
        """The text as the tokenizer sees it: normal form, single spaces, none at the ends."""
        return " ".join(self._normalizer(text).replace(SPACE, " ").split())

    def prefixes(self, folded: str, start: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The pieces that stand at `start` of a folded text, whatever their case: (ids, end) by length."""
        for end in range(start + 1, len(folded) + 1):
            ids = self._index.get(folded[start:end])
            if ids is None:
                return
            if ids:
                yield ids, end

    def unknown(self, character: str) -> str | None:
        """The character, or its other case, that is encoded as `<unk>`; None where each has a piece.

        T5 has pieces for `š` but none for `Š`: there `<unk>` can only mean the upper case.
        """
        for variant in (character, character.upper(), character.lower()):
            if len(variant) == 1 and variant not in self._known:
                return variant
        return None


def fold(text: str) -> str:
    """Lower case of the same length: a character whose lower case is longer (`İ`) stays."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


# Which pieces can come next while a name, or a value of the question, is being spelled.

Steps = dict[int, tuple[int, ...]]
"""Each id that can come next, and the offsets to which it may lead."""

BEGIN = 0
"""The offset at which every spelling begins: before its leading space."""
AFTER_SPACE = -1
"""The offset in a `ValueSpelling` where the space is spelled and the value's first character is not."""

REMEMBERED = 8_192
"""Names kept spelled: WikiSQL's 18,585 train tables share most of theirs (`Year`, `Player`)."""

_CUT = r"(?<=[^\W_])(?=[^\W_])|(?<=\d[.,])(?=\d)|(?<=\d)(?=[.,]\d)"
"""Inside a word, or beside the point or comma of a number (`7.14`, `5,000`)."""
_START = re.compile(rf"(?!{_CUT})(?=\S)")
_END = re.compile(rf"(?<=\S)(?:(?<=\d)(?=[^\W\d_])|(?!{_CUT}))")


class Spelling:
    """A text that can be spelled in one way, letter case included, by any sequence of pieces."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.vocabulary = vocabulary
        self.text = text
        self.folded = fold(text)
        self._steps: dict[int, Steps] = {}

    def steps(self, offset: int) -> Steps:
        """What can come at this offset; empty at the end of the text."""
        steps = self._steps.get(offset)
        if steps is None:
            steps = self._steps[offset] = self._found(offset)
        return steps

    def complete(self, offset: int) -> bool:
        """Whether the spelling may stop here."""
        return offset == len(self.text)

    def unknown(self, offset: int) -> str | None:
        """What `<unk>` would mean here; None where it cannot stand."""
        character = self.text[offset]
        return character if self.vocabulary.unknown(character) == character else None

    def _found(self, offset: int) -> Steps:
        return self._at(offset)

    def _at(self, offset: int) -> Steps:
        """The pieces that stand at an offset of the text, and `<unk>` where it may.

        T5's tokenizer makes one `<unk>` of neighbouring unknown characters, so it may cover several.
        """
        steps: Steps = {}
        for ids, end in self.vocabulary.prefixes(self.folded, offset):
            steps.update((id_, (end,)) for id_ in ids if self._fits(id_, offset, end))
        end = offset
        while end < len(self.text) and self.unknown(end) is not None:
            end += 1
        if end > offset:
            steps[self.vocabulary.unk] = tuple(range(offset + 1, end + 1))
        return steps

    def _fits(self, id_: int, offset: int, end: int) -> bool:
        """Whether a piece that stands there in some letter case may be written."""
        return self.vocabulary.pieces[id_] == self.text[offset:end]


class ValueSpelling(Spelling):
    """A space, then any span of the question, in any letter case.

    After NFKC and lower case every condition value of WikiSQL is a substring of its question. A span begins
    and ends outside words and numbers, save that a unit may follow it at once (`2.02` in `2.02m`). Of 88,274
    values in train and dev this loses 4, all of them mistakes (`block i` for `the block is I`).
    """

    def __init__(self, vocabulary: Vocabulary, question: str) -> None:
        super().__init__(vocabulary, vocabulary.normalize(question))
        self.starts = [match.start() for match in _START.finditer(self.text)]
        self._ends = {match.start() for match in _END.finditer(self.text)}

    def complete(self, offset: int) -> bool:
        return offset in self._ends

    def unknown(self, offset: int) -> str | None:
        return self.vocabulary.unknown(self.text[offset])

    def spelled(self, id_: int, start: int, end: int) -> str:
        """The text of a step between two offsets: the piece as it is, or for `<unk>` the question's text.

        Where the value begins with `<unk>`, so that only its end is known, it is as long as it can be.
        """
        if id_ != self.vocabulary.unk:
            return self.vocabulary.pieces[id_]
        if start == AFTER_SPACE:
            start = next(first for first in self.starts if end in self._at(first).get(id_, ()))
        return "".join(self.unknown(offset) or "" for offset in range(start, end))

    def _found(self, offset: int) -> Steps:
        if offset == BEGIN:
            return self._entered()
        if offset == AFTER_SPACE:
            return _merged(map(self._at, self.starts))
        return self._at(offset)

    def _fits(self, id_: int, offset: int, end: int) -> bool:
        return True

    def _entered(self) -> Steps:
        """`▁` alone, and pieces such as `▁New` wherever a value can start: the question need not have a space there."""
        entered: list[Steps] = [dict.fromkeys(ids, (AFTER_SPACE,)) for ids, _ in self.vocabulary.prefixes(" ", 0)]
        for start in self.starts:
            folded = " " + self.folded[start : start + self.vocabulary.longest]
            pieces = self.vocabulary.prefixes(folded, 0)
            entered += [dict.fromkeys(ids, (start + end - 1,)) for ids, end in pieces if end > 1]
        return _merged(entered)


@lru_cache(REMEMBERED)
def spelling(vocabulary: Vocabulary, text: str) -> Spelling:
    """The spelling of a keyword or of a column's name, shared by all tables that have it."""
    return Spelling(vocabulary, text)


def _merged(several: Iterable[Steps]) -> Steps:
    merged: Steps = {}
    for steps in several:
        for id_, ends in steps.items():
            merged[id_] = merged[id_] + ends if id_ in merged else ends
    return merged


# Readings of a sequence of pieces: the query that each of them spells.


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


class Reading(NamedTuple):
    """What the pieces so far say, as one way of taking them has it."""

    parts: tuple[Part, ...]
    """The parts begun so far; the last may be unfinished."""
    end: int
    """The offset in the last part's spelling to which the pieces lead."""
    values: tuple[str, ...] = ()
    """The value of each condition, as far as it is spelled."""
    depth: int = 0
    """Number of conditions that were begun."""

    @property
    def part(self) -> Part:
        return self.parts[-1]

    @property
    def ends_part(self) -> bool:
        return self.part.spelling.complete(self.end)

    @property
    def ends_query(self) -> bool:
        return self.part.role in (Role.FROM, Role.VALUE) and self.ends_part

    def then(self, part: Part, id_: int, end: int) -> Reading:
        """The reading after one more piece, which belongs to a part and leads to an offset in it."""
        begins, values = part is not self.part, self.values
        depth = self.depth + (begins and part.role is Role.COLUMN)
        if isinstance(part.spelling, ValueSpelling) and end != AFTER_SPACE:
            start = AFTER_SPACE if begins else self.end
            spelled = part.spelling.spelled(id_, start, end)
            values = (*values, spelled.lstrip()) if len(values) < depth else (*values[:-1], values[-1] + spelled)
        return Reading((*self.parts, part) if begins else self.parts, end, values, depth)

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts the preferred reading first, in `parse_query`'s order.

        That is: most conditions, no aggregate, longest column names, shortest values. Only what `<unk>`
        covers is not seen in the text: there the longer value comes first.
        """
        names = zip(self._all(Role.COLUMN), self.values, strict=False)
        conditions = [(-_words(column), len(value.split()), -len(value)) for column, value in names]
        selected = sum(map(_words, self._all(Role.SELECTED)))
        return -len(conditions), bool(self._all(Role.AGGREGATE)), -selected, conditions

    def query(self, selected: int) -> Query:
        """What is complete of the query, with column `selected` where none is named yet."""
        cut = self.part.role is Role.VALUE and not self.ends_part
        values = self.values[: self.depth - 1] if cut else self.values
        conditions = zip(self._all(Role.COLUMN), self._all(Role.OPERATOR), values, strict=False)
        column, aggregate = self._all(Role.SELECTED), self._all(Role.AGGREGATE)
        return Query(
            column[0].index if column else selected,
            aggregate[0].index if aggregate else 0,
            tuple(Condition(column.index, operator.index, value) for column, operator, value in conditions),
        )

    def _all(self, role: Role) -> list[Part]:
        return [part for part in self.parts if part.role is role]


def preferred(readings: Sequence[Reading]) -> Reading:
    """The preferred reading; the first of equals."""
    return min(readings, key=lambda reading: reading.rank) if len(readings) > 1 else readings[0]


def _words(part: Part) -> int:
    return len(part.spelling.text.split())


# The grammar of a query's text over a tokenizer's pieces.
#
# `SELECT [AGG ]COLUMN FROM table[ WHERE COLUMN OP VALUE[ AND COLUMN OP VALUE]...]`, where a column is a name of
# the table's header and a value is a span of the question. Any segmentation of such a text into pieces is
# accepted. A prefix may have several readings (after `New York and` a value can go on, or another condition
# begin): all are kept. The idea is PICARD's (Scholak et al. 2021, arXiv 2109.05093), which parses the text anew
# at each step; here states are made when they are first reached, and remembered.

MOST_CONDITIONS = 4
"""WikiSQL's own limit."""
OFFERED_OPERATORS = ("=", ">", "<")
"""None of WikiSQL's 64,776 train and dev queries has the operator `OP`."""
REMEMBERED_HEADERS = 1_024
"""Questions about the same table mostly come together."""


class QueryAutomaton:
    """The texts of all queries on one table with values from one question."""

    def __init__(self, vocabulary: Vocabulary, header: Sequence[str], question: str) -> None:
        """Start an automaton; its states come later.

        Columns without a name cannot be spelled, and of equal names the first is meant. `ValueError` where
        no column has a name.
        """
        self.vocabulary = vocabulary
        self._followers = _followers(vocabulary, tuple(header))
        self._value = Part(Role.VALUE, values := ValueSpelling(vocabulary, question))
        self._has_values = bool(values.starts)
        beginning = Part(Role.BEGINNING, spelling(vocabulary, ""))
        self.start = GrammarState(self, (Reading((beginning,), BEGIN),))

    @property
    def first_column(self) -> int:
        """The first column that has a name."""
        return self._followers[Role.AGGREGATE][0].index

    def follow(self, ids: Iterable[int]) -> GrammarState | None:
        """The state after these ids from the start; None where one of them is not allowed."""
        state: GrammarState | None = self.start
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

    def ways(self, reading: Reading) -> Iterator[tuple[Part, Steps]]:
        """How a reading can go on, `eos` aside: the part that a piece would belong to, and the pieces."""
        steps = reading.part.spelling.steps(reading.end)
        if steps:
            yield reading.part, steps
        if reading.ends_part:
            for follower in self._after(reading):
                yield follower, follower.spelling.steps(BEGIN)

    def _after(self, reading: Reading) -> tuple[Part, ...]:
        role = reading.part.role
        if role is Role.OPERATOR:
            return (self._value,)
        if (role is Role.VALUE and reading.depth == MOST_CONDITIONS) or (role is Role.FROM and not self._has_values):
            return ()
        return self._followers[role]


@lru_cache(REMEMBERED_HEADERS)
def _followers(vocabulary: Vocabulary, header: tuple[str, ...]) -> dict[Role, tuple[Part, ...]]:
    """What can follow each part of a query on this table, values aside."""

    def parts(role: Role, texts: dict[str, int]) -> tuple[Part, ...]:
        return tuple(Part(role, spelling(vocabulary, f" {text}"), index) for text, index in texts.items())

    names: dict[str, int] = {}
    for number, name in enumerate(map(vocabulary.normalize, header)):
        if name:
            names.setdefault(name, number)
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


class GrammarState:
    """All readings of one sequence of ids. Each state has at least one way on to a complete query."""

    def __init__(self, automaton: QueryAutomaton, readings: tuple[Reading, ...], ended: bool = False) -> None:
        self._automaton = automaton
        self._readings = readings
        self._next: dict[int, GrammarState | None] = {}
        self.ended = ended
        """Whether the last id was `eos`."""

    @cached_property
    def allowed(self) -> NDArray[np.int64]:
        """The ids that can come next, each once; none after the end."""
        ids: set[int] = set().union(*(steps for _, _, steps in self._ways))
        if not self.ended and self._complete:
            ids.add(self._automaton.vocabulary.eos)
        return np.fromiter(ids, np.int64, len(ids))

    @property
    def query(self) -> Query | None:
        """The query that the ids spell: of several readings the one that `parse_query` prefers."""
        return preferred(self._complete).query(self._automaton.first_column) if self._complete else None

    def next(self, id_: int) -> GrammarState | None:
        """The state after one more id; None where it is not allowed."""
        if id_ not in self._next:
            self._next[id_] = self._after(id_)
        return self._next[id_]

    def fallback_query(self) -> Query:
        """A query in any state: what is complete so far, without the condition that is not."""
        return self.query or preferred(self._readings).query(self._automaton.first_column)

    @cached_property
    def _ways(self) -> list[tuple[Reading, Part, Steps]]:
        readings = () if self.ended else self._readings
        return [(reading, part, steps) for reading in readings for part, steps in self._automaton.ways(reading)]

    @cached_property
    def _complete(self) -> tuple[Reading, ...]:
        """The readings that are a whole query."""
        return tuple(reading for reading in self._readings if reading.ends_query)

    def _after(self, id_: int) -> GrammarState | None:
        if id_ == self._automaton.vocabulary.eos:
            going_on = self._complete and not self.ended
            return GrammarState(self._automaton, self._complete, ended=True) if going_on else None
        readings: dict[tuple[Part, int, int], Reading] = {}
        for reading, part, steps in self._ways:
            for end in steps.get(id_, ()):
                step = reading.then(part, id_, end)
                key = (part, end, step.depth)
                readings[key] = preferred((readings[key], step)) if key in readings else step
        return GrammarState(self._automaton, tuple(readings.values())) if readings else None
