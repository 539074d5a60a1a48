"""The grammar of a query's text over a tokenizer's pieces, for constrained decoding.

`SELECT [AGG ]COLUMN FROM table[ WHERE COLUMN OP VALUE[ AND COLUMN OP VALUE]...]`, where a column is a name of the
table's header and a value is a span of the question. Any segmentation of such a text into pieces is accepted. A prefix
may have several readings (after `New York and`, the value can go on or another condition can begin): all of those that
differ in how they can go on are kept. The idea is PICARD's (Scholak et al. 2021, arXiv 2109.05093), which parses the
text anew at each step; here states are created when they are first reached, and are then remembered. `parse_query`
reads what a whole text means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeropods.sql.query import AGGREGATES, OPERATORS, Query, parse_query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The pieces of a SentencePiece tokenizer, indexed by what they spell.

SPACE = "▁"
"""What SentencePiece writes for a space (U+2581)."""
UNKNOWN = "\ufffc"
"""What `<unk>` spells here: it stands for a run of characters that have no piece."""


class Vocabulary:
    """An index of which pieces begin a given text, with regard to letter case or without.

    A piece that has a space anywhere but in front is left out: T5's pre-tokenizer splits before every space,
    so no text is ever encoded with such a piece (T5's own vocabulary has none).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Index the pieces of a fast tokenizer of T5's kind. Takes about 0.2 s: build it once."""
        backend = tokenizer.backend_tokenizer
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.pieces = [piece.replace(SPACE, " ") for piece in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
        self.pieces[tokenizer.unk_token_id] = UNKNOWN
        self._normalizer = backend.normalizer
        silent = {self.eos, self.pad, *backend.get_added_tokens_decoder()} - {tokenizer.unk_token_id}
        self._index: dict[str, tuple[int, ...]] = {}
        """Ids by folded piece; no ids for a text that only begins longer pieces."""
        for id_, piece in enumerate(self.pieces):
            if id_ not in silent and piece and " " not in piece[1:]:
                folded = fold(piece)
                self._index[folded] = (*self._index.get(folded, ()), id_)
                for end in range(1, len(folded)):
                    self._index.setdefault(folded[:end], ())
        self.longest = max(map(len, self._index), default=0)
        if not self._index.get(" "):
            raise ValueError("vocabulary: no piece '▁'; expected the pieces of a SentencePiece tokenizer")
        known = {piece for piece in self.pieces if len(piece) == 1} - {UNKNOWN}
        self.unknown = re.compile(f"[^{re.escape(''.join(sorted(known)))}]+")
        """Pattern of a run of characters that are encoded as `<unk>`."""
        self.characters = re.compile(f"{self.unknown.pattern}|.")

    def normalize(self, text: str) -> str:
        """The text as the tokenizer sees it: normal form, single spaces, none at the ends."""
        text = self._normalizer.normalize_str(text) if self._normalizer else text
        return " ".join(text.replace(SPACE, " ").split())

    def spelled(self, text: str) -> str:
        """A normalized text as pieces spell it."""
        return self.unknown.sub(UNKNOWN, text)

    def prefixes(self, folded: str, start: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The pieces that begin at `start` of a folded text, in any letter case: (ids, end), the shortest first."""
        for end in range(start + 1, len(folded) + 1):
            ids = self._index.get(folded[start:end])
            if ids is None:
                return
            if ids:
                yield ids, end


def fold(text: str) -> str:
    """The text in lower case, at the same length: a character whose lower case is longer (`İ`) stays as it is."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


# Which pieces can come next while a name, or a value from the question, is being spelled.

Steps = dict[int, tuple[int, ...]]
"""Each id that can come next, and the offsets to which it may lead."""

BEGIN = 0
"""The offset at which every spelling begins: before its leading space."""
AFTER_SPACE = -1
"""The offset in a `ValueSpelling` where the space is spelled and the value's first character is not yet."""

REMEMBERED = 8_192
"""Number of spellings kept: WikiSQL's 18,585 train tables share most of their names (`Year`, `Player`)."""

_CUT = r"(?<=[^\W_])(?=[^\W_])|(?<=\d[.,])(?=\d)|(?<=\d)(?=[.,]\d)"
"""A place inside a word, or beside the point or comma of a number (`7.14`, `5,000`)."""
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
        """The steps that can follow at this offset; empty at the end of the text."""
        steps = self._steps.get(offset)
        if steps is None:
            steps = self._steps[offset] = self._found(offset)
        return steps

    def complete(self, offset: int) -> bool:
        """Whether the spelling may stop here."""
        return offset == len(self.text)

    def _found(self, offset: int) -> Steps:
        return {
            id_: (end,)
            for ids, end in self.vocabulary.prefixes(self.folded, offset)
            for id_ in ids
            if self.vocabulary.pieces[id_] == self.text[offset:end]
        }


class ValueSpelling(Spelling):
    """A space, then any span of the question, in any letter case.

    After NFKC and lower-casing, every condition value of WikiSQL is a substring of its question. A span never
    begins or ends inside a word or number, except that a unit may follow directly (`2.02` in `2.02m`). Of
    88,274 values in train and dev this loses 4, all of them mistakes (`block i` for `the block is I`).
    """

    def __init__(self, vocabulary: Vocabulary, question: str) -> None:
        places, text = dict[int, int](), ""
        for found in vocabulary.characters.finditer(question):
            places[found.start()] = len(text)
            text += vocabulary.spelled(found[0])
        places[len(question)] = len(text)
        super().__init__(vocabulary, text)
        starts, ends = ({match.start() for match in which.finditer(question)} for which in (_START, _END))
        self.starts = [places[start] for start in sorted(starts & places.keys())]
        self._ends = {places[end] for end in ends & places.keys()}

    def complete(self, offset: int) -> bool:
        return offset in self._ends

    def _found(self, offset: int) -> Steps:
        if offset == BEGIN:
            # `▁` alone, and pieces such as `▁New` wherever a value can start: the question need not have a space there.
            found = [(ids, AFTER_SPACE) for ids, _ in self.vocabulary.prefixes(" ", 0)]
            for start in self.starts:
                folded = " " + self.folded[start : start + self.vocabulary.longest]
                found += [(ids, start + end - 1) for ids, end in self.vocabulary.prefixes(folded, 0) if end > 1]
        else:
            places = self.starts if offset == AFTER_SPACE else [offset]
            found = [each for place in places for each in self.vocabulary.prefixes(self.folded, place)]
        steps: Steps = {}
        for ids, end in found:
            for id_ in ids:
                steps[id_] = (*steps.get(id_, ()), end)
        return steps


spelling = lru_cache(REMEMBERED)(Spelling)
"""The spelling of a keyword or of a column's name, shared by all tables that have it."""


# Where a sequence of pieces can stand in a query.


Role = Literal[
    "beginning", "select", "aggregate", "selected", "from", "where", "column", "operator", "value", "and"
]  # fmt: skip
"""The role that a part of the text has in the query."""


@dataclass(frozen=True, eq=False)
class Part:
    """A keyword, a name or a value, with its leading space; no piece extends from one part into the next."""

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
"""The operators that can be written: none of WikiSQL's 64,776 train and dev queries has the operator `OP`."""
REMEMBERED_HEADERS = 1_024
"""Number of headers whose parts are kept: questions about the same table mostly come together."""
_KEYWORD = re.compile(" (?=(?:WHERE|AND)(?: |$))")


class QueryAutomaton:
    """Accepts the texts of all queries on one table with values from one question."""

    def __init__(self, vocabulary: Vocabulary, header: Sequence[str], question: str) -> None:
        """Create the start state; the other states are created when they are reached.

        Columns without a name cannot be spelled, and of equal names the first one is meant. `ValueError` if
        no column has a name.
        """
        self.vocabulary = vocabulary
        self._names = [vocabulary.spelled(vocabulary.normalize(name)) for name in header]
        self._question = vocabulary.normalize(question)
        self._followers = _followers(vocabulary, tuple(dict.fromkeys(filter(None, self._names))))
        self._value = Part("value", values := ValueSpelling(vocabulary, self._question))
        self._has_values = bool(values.starts)
        self.start = GrammarState(self, {Reading(Part("beginning", spelling(vocabulary, "")), BEGIN, 0)})

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

        Ids may begin with the decoder's start id (T5: `<pad>`) and end with pads. Reading stops at the first id
        that is not allowed; what is complete up to there counts, and an incomplete condition is dropped.
        """
        state, text, ends = self.start, "", set[int]()
        for id_ in ids:
            if state is self.start and id_ == self.vocabulary.pad:
                continue
            following = state.next(id_)
            if following is None or following.ended:
                break
            state, text = following, text + self.vocabulary.pieces[id_]
            if state.is_complete:
                ends.add(len(text))
        named = next(filter(None, self._names))
        aggregate = next((each for each in AGGREGATES if each and text.startswith(f" SELECT {each}")), "")
        before = [found.start() for found in reversed(list(_KEYWORD.finditer(text)))]
        # A value may hold AND, and a text cut there would be read as if its last condition belonged to that value.
        whole = [text[:end] for end in (len(text), *before) if end in ends]
        whole += [f"{text} FROM table", f"SELECT {aggregate} {named} FROM table"]
        # A column without a name occurs in no text.
        names = [name or UNKNOWN * 2 for name in self._names]
        query = next(query for each in whole if (query := parse_query(each, names)))
        conditions = (each._replace(value=self._restored(each.value)) for each in query.conds)
        return Query(query.sel, query.agg, tuple(conditions))

    def _restored(self, value: str) -> str:
        """The value with the question's own characters in place of each `<unk>`."""
        around = map(re.escape, value.split(UNKNOWN))
        found = re.search(f"((?-i:{self.vocabulary.unknown.pattern}))".join(around), self._question, re.IGNORECASE)
        unknown = iter(found.groups() if found else ())
        return re.sub(UNKNOWN, lambda _: next(unknown, ""), value)

    def following(self, reading: Reading) -> tuple[Part, ...]:
        """The parts that can begin where a reading's part ends."""
        role = reading.part.role
        if role == "operator":
            return (self._value,)
        full = role == "value" and reading.conditions == MOST_CONDITIONS
        return () if full or (role == "from" and not self._has_values) else self._followers[role]


@lru_cache(REMEMBERED_HEADERS)
def _followers(vocabulary: Vocabulary, names: tuple[str, ...]) -> dict[Role, tuple[Part, ...]]:
    """The parts that can follow each role in a query on a table with these columns, values aside."""

    def parts(role: Role, texts: Iterable[str]) -> tuple[Part, ...]:
        # A keyword with a character that no piece has is not offered: a small vocabulary may lack the X of MAX.
        known = (text for text in texts if vocabulary.spelled(text) == text)
        return tuple(Part(role, spelling(vocabulary, f" {text}")) for text in known)

    if not names:
        raise ValueError("a header without a name; expected at least one column with a name")
    selected, columns = parts("selected", names), parts("column", names)
    operators = parts("operator", OFFERED_OPERATORS)
    return {
        "beginning": parts("select", ["SELECT"]),
        "select": parts("aggregate", filter(None, AGGREGATES)) + selected,
        "aggregate": selected,
        "selected": parts("from", ["FROM table"]),
        "from": parts("where", ["WHERE"]) if operators else (),
        "where": columns,
        "column": operators,
        "value": parts("and", ["AND"]),
        "and": columns,
    }


class GrammarState:
    """All readings of one sequence of ids. From each state, at least one way leads to a complete query."""

    def __init__(self, automaton: QueryAutomaton, readings: set[Reading], ended: bool = False) -> None:
        self._automaton = automaton
        self._readings = readings
        self._next: dict[int, GrammarState | None] = {}
        self.ended = ended
        """Whether the last id was `eos`."""

    @cached_property
    def allowed(self) -> NDArray[np.int64]:
        """The ids that can come next, each once; none after the end."""
        ids: set[int] = set().union(*(steps for _, _, steps in self._ways))
        if not self.ended and self.is_complete:
            ids.add(self._automaton.vocabulary.eos)
        return np.fromiter(ids, np.int64, len(ids))

    @cached_property
    def is_complete(self) -> bool:
        """Whether the ids spell a whole query."""
        return any(part.role in ("from", "value") and part.spelling.complete(end) for part, end, _ in self._readings)

    def next(self, id_: int) -> GrammarState | None:
        """The state after one more id; None if that id is not allowed."""
        if id_ in self._next:
            return self._next[id_]
        found: GrammarState | None = None
        if id_ == self._automaton.vocabulary.eos:
            if self.is_complete and not self.ended:
                found = GrammarState(self._automaton, self._readings, ended=True)
        else:
            readings = {
                Reading(part, end, reading.conditions + (part is not reading.part and part.role == "column"))
                for reading, part, steps in self._ways
                for end in steps.get(id_, ())
            }
            found = GrammarState(self._automaton, readings) if readings else None
        self._next[id_] = found
        return found

    @cached_property
    def _ways(self) -> list[tuple[Reading, Part, Steps]]:
        """How each reading can go on, `eos` aside: the part that the next piece would belong to, and these pieces."""
        ways = []
        for reading in () if self.ended else self._readings:
            spelled, end = reading.part.spelling, reading.end
            if steps := spelled.steps(end):
                ways.append((reading, reading.part, steps))
            if spelled.complete(end):
                ways += [(reading, part, part.spelling.steps(BEGIN)) for part in self._automaton.following(reading)]
        return ways
