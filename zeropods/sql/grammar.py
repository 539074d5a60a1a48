"""The grammar of a query's text over a tokenizer's pieces, for constrained decoding.

`SELECT [AGG ]COLUMN FROM table[ WHERE COLUMN OP VALUE[ AND COLUMN OP VALUE]...]`, where a column is
a name of the table's header and a value is a span of the question. Any segmentation of such a text
into pieces is accepted. A prefix may have several readings (after `New York and`, the value can go
on or another condition can begin): all of those that differ in how they can go on are kept. The
idea is PICARD's (Scholak et al. 2021, arXiv 2109.05093), which parses the text anew at each step;
here states are created when they are first reached, and are then remembered. `parse_query` reads
what a whole text means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeropods.sql.linking import INSIDE_A_NUMBER, Links
from zeropods.sql.query import AGGREGATES, OPERATORS, Query, parse_query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The pieces of a SentencePiece tokenizer, indexed by what they spell.

SPACE = "▁"
"""What SentencePiece writes for a space (U+2581)."""
UNKNOWN = "\ufffc"
"""What `<unk>` spells here: it stands for a run of characters that have no piece."""


class Vocabulary:
    """The pieces of a tokenizer, and an index of those that can begin a given text.

    A piece that has a space anywhere but in front is left out: T5's pre-tokenizer splits before
    every space, so no text is ever encoded with such a piece (T5's own vocabulary has none).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Index the pieces of a fast tokenizer of T5's kind. Takes about 0.2 s: build it once.

        Raises:
            ValueError: no piece is a space alone, so that this is no SentencePiece tokenizer.
        """
        backend = tokenizer.backend_tokenizer
        self.eos = tokenizer.eos_token_id
        self.pad = tokenizer.pad_token_id
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.pieces = [token.replace(SPACE, " ") for token in tokens]
        """What each id spells."""
        self.pieces[tokenizer.unk_token_id] = UNKNOWN
        self._normalizer = backend.normalizer
        self._index: dict[str, tuple[int, ...]] = {}
        """Ids by folded piece; no ids for a text that only begins longer pieces."""
        special_ids = {self.eos, self.pad, *backend.get_added_tokens_decoder()}
        # Unlike the other special tokens, `<unk>` is a part of texts.
        special_ids.discard(tokenizer.unk_token_id)
        for id_, piece in enumerate(self.pieces):
            is_one_word = piece != "" and " " not in piece[1:]
            if is_one_word and id_ not in special_ids:
                self._add(id_, fold(piece))
        self.longest = max(map(len, self._index), default=0)
        """Number of characters of the longest piece."""
        if not self._index.get(" "):
            raise ValueError(
                "vocabulary: no piece '▁'; expected the pieces of a SentencePiece tokenizer"
            )
        characters = {piece for piece in self.pieces if len(piece) == 1} - {UNKNOWN}
        escaped = re.escape("".join(sorted(characters)))
        self.unknown = re.compile(f"[^{escaped}]+")
        """Pattern of a run of characters that are encoded as `<unk>`."""
        self.characters = re.compile(f"{self.unknown.pattern}|.")
        """Pattern of what is spelled by one character: such a run, or any other character."""

    def _add(self, id_: int, folded: str) -> None:
        """Add a piece to the index, and every text that begins it, so that a search knows when no
        longer piece can follow."""
        self._index[folded] = (*self._index.get(folded, ()), id_)
        for end in range(1, len(folded)):
            self._index.setdefault(folded[:end], ())

    def normalize(self, text: str) -> str:
        """The text as the tokenizer sees it: normal form, single spaces, none at the ends."""
        if self._normalizer:
            text = self._normalizer.normalize_str(text)
        return " ".join(text.replace(SPACE, " ").split())

    def spelled(self, text: str) -> str:
        """A normalized text as pieces spell it: with `UNKNOWN` for each run without pieces."""
        return self.unknown.sub(UNKNOWN, text)

    def prefixes(self, folded: str, start: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The pieces that begin at `start` of a folded text, in any letter case, shortest first.

        Yields:
            The ids of the pieces that spell the same text, and where that text ends.
        """
        for end in range(start + 1, len(folded) + 1):
            ids = self._index.get(folded[start:end])
            if ids is None:
                # Neither is this text a piece, nor does it begin a longer one.
                return
            if ids:
                yield ids, end


def fold(text: str) -> str:
    """The text in lower case, at the same length.

    A character whose lower case is longer (`İ`) stays as it is.
    """
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    characters = []
    for character in text:
        folded = character.lower()
        characters.append(folded if len(folded) == 1 else character)
    return "".join(characters)


# Which pieces can come next while a name, or a value from the question, is being spelled.

Steps = dict[int, tuple[int, ...]]
"""The ids that can come next, each with the offsets in the spelled text to which it may lead."""

BEGIN = 0
"""The offset at which every spelling begins: before its leading space."""
AFTER_SPACE = -1
"""The offset in a `ValueSpelling` where the space is spelled and the value's first character is not
yet."""

REMEMBERED_SPELLINGS = 8_192
"""Number of spellings kept: WikiSQL's 18,585 train tables share most of their names (`Year`,
`Player`)."""

_INSIDE = rf"(?<=[^\W_])(?=[^\W_])|{INSIDE_A_NUMBER}"
"""A place inside a word or a number."""
_START = re.compile(rf"(?!{_INSIDE})(?=\S)")
"""A place where a value can start."""
_END = re.compile(rf"(?<=\S)(?:(?<=\d)(?=[^\W\d_])|(?!{_INSIDE}))")
"""A place where a value can end: after a digit also if a letter follows, which begins a unit."""


class Spelling:
    """A text that can be spelled in one way, letter case included, by any sequence of pieces."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.vocabulary = vocabulary
        self.text = text
        self.folded = fold(text)
        self._steps: dict[int, Steps] = {}

    def steps(self, offset: int) -> Steps:
        """The steps that can follow at this offset, which are remembered; empty at the end of the
        text."""
        steps = self._steps.get(offset)
        if steps is None:
            steps = self._steps_from(offset)
            self._steps[offset] = steps
        return steps

    def may_end(self, offset: int) -> bool:
        """Whether what is spelled up to this offset is a whole name or value."""
        return offset == len(self.text)

    def _steps_from(self, offset: int) -> Steps:
        """What `steps` returns, without looking it up."""
        steps: Steps = {}
        for ids, end in self.vocabulary.prefixes(self.folded, offset):
            for id_ in ids:
                if self.vocabulary.pieces[id_] == self.text[offset:end]:
                    steps[id_] = (end,)
        return steps


class ValueSpelling(Spelling):
    """A space, then any span of the question, in any letter case.

    After NFKC and lower-casing, every condition value of WikiSQL is a substring of its question. A
    span never begins or ends inside a word or number, except that a unit may follow directly
    (`2.02` in `2.02m`). Of 88,274 values in train and dev this loses 4, all of them mistakes
    (`block i` for `the block is I`).
    """

    def __init__(self, vocabulary: Vocabulary, question: str) -> None:
        offsets: dict[int, int] = {}
        """The offset in the spelled text of each place in the question. A place inside a run of
        unknown characters has none: the run is spelled by one character, and a value cannot start
        or end within it."""
        text = ""
        for match in vocabulary.characters.finditer(question):
            offsets[match.start()] = len(text)
            text += vocabulary.spelled(match[0])
        offsets[len(question)] = len(text)
        super().__init__(vocabulary, text)
        starts = [match.start() for match in _START.finditer(question)]
        ends = [match.start() for match in _END.finditer(question)]
        self.starts = [offsets[start] for start in starts if start in offsets]
        self._ends = {offsets[end] for end in ends if end in offsets}

    def may_end(self, offset: int) -> bool:
        return offset in self._ends

    def _steps_from(self, offset: int) -> Steps:
        steps: Steps = {}
        for ids, end in self._pieces_from(offset):
            for id_ in ids:
                steps[id_] = (*steps.get(id_, ()), end)
        return steps

    def _pieces_from(self, offset: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The pieces that can come at an offset, each as its ids and the offset to which they
        lead."""
        if offset == BEGIN:
            yield from self._first_pieces()
        elif offset == AFTER_SPACE:
            for start in self.starts:
                yield from self.vocabulary.prefixes(self.folded, start)
        else:
            yield from self.vocabulary.prefixes(self.folded, offset)

    def _first_pieces(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """`▁` alone, and pieces such as `▁New` wherever a value can start, also without a space in
        the question."""
        for ids, _ in self.vocabulary.prefixes(" ", 0):
            yield ids, AFTER_SPACE
        for start in self.starts:
            # The space that the piece begins with is put in front; no piece is longer than this.
            folded = " " + self.folded[start : start + self.vocabulary.longest]
            for ids, end in self.vocabulary.prefixes(folded, 0):
                is_more_than_the_space = end > 1
                if is_more_than_the_space:
                    # The space is no part of this spelling's text, so it does not count.
                    yield ids, start + end - 1


class CellSpelling(ValueSpelling):
    """A space, then the whole of a cell that the question quotes, in any letter case."""

    def __init__(self, vocabulary: Vocabulary, cell: str) -> None:
        super().__init__(vocabulary, cell)
        self.starts = [0]
        self._ends = {len(self.text)}


spelling = lru_cache(REMEMBERED_SPELLINGS)(Spelling)
"""The spelling of a keyword or of a column's name, shared by all tables that have it."""


# Where a sequence of pieces can stand in a query.


Role = Literal[
    "beginning",
    "select",
    "aggregate",
    "selected",
    "from",
    "where",
    "column",
    "operator",
    "value",
    "and",
]
"""The role that a part of the text has in the query."""


@dataclass(frozen=True, eq=False)
class Part:
    """A keyword, a name or a value, with its leading space. No piece extends from one part into the
    next. Parts are compared by identity, since two columns' operators are told apart by it."""

    role: Role
    spelling: Spelling


class Reading(NamedTuple):
    """A place in a query to which the pieces so far may have led."""

    part: Part
    end: int
    """The offset in the part's spelling."""
    conditions: int
    """Number of conditions begun so far."""


MOST_CONDITIONS = 4
"""Maximum number of conditions in a query, which is WikiSQL's own limit."""
OFFERED_OPERATORS = OPERATORS[:3]
"""The operators that can be written: none of WikiSQL's 64,776 train and dev queries has the
operator `OP`."""
REMEMBERED_HEADERS = 1_024
"""Number of headers whose parts are kept: questions about the same table mostly come together."""
_BEFORE_KEYWORD = re.compile(" (?=(?:WHERE|AND)(?: |$))")


class QueryAutomaton:
    """Accepts the texts of all queries on one table with values from one question."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        header: Sequence[str],
        question: str,
        links: Links | None = None,
    ) -> None:
        """Create the start state; the other states are created when they are reached.

        Columns without a name cannot be spelled, and of equal names the first one is meant.

        Args:
            header: the names of the table's columns, in order.
            links: what the question quotes from the table. Conditions then compare these columns
                only, and a column that has quoted cells with one of them only. Not given, any
                column is compared with any span of the question.

        Raises:
            ValueError: no column has a name.
        """
        self.vocabulary = vocabulary
        self._names = [vocabulary.spelled(vocabulary.normalize(name)) for name in header]
        self._question = vocabulary.normalize(question)
        unique_names = dict.fromkeys(name for name in self._names if name)
        self._followers = _followers(vocabulary, tuple(unique_names))
        values = ValueSpelling(vocabulary, self._question)
        self._value = Part("value", values)
        self._has_values = bool(values.starts)
        self._operators: dict[Part, tuple[Part, ...]] = {}
        """The operators that can follow each linked column; empty without links."""
        self._values: dict[Part, tuple[Part, ...]] = {}
        """The values that can follow each operator of a linked column."""
        if links is not None:
            self._link(links)
        beginning = Part("beginning", spelling(vocabulary, ""))
        self.start = GrammarState(self, {Reading(beginning, BEGIN, 0)})

    def follow(self, ids: Iterable[int]) -> GrammarState | None:
        """The state that these ids lead to from the start; None if one of them is not allowed."""
        state: GrammarState | None = self.start
        for id_ in ids:
            if state is None:
                return None
            state = state.next(id_)
        return state

    def finish(self, ids: Iterable[int]) -> Query:
        """The query that generated ids spell, whether or not they were cut short.

        Ids may begin with the decoder's start id (T5: `<pad>`) and end with pads. Reading stops at
        the first id that is not allowed; what is complete up to there counts, and an incomplete
        condition is dropped.
        """
        text, ends_of_queries = self._spelled_text(ids)
        # The longest first: the more of the text is read, the better.
        candidates = []
        for cut in _cuts(text):
            # A value may hold AND, and a text cut there would be read as if its last condition
            # belonged to that value: only a cut where a whole query ends is one.
            if cut in ends_of_queries:
                candidates.append(text[:cut])
        # If it was cut short within the selection, it may at least name a column, or else an
        # aggregate.
        candidates.append(f"{text} FROM table")
        candidates.append(self._shortest_query(text))
        # A column without a name must be read nowhere. Its stand-in occurs in no text, in which a
        # run of unknown characters is spelled by one `UNKNOWN`.
        names = [name or UNKNOWN * 2 for name in self._names]
        for candidate in candidates:
            query = parse_query(candidate, names)
            if query is not None:
                return self._with_values_of_question(query)
        # The last candidate is made of a name of the header, so it is always read.
        raise AssertionError(f"{candidates[-1]!r} is not read as a query")

    def _spelled_text(self, ids: Iterable[int]) -> tuple[str, set[int]]:
        """The text of the ids up to the first that is not allowed, and the lengths at which the
        text so far is a whole query."""
        state = self.start
        text = ""
        ends = set[int]()
        for id_ in ids:
            is_leading_pad = state is self.start and id_ == self.vocabulary.pad
            if is_leading_pad:
                continue
            next_state = state.next(id_)
            if next_state is None or next_state.ended:
                break
            state = next_state
            text += self.vocabulary.pieces[id_]
            if state.is_complete:
                ends.add(len(text))
        return text, ends

    def _shortest_query(self, text: str) -> str:
        """A query of the first named column, with the aggregate that a text begins with, if any."""
        first_name = next(name for name in self._names if name)
        for aggregate in AGGREGATES:
            if aggregate and text.startswith(f" SELECT {aggregate}"):
                return f"SELECT {aggregate} {first_name} FROM table"
        return f"SELECT {first_name} FROM table"

    def _with_values_of_question(self, query: Query) -> Query:
        """The query with the question's own characters in place of each `<unk>` in its values."""
        conditions = []
        for condition in query.conds:
            conditions.append(condition._replace(value=self._restored(condition.value)))
        return Query(query.sel, query.agg, tuple(conditions))

    def _restored(self, value: str) -> str:
        """The value with the question's own characters in place of each `<unk>`.

        They are left out where the question does not hold the value, which may be a cell's.
        """
        # Whether a character is unknown depends on its case: `É` may have a piece, and `é` none.
        unknown_run = f"((?-i:{self.vocabulary.unknown.pattern}))"
        pattern = unknown_run.join(re.escape(part) for part in value.split(UNKNOWN))
        match = re.search(pattern, self._question, re.IGNORECASE)
        runs = iter(match.groups() if match else ())
        return re.sub(UNKNOWN, lambda _: next(runs, ""), value)

    def _link(self, links: Links) -> None:
        """Let conditions compare linked columns only, with the cells that the question quotes:
        fills `_operators` and `_values`."""
        for column in self._followers["where"]:
            name = column.spelling.text.removeprefix(" ")
            cells = links.get(self._names.index(name))
            if cells is None:
                continue  # This column is not linked.
            quoted = tuple(self._cell(cell) for cell in cells)
            # A linked column without quoted cells, one of numbers, is compared with any span.
            values = quoted or (self._value,)
            operators = []
            for operator_of_all_columns in self._followers["column"]:
                # A new part for this column alone, by which `following` finds its values.
                operator = Part("operator", operator_of_all_columns.spelling)
                operators.append(operator)
                self._values[operator] = values
            self._operators[column] = tuple(operators)

    def _cell(self, cell: str) -> Part:
        """A cell that the question quotes, as a value."""
        return Part("value", CellSpelling(self.vocabulary, self.vocabulary.normalize(cell)))

    def following(self, reading: Reading) -> tuple[Part, ...]:
        """The parts that can begin where a reading's part ends."""
        part = reading.part
        role = part.role
        if role == "operator":
            # A value is of this question; all other parts belong to the table.
            return self._values.get(part, (self._value,))
        # `_operators` is empty without links, and where no linked column has a name: then a
        # condition may compare any column.
        if self._operators and role == "column":
            return self._operators[part]
        if self._operators and role in ("where", "and"):
            return tuple(self._operators)
        has_all_conditions = role == "value" and reading.conditions == MOST_CONDITIONS
        # An empty question has no value to compare with.
        can_have_no_condition = role == "from" and not self._has_values
        if has_all_conditions or can_have_no_condition:
            return ()
        return self._followers[role]


def _cuts(text: str) -> list[int]:
    """Where a text may be cut so that whole conditions are left: at its end, then before each
    keyword, last first."""
    before_keywords = [match.start() for match in _BEFORE_KEYWORD.finditer(text)]
    return [len(text), *reversed(before_keywords)]


@lru_cache(REMEMBERED_HEADERS)
def _followers(vocabulary: Vocabulary, names: tuple[str, ...]) -> dict[Role, tuple[Part, ...]]:
    """The parts that can follow each role in a query on a table with these columns.

    The role `operator` is missing: values follow it, and they belong to a question.

    Raises:
        ValueError: there is no name.
    """

    def parts(role: Role, texts: Iterable[str]) -> tuple[Part, ...]:
        parts_of_role = []
        for text in texts:
            # A keyword with a character that no piece has is not offered: a small vocabulary may
            # lack the X of MAX.
            if vocabulary.spelled(text) == text:
                parts_of_role.append(Part(role, spelling(vocabulary, f" {text}")))
        return tuple(parts_of_role)

    if not names:
        raise ValueError("a header without a name; expected at least one column with a name")
    selected = parts("selected", names)
    columns = parts("column", names)
    aggregates = parts("aggregate", [name for name in AGGREGATES if name])
    operators = parts("operator", OFFERED_OPERATORS)
    return {
        "beginning": parts("select", ["SELECT"]),
        "select": aggregates + selected,
        "aggregate": selected,
        "selected": parts("from", ["FROM table"]),
        "from": parts("where", ["WHERE"]) if operators else (),
        "where": columns,
        "column": operators,
        "value": parts("and", ["AND"]),
        "and": columns,
    }


class _Continuation(NamedTuple):
    """How one reading can go on."""

    part: Part
    """The part to which the next piece would belong."""
    steps: Steps
    conditions: int
    """Number of conditions begun, that of the part included."""


class GrammarState:
    """All readings of one sequence of ids. From each state, at least one way leads to a complete
    query. What has been worked out of a state is remembered with it."""

    def __init__(
        self, automaton: QueryAutomaton, readings: set[Reading], ended: bool = False
    ) -> None:
        self._automaton = automaton
        self._readings = readings
        self._next: dict[int, GrammarState | None] = {}
        """What `next` has returned so far, by id."""
        self.ended = ended
        """Whether the last id was `eos`."""

    @cached_property
    def allowed(self) -> NDArray[np.int64]:
        """The ids that can come next, each once; none after the end."""
        ids = set[int]()
        for continuation in self._continuations:
            ids.update(continuation.steps)
        if self.is_complete and not self.ended:
            ids.add(self._automaton.vocabulary.eos)
        return np.fromiter(ids, np.int64, len(ids))

    @cached_property
    def is_complete(self) -> bool:
        """Whether the ids spell a whole query."""
        for reading in self._readings:
            ends_a_query = reading.part.role in ("from", "value")
            if ends_a_query and reading.part.spelling.may_end(reading.end):
                return True
        return False

    def next(self, id_: int) -> GrammarState | None:
        """The state after one more id; None if that id is not allowed."""
        if id_ not in self._next:
            self._next[id_] = self._state_after(id_)
        return self._next[id_]

    def _state_after(self, id_: int) -> GrammarState | None:
        """What `next` returns, without looking it up."""
        if id_ == self._automaton.vocabulary.eos:
            if self.ended or not self.is_complete:
                return None
            return GrammarState(self._automaton, self._readings, ended=True)
        readings = set[Reading]()
        for continuation in self._continuations:
            for end in continuation.steps.get(id_, ()):
                readings.add(Reading(continuation.part, end, continuation.conditions))
        return GrammarState(self._automaton, readings) if readings else None

    @cached_property
    def _continuations(self) -> list[_Continuation]:
        """How the readings can go on, `eos` aside."""
        continuations: list[_Continuation] = []
        if self.ended:
            return continuations
        for reading in self._readings:
            part = reading.part
            steps = part.spelling.steps(reading.end)
            if steps:
                continuations.append(_Continuation(part, steps, reading.conditions))
            if part.spelling.may_end(reading.end):
                for following in self._automaton.following(reading):
                    begins_condition = following.role == "column"
                    conditions = reading.conditions + 1 if begins_condition else reading.conditions
                    steps = following.spelling.steps(BEGIN)
                    continuations.append(_Continuation(following, steps, conditions))
        return continuations
