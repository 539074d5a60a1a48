"""Which pieces can come next while a name, or a value of the question, is being spelled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from zeropods.sql.vocabulary import Vocabulary, fold

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
        pieces, text = self.vocabulary.pieces, self.text
        steps: Steps = {}
        for ids, end in self.vocabulary.prefixes(self.folded, offset):
            steps.update((id_, (end,)) for id_ in ids if pieces[id_] == text[offset:end])
        return self._with_unknown(steps, offset)

    def _with_unknown(self, steps: Steps, offset: int) -> Steps:
        """T5's tokenizer makes one `<unk>` of neighbouring unknown characters, so it may cover several."""
        end = offset
        while end < len(self.text) and self.unknown(end) is not None:
            end += 1
        if end > offset:
            steps[self.vocabulary.unk] = tuple(range(offset + 1, end + 1))
        return steps


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

    def _at(self, offset: int) -> Steps:
        steps: Steps = {}
        for ids, end in self.vocabulary.prefixes(self.folded, offset):
            steps.update(dict.fromkeys(ids, (end,)))
        return self._with_unknown(steps, offset)

    def _entered(self) -> Steps:
        """`▁` alone, and pieces such as `▁New` wherever a value can start."""
        steps = _merged(map(self._after_space, self.starts))
        for ids, _ in self.vocabulary.prefixes(" ", 0):
            steps.update(dict.fromkeys(ids, (AFTER_SPACE,)))
        return steps

    def _after_space(self, start: int) -> Steps:
        """Pieces such as `▁New` at `start`, where the question need not have a space."""
        folded = " " + self.folded[start : start + self.vocabulary.longest]
        steps: Steps = {}
        for ids, end in self.vocabulary.prefixes(folded, 0):
            if end > 1:
                steps.update(dict.fromkeys(ids, (start + end - 1,)))
        return steps


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
