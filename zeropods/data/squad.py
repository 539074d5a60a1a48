"""SQuAD v1.1: a strict reader of its official layout, its prompt, and its questions as tokens for a
causal model."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import MinLen
from pydantic import Field

from zeropods.data.encoding import NO_LOSS, Ids, TokenRows, count_lost, first_tokens
from zeropods.data.manifest import SPLITS
from zeropods.data.wikisql import Text, check_folder
from zeropods.errors import UserError
from zeropods.files import MEND, sha256, validated

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

CHUNK_QUESTIONS = 2_048
"""Number of questions that are encoded at a time."""
QUESTION = "Question: "
CONTEXT = " Context: "
ANSWER = " Answer:"


@dataclass(frozen=True)
class SquadExample:
    """A question about a context, and the answers that people marked in it."""

    index: int
    """Number of the question in its file, from 0."""
    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """The marked answers, at least one; train has one, dev three or more, often the same."""
    starts: tuple[int, ...]
    """Offset in `context` at which each answer begins, in characters."""


@dataclass(frozen=True)
class _Answer:
    text: Text
    answer_start: Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class _Question:
    id: Text
    question: Text
    answers: Annotated[tuple[_Answer, ...], MinLen(1)]


@dataclass(frozen=True)
class _Paragraph:
    context: Text
    qas: tuple[_Question, ...]


@dataclass(frozen=True)
class _Article:
    paragraphs: tuple[_Paragraph, ...]


@dataclass(frozen=True)
class _File:
    data: tuple[_Article, ...]


def read_squad(folder: Path, split: str) -> Iterator[SquadExample]:
    """The questions of a split in file order; `UserError` at the first fault, with its place."""
    path = squad_file(folder, split)
    document = validated(_File, path, path.read_bytes())
    ids = set[str]()
    for context, question in _questions(document):
        place = f"{path}: question {question.id!r}"
        if question.id in ids:
            raise UserError(f"{place}: id {question.id!r} occurs twice; keep one of them")
        for answer in question.answers:
            _check_answer(place, context, answer)
        yield SquadExample(
            index=len(ids),
            id=question.id,
            question=question.question,
            context=context,
            answers=tuple(answer.text for answer in question.answers),
            starts=tuple(answer.answer_start for answer in question.answers),
        )
        ids.add(question.id)
    if not ids:
        raise UserError(f"{path}: contains no questions; {MEND}")


def _questions(document: _File) -> Iterator[tuple[str, _Question]]:
    """Each question after its context."""
    for article in document.data:
        for paragraph in article.paragraphs:
            for question in paragraph.qas:
                yield paragraph.context, question


def _check_answer(place: str, context: str, answer: _Answer) -> None:
    """Refuse an answer that does not stand in its context where it says."""
    if context.startswith(answer.text, answer.answer_start):
        return
    start = context.find(answer.text)
    if start < 0:
        where = "in its context"
    else:
        where = f"at answer_start {answer.answer_start} but at {start}"
    raise UserError(
        f"{place}: answer {answer.text!r} is not {where}; correct it or leave the question out"
    )


def squad_file(folder: Path, split: str) -> Path:
    """The file of a split: `SPLIT-v1.1.json`, or the only one named `SPLIT*.json`; `UserError` if
    there is none, or several."""
    check_folder(folder, "squad")
    official = Path(folder) / f"{split}-v1.1.json"
    paths = _named(folder, split)
    if official in paths:
        return official
    if len(paths) == 1:
        return paths[0]
    if paths:
        names = ", ".join(path.name for path in paths)
        raise UserError(f"{folder}: {names} all belong to split {split!r}; keep only one of them")
    raise UserError(
        f"{official}: no such file; give a folder that has it, "
        "or fetch it: zeropods data get squad --out squad"
    )


def squad_splits(folder: Path) -> list[str]:
    """The splits that a folder has; `UserError` unless train is one of them."""
    squad_file(folder, "train")
    return [split for split in SPLITS if _named(folder, split)]


def _named(folder: Path, split: str) -> list[Path]:
    """The files that may hold a split; `dev.executable.json` is left out, since it belongs to
    WikiSQL."""
    paths = sorted(Path(folder).glob(f"{split}*.json"))
    return [path for path in paths if not path.name.endswith(".executable.json")]


# The prompt, and questions as tokens: a context that is too long is cut, question and answer stay
# whole.


def squad_prompt(question: str, context: str) -> str:
    """The text that the model continues; an answer follows after a space.

    Line breaks inside a context are kept; the first one that the model writes ends its answer.
    """
    return f"{QUESTION}{question.strip()}{CONTEXT}{context.strip()}{ANSWER}"


def answer_in(generated: str) -> str:
    """The answer in the text that a model wrote after a prompt: its first line, without spaces
    around it."""
    return generated.strip().partition("\n")[0].strip()


@dataclass(frozen=True)
class SquadRow:
    """A question as a model reads it."""

    ids: Ids
    answer: int
    """Number of tokens at the end of `ids` that are the answer and the end token; 0 in a prompt."""
    cut: bool
    """Whether tokens of the context were left out."""


class SquadEncoder:
    """Makes rows and prompts of at most `limit` tokens with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._first = first_tokens(tokenizer)
        self._end = tokenizer.eos_token_id
        self._limit = limit

    def rows(
        self,
        examples: Sequence[SquadExample],
        *,
        has_answer: bool = True,
        keep_answer: bool = False,
    ) -> list[SquadRow]:
        """The prompt of each example, followed by its first answer and the end token.

        Args:
            has_answer: False for prompts alone.
            keep_answer: whether a context that is too long keeps the part around the answer. If
                not, it keeps its beginning, as it does in a prompt, whose answer is not known.

        Raises:
            UserError: a question is too long even without its context.
        """
        prompts = []
        texts = []
        for example in examples:
            prompt = squad_prompt(example.question, example.context)
            answer = f" {example.answers[0].strip()}" if has_answer else ""
            prompts.append(prompt)
            texts.append(prompt + answer)
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        end = [self._end] if has_answer else []
        rows = []
        for example, prompt, encoding in zip(examples, prompts, encodings, strict=True):
            ids = encoding.ids
            answer_tokens = 0
            if has_answer:
                answer_tokens = len(ids) - _tokens_ended(encoding, len(prompt)) + len(end)
            surplus = len(self._first) + len(ids) + len(end) - self._limit
            is_too_long = surplus > 0
            if is_too_long:
                ids = self._without_surplus(example, prompt, encoding, surplus, keep_answer)
            row = np.array([*self._first, *ids, *end], np.int32)
            rows.append(SquadRow(row, answer_tokens, is_too_long))
        return rows

    def _without_surplus(
        self,
        example: SquadExample,
        prompt: str,
        encoding: Encoding,
        surplus: int,
        keep_answer: bool,
    ) -> list[int]:
        """The ids of a text without `surplus` tokens of its context.

        Positions that end in `_start` and `_end` are characters of the text; all other numbers are
        tokens.
        """
        context_end = len(prompt) - len(ANSWER)
        context_start = context_end - len(example.context.strip())
        # The space before the context belongs to its first token, or is a token of its own.
        start = _tokens_ended(encoding, context_start - 1)
        stop = _tokens_begun(encoding, context_end)
        kept = stop - start - surplus
        if kept < 0:
            needed = self._limit - kept
            raise UserError(
                f"question {example.id!r}: needs {needed} tokens without its context, but only "
                f"{self._limit} are allowed; raise the limit to {needed} or more"
            )
        first = start
        if keep_answer:
            # The prompt has the context without the blanks at its beginning.
            blanks = len(example.context) - len(example.context.lstrip())
            answer_start = context_start + example.starts[0] - blanks
            answer_end = answer_start + len(example.answers[0])
            answer_first = _tokens_ended(encoding, answer_start)
            answer_stop = _tokens_begun(encoding, answer_end)
            is_beyond_beginning = answer_stop - start > kept
            if is_beyond_beginning:
                # As much is kept before the answer as after it, as far as the context goes. An
                # answer longer than what is kept keeps its beginning.
                centred = (answer_first + answer_stop - kept) // 2
                latest_first = start + surplus
                first = max(start, min(answer_first, centred, latest_first))
        ids = encoding.ids
        return [*ids[:start], *ids[first : first + kept], *ids[stop:]]


# The tokens of a text by its characters. Spans are looked up only for the few tokens that are
# needed: those of all rows take longer than the encoding.


def _tokens_begun(encoding: Encoding, character: int) -> int:
    """Number of tokens that begin before a character of the text."""
    tokens = range(len(encoding.ids))
    return bisect_left(tokens, character, key=lambda token: _span(encoding, token)[0])


def _tokens_ended(encoding: Encoding, character: int) -> int:
    """Number of tokens that have ended at a character of the text, or before it."""
    tokens = range(len(encoding.ids))
    return bisect_right(tokens, character, key=lambda token: _span(encoding, token)[1])


def _span(encoding: Encoding, token: int) -> tuple[int, int]:
    """The offsets at which a token begins and ends, in characters."""
    span = encoding.token_to_chars(token)
    # Only special tokens have none, and `SquadEncoder.rows` encodes without them.
    assert span is not None
    return span


class SquadData:
    """The questions of a folder as rows; it must have the split train."""

    def __init__(
        self, folder: Path, *, limit: int | None, max_seq_length: int, loss_on: str
    ) -> None:
        """Open the raw data.

        Args:
            limit: number of questions to take from the start of each split; None for all.
            max_seq_length: the most tokens of a row.
            loss_on: which tokens of a row carry a loss: `answer` or `all`.
        """
        self._folder = folder
        self._limit = limit
        self._max_seq_length = max_seq_length
        self._loss_on = loss_on
        self.splits = squad_splits(self._folder)
        files = [squad_file(self._folder, split) for split in self.splits]
        self.hashes = {path.name: sha256(path) for path in files}
        """SHA-256 of each file, by its name."""

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: the rows of train."""
        for example in self._examples("train"):
            yield f"{squad_prompt(example.question, example.context)} {example.answers[0]}"

    def rows(
        self,
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        progress: Callable[[int], object],
    ) -> TokenRows:
        """The rows of a split.

        A context of train that is too long keeps the part around its answer. One of dev or test
        keeps its beginning, as it will when a model is asked, since the place of the answer is not
        known then.
        """
        encoder = SquadEncoder(tokenizer, self._max_seq_length)
        rows = TokenRows()
        targets_lost = 0
        examples = self._examples(split)
        while chunk := list(itertools.islice(examples, CHUNK_QUESTIONS)):
            squad_rows = encoder.rows(chunk, keep_answer=split == "train")
            answers = []
            for row in squad_rows:
                start = len(row.ids) - row.answer
                # The last token is the end token, which is no part of the answer's text.
                answers.append(row.ids[start:-1].tolist())
            decoded = tokenizer.backend_tokenizer.decode_batch(answers, skip_special_tokens=True)
            targets_lost += count_lost([example.answers[0] for example in chunk], decoded)
            rows.inputs_cut += sum(row.cut for row in squad_rows)
            rows.input_ids += [row.ids for row in squad_rows]
            rows.labels += [self._labels(row) for row in squad_rows]
            progress(len(chunk))
        rows.targets_lost = targets_lost
        return rows

    def _labels(self, row: SquadRow) -> Ids:
        """The ids of a row, -100 before the part that carries a loss."""
        labels = row.ids.copy()
        if self._loss_on == "answer":
            labels[: len(labels) - row.answer] = NO_LOSS
        else:
            # Nothing predicts the first token.
            labels[0] = NO_LOSS
        return labels

    def _examples(self, split: str) -> Iterator[SquadExample]:
        """The questions of a split, no more than the limit."""
        return itertools.islice(read_squad(self._folder, split), self._limit)
