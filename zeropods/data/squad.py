"""SQuAD v1.1: a strict reader of its official layout, its prompt, and its questions as tokens for a causal model."""

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

from zeropods.data.encoding import NO_LOSS, Ids, TokenRows, first_tokens, folded
from zeropods.data.manifest import SPLITS
from zeropods.data.wikisql import Text, check_folder
from zeropods.errors import UserError
from zeropods.files import MEND, sha256, validated

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from zeropods.data.prepare import Preparation

CHUNK_QUESTIONS = 2_048
QUESTION, CONTEXT, ANSWER = "Question: ", " Context: ", " Answer:"


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
    paragraphs = [each for article in validated(_File, path, path.read_bytes()).data for each in article.paragraphs]
    asked = [(paragraph.context, question) for paragraph in paragraphs for question in paragraph.qas]
    seen = set[str]()
    for index, (context, question) in enumerate(asked):
        place = f"{path}: question {question.id!r}"
        if question.id in seen:
            raise UserError(f"{place}: id {question.id!r} occurs twice; keep one of them")
        seen.add(question.id)
        for answer in question.answers:
            if not context.startswith(answer.text, answer.answer_start):
                there = context.find(answer.text)
                found = "in its context" if there < 0 else f"at answer_start {answer.answer_start} but at {there}"
                raise UserError(f"{place}: answer {answer.text!r} is not {found}; correct it or leave the question out")
        texts, starts = zip(*((answer.text, answer.answer_start) for answer in question.answers), strict=True)
        yield SquadExample(index, question.id, question.question, context, texts, starts)
    if not asked:
        raise UserError(f"{path}: contains no questions; {MEND}")


def squad_file(folder: Path, split: str) -> Path:
    """The file of a split, which must exist: `SPLIT-v1.1.json`, or the only one named `SPLIT*.json`."""
    check_folder(folder, "squad")
    official, found = Path(folder) / f"{split}-v1.1.json", _named(folder, split)
    if official in found or len(found) == 1:
        return official if official in found else found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise UserError(f"{folder}: {names} all belong to split {split!r}; keep only one of them")
    raise UserError(
        f"{official}: no such file; give a folder that has it, or fetch it: zeropods data get squad --out squad"
    )


def squad_splits(folder: Path) -> list[str]:
    """The splits that a folder has; train must be one of them."""
    squad_file(folder, "train")
    return [split for split in SPLITS if _named(folder, split)]


def _named(folder: Path, split: str) -> list[Path]:
    """The files that may hold a split; `dev.executable.json` is left out, since it belongs to WikiSQL."""
    return [path for path in sorted(Path(folder).glob(f"{split}*.json")) if not path.name.endswith(".executable.json")]


# The prompt, and questions as tokens: a context that is too long is cut, question and answer stay whole.


def squad_prompt(question: str, context: str) -> str:
    """The text that the model continues; an answer follows after a space.

    Line breaks inside a context are kept; the first one that the model writes ends its answer.
    """
    return f"{QUESTION}{question.strip()}{CONTEXT}{context.strip()}{ANSWER}"


def answer_in(generated: str) -> str:
    """The answer in the text that a model wrote after a prompt: its first line, without spaces around it."""
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
        self._backend, self._end, self._limit = tokenizer.backend_tokenizer, tokenizer.eos_token_id, limit
        self._first = first_tokens(tokenizer)

    def rows(
        self, examples: Sequence[SquadExample], *, has_answer: bool = True, keep_answer: bool = False
    ) -> list[SquadRow]:
        """The prompt of each example, followed by its first answer and the end token.

        Args:
            has_answer: False for prompts alone.
            keep_answer: a context that is too long keeps the part around the answer; otherwise it keeps its
                beginning, as it does in a prompt, whose answer is not known.
        """
        prompts = [squad_prompt(e.question, e.context) for e in examples]
        answers = [f" {e.answers[0].strip()}" if has_answer else "" for e in examples]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        encodings, last = self._backend.encode_batch(texts, add_special_tokens=False), [self._end] * has_answer
        rows = []
        for example, encoding, prompt in zip(examples, encodings, prompts, strict=True):
            ids = encoding.ids
            answer_tokens = len(ids) - _tokens(encoding, len(prompt), ended=True) + 1 if has_answer else 0
            surplus = len(ids) + len(self._first) + len(last) - self._limit
            if surplus > 0:
                context_end = len(prompt) - len(ANSWER)
                context = context_end - len(example.context.strip())
                start, stop = _tokens(encoding, context - 1, ended=True), _tokens(encoding, context_end)
                kept = stop - start - surplus
                if kept < 0:
                    needed = self._limit - kept
                    raise UserError(
                        f"question {example.id!r}: needs {needed} tokens without its context, but only {self._limit} "
                        f"are allowed; raise the limit to {needed} or more"
                    )
                first = start
                begin = context + example.starts[0] - (len(example.context) - len(example.context.lstrip()))
                answer = _tokens(encoding, begin, ended=True), _tokens(encoding, begin + len(example.answers[0]))
                if keep_answer and answer[1] - start > kept:
                    around = (answer[0] + answer[1] - kept) // 2 - start
                    first += max(0, min(answer[0] - start, around, surplus))
                ids = [*ids[:start], *ids[first : first + kept], *ids[stop:]]
            rows.append(SquadRow(np.array([*self._first, *ids, *last], np.int32), answer_tokens, surplus > 0))
        return rows


def _tokens(encoding: Encoding, character: int, *, ended: bool = False) -> int:
    """Number of tokens that begin before a character of the text, or have `ended` at or before it.

    Spans are looked up only for the few tokens that are needed: those of all rows take longer than the encoding.
    """

    def edge(token: int) -> int:
        span = encoding.token_to_chars(token)
        assert span is not None  # No special token was added.
        return span[ended]

    return (bisect_right if ended else bisect_left)(range(len(encoding.ids)), character, key=edge)


class SquadData:
    """The questions of a folder as rows; it must have the split train."""

    def __init__(self, wanted: Preparation) -> None:
        self._wanted, self._folder = wanted, Path(wanted.data)
        self.splits = squad_splits(self._folder)
        self.hashes = {path.name: sha256(path) for path in (squad_file(self._folder, s) for s in self.splits)}
        """SHA-256 of each file, by its name."""

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: the rows of train."""
        for example in self._examples("train"):
            yield f"{squad_prompt(example.question, example.context)} {example.answers[0]}"

    def rows(self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Callable[[int], object]) -> TokenRows:
        """The rows of a split.

        A context of train that is too long keeps the part around its answer. One of dev or test keeps its
        beginning, as it will when a model is asked, since the place of the answer is not known then.
        """
        encoder = SquadEncoder(tokenizer, self._wanted.max_seq_length)
        rows, examples, lost = TokenRows(), self._examples(split), 0
        while chunk := list(itertools.islice(examples, CHUNK_QUESTIONS)):
            new = encoder.rows(chunk, keep_answer=split == "train")
            answers = [row.ids[len(row.ids) - row.answer : -1].tolist() for row in new]
            texts = tokenizer.backend_tokenizer.decode_batch(answers, skip_special_tokens=True)
            lost += sum(folded(text) != folded(e.answers[0]) for text, e in zip(texts, chunk, strict=True))
            rows.inputs_cut += sum(row.cut for row in new)
            rows.input_ids += [row.ids for row in new]
            for row in new:
                # Labels are -100 before the part that carries a loss; nothing predicts the first token.
                labels = row.ids.copy()
                labels[: len(labels) - row.answer if self._wanted.loss == "answer" else 1] = NO_LOSS
                rows.labels.append(labels)
            progress(len(chunk))
        rows.targets_lost = lost
        return rows

    def _examples(self, split: str) -> Iterator[SquadExample]:
        return itertools.islice(read_squad(self._folder, split), self._wanted.limit)
