"""SQuAD's prompts as tokens: too long a context is cut, question and answer stay."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zeropods.data.causal_tokenizer import first_tokens
from zeropods.data.squad import SquadExample
from zeropods.data.squad_prompt import ANSWER, squad_prompt
from zeropods.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class SquadRow:
    """A question as a model reads it."""

    ids: Ids
    answer: int
    """How many tokens at the end of `ids` are the answer and the end token; 0 in a prompt."""
    cut: bool
    """Whether tokens of the context were left out."""


@dataclass(frozen=True)
class _Places:
    """Where the parts of a row lie in its text, in characters."""

    context: int
    """The space before the context."""
    tail: int
    """The end of the context, where ` Answer:` begins."""
    marked: tuple[int, int] | None
    """The part of the context that shall stay."""


class SquadEncoder:
    """Rows and prompts of at most `limit` tokens, as one tokenizer makes them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._first = first_tokens(tokenizer)
        self._end = tokenizer.eos_token_id
        self._limit = limit

    def rows(self, examples: Sequence[SquadExample], *, keep_answer: bool) -> list[SquadRow]:
        """Prompt, first answer and end token of each example.

        Args:
            keep_answer: a context that is too long keeps the part around the answer; otherwise its beginning,
                as it does for a prompt, whose answer is not known.
        """
        prompts = [squad_prompt(e.question, e.context) for e in examples]
        texts = [f"{prompt} {e.answers[0].strip()}" for prompt, e in zip(prompts, examples, strict=True)]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [
            self._row(example, encoding, len(prompt), keep_answer)
            for example, encoding, prompt in zip(examples, encodings, prompts, strict=True)
        ]

    def prompts(self, examples: Sequence[SquadExample]) -> list[Ids]:
        """The prompt of each example, without an answer; a context that is too long keeps its beginning."""
        texts = [squad_prompt(e.question, e.context) for e in examples]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        pairs = zip(examples, encodings, texts, strict=True)
        return [self._fitted(e, encoding, _places(e, len(text), False), [])[0] for e, encoding, text in pairs]

    def _row(self, example: SquadExample, encoding: Encoding, prompt: int, keep_answer: bool) -> SquadRow:
        answer = len(encoding.ids) - _tokens_before(encoding, prompt)
        ids, cut = self._fitted(example, encoding, _places(example, prompt, keep_answer), [self._end])
        return SquadRow(ids, answer + 1, cut)

    def _fitted(self, example: SquadExample, encoding: Encoding, places: _Places, last: list[int]) -> tuple[Ids, bool]:
        """The ids, first and last tokens included, with as much of the context as fits."""
        ids, room = encoding.ids, self._limit - len(self._first) - len(last)
        surplus = len(ids) - room
        if surplus <= 0:
            return np.array([*self._first, *ids, *last], np.int32), False
        start, stop = _tokens_before(encoding, places.context), _tokens_until(encoding, places.tail)
        kept = stop - start - surplus
        if kept < 0:
            needed = self._limit - kept
            raise UserError(
                f"question {example.id!r}: needs {needed} tokens without its context, and {self._limit} are allowed; "
                f"raise the limit to {needed} or more"
            )
        first = start + _window(encoding, start, stop, kept, places.marked)
        ids = [*self._first, *ids[:start], *ids[first : first + kept], *ids[stop:], *last]
        return np.array(ids, np.int32), True


def _places(example: SquadExample, prompt: int, keep_answer: bool) -> _Places:
    tail = prompt - len(ANSWER)
    context = tail - len(example.context.strip())
    if not keep_answer:
        return _Places(context - 1, tail, None)
    stripped = len(example.context) - len(example.context.lstrip())
    begin = example.starts[0] if example.starts else example.context.find(example.answers[0])
    begin += context - stripped
    return _Places(context - 1, tail, (begin, begin + len(example.answers[0])))


def _window(encoding: Encoding, start: int, stop: int, kept: int, marked: tuple[int, int] | None) -> int:
    """How many tokens of the context to leave out at its beginning, so that the marked part is kept."""
    if marked is None:
        return 0
    first, last = _tokens_before(encoding, marked[0]) - start, _tokens_until(encoding, marked[1]) - start
    if last <= kept:
        return 0
    around = (first + last - kept) // 2
    return max(0, min(first, around, stop - start - kept))


def _tokens_before(encoding: Encoding, character: int) -> int:
    """Tokens that end at or before a character of the text."""
    return bisect_right(range(len(encoding.ids)), character, key=lambda token: _span(encoding, token)[1])


def _tokens_until(encoding: Encoding, character: int) -> int:
    """Tokens that begin before a character of the text."""
    return bisect_left(range(len(encoding.ids)), character, key=lambda token: _span(encoding, token)[0])


def _span(encoding: Encoding, token: int) -> tuple[int, int]:
    """Looked up for the few tokens that are asked for: all spans of all rows take longer than the encoding."""
    span = encoding.token_to_chars(token)
    if span is None:
        raise ValueError(f"token {token} has no place in the text, though no special token was added")
    return span
