"""Batched generation: queries of a T5, constrained by the grammar or free, answers of a causal model, and samples."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from zeropods.data.squad import SquadEncoder, SquadExample, answer_in, read_squad
from zeropods.data.tokenizers import first_tokens
from zeropods.data.wikisql import PROMPTS, Example, read_split, source_text
from zeropods.errors import UserError
from zeropods.evaluate.models import SavedModel, load_model, model_folder, trained_length
from zeropods.evaluate.score import Prediction
from zeropods.measure.record import read_json
from zeropods.sql.grammar import GrammarState, QueryAutomaton, Vocabulary
from zeropods.sql.query import Query, format_query, parse_query

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")
Progress = Callable[[int], object]
"""Takes how many examples were answered since its last call."""
DEFAULT_LENGTH = 512
"""Tokens of a prompt and its answer, or of a block of text, for a model that does not say what it was trained on."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How answers are generated."""

    max_new_tokens: int = 96
    num_beams: int = 1
    batch_size: int = 64
    """Number of questions at once."""
    constrained: bool = True
    """Whether only tokens are allowed that lead to a query on the question's table."""
    fixed_length: bool = False
    """Always `max_new_tokens`: random weights never stop, and speeds are compared at equal lengths."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}; expected at least 1")

    @property
    def options(self) -> dict[str, int]:
        """What transformers' `generate` is given."""
        shortest = {"min_new_tokens": self.max_new_tokens} if self.fixed_length else {}
        return {"max_new_tokens": self.max_new_tokens, "num_beams": self.num_beams, **shortest}


@dataclass(frozen=True)
class Speed:
    """How long the answers took, loading left out."""

    examples: int
    seconds: float

    def to_json(self) -> dict[str, float | None]:
        """The keys that `zeropods predict --json` prints."""
        rate = self.examples / self.seconds if self.seconds else None
        return {"examples": self.examples, "seconds": self.seconds, "questions_per_second": rate}


@dataclass(frozen=True)
class Answerer(Generic[Asked, Answered]):
    """A trained model that answers the examples of one task; each task is a class of this."""

    usual: ClassVar[Generation]
    """How answers are generated where nothing else is asked for."""
    own_options: ClassVar[tuple[str, ...]]
    """Names of the arguments of `load` that are this task's own."""

    saved: SavedModel

    @property
    def model(self) -> PreTrainedModel:
        return self.saved.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.saved.tokenizer

    def examples(self, data: str | Path, split: str, limit: int | None = None) -> list[Asked]:
        """The first `limit` examples of a split; `UserError` where they cannot be read."""
        if limit is not None and limit < 1:
            raise UserError(f"--limit {limit}; expected at least 1")
        return list(self._read(data, split, limit))

    def answer(
        self, examples: Sequence[Asked], how: Generation | None = None, progress: Progress = lambda rows: None
    ) -> list[Answered]:
        """An answer to each example, in their order; batches are of similar length."""
        how = how or self.usual
        ids = self._encoded(examples, how)
        order = sorted(range(len(examples)), key=lambda i: len(ids[i]))
        answers: dict[int, Answered] = {}
        for start in range(0, len(order), how.batch_size):
            rows = order[start : start + how.batch_size]
            batch = self._batch([examples[i] for i in rows], [ids[i] for i in rows], how)
            answers.update(zip(rows, batch, strict=True))
            progress(len(rows))
        return [answers[i] for i in range(len(examples))]

    def timed(
        self, examples: Sequence[Asked], how: Generation | None = None, progress: Progress = lambda rows: None
    ) -> tuple[list[Answered], Speed]:
        """Answers, and the wall time from the first question to the last answer."""
        began = time.perf_counter()
        answers = self.answer(examples, how, progress)
        return answers, Speed(len(examples), time.perf_counter() - began)

    @abstractmethod
    def _read(self, data: str | Path, split: str, limit: int | None) -> Iterable[Asked]:
        """Streams the examples."""

    @abstractmethod
    def _encoded(self, examples: Sequence[Asked], how: Generation) -> Sequence[Any]:
        """Token ids of each prompt, a sequence per prompt."""

    @abstractmethod
    def _batch(self, examples: list[Asked], ids: list[Any], how: Generation) -> list[Answered]:
        """Answers to one batch of prompts."""


# Queries of a T5.


@dataclass(frozen=True)
class QueryAnswerer(Answerer[Example, Prediction]):
    """A T5 that writes queries on tables."""

    usual = Generation()
    own_options = ("prompt",)

    prompt: str

    @classmethod
    def load(cls, folder: Path, precision: str = "fp32", prompt: str | None = None) -> QueryAnswerer:
        """From a run folder or a model folder; the prompt is what the model was trained with."""
        within = model_folder(folder)
        prompt = prompt or read_json(within / "config.json").get("prompt")
        if prompt not in PROMPTS:
            raise UserError(f"{within}: does not say its prompt ({prompt!r}); give --prompt {' or '.join(PROMPTS)}")
        return cls(load_model(folder, precision, causal=False), prompt)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's pieces, as the grammar reads them."""
        return Vocabulary.of(self.tokenizer)

    def _read(self, data: str | Path, split: str, limit: int | None) -> Iterable[Example]:
        return islice(read_split(Path(data), split), limit)

    def _encoded(self, examples: Sequence[Example], how: Generation) -> list[list[int]]:
        sources = [source_text(self.prompt, e.question, e.table.header, e.table.types) for e in examples]
        return [encoding.ids for encoding in self.tokenizer.backend_tokenizer.encode_batch_fast(sources)]

    def _batch(self, examples: list[Example], ids: list[Any], how: Generation) -> list[Prediction]:
        automata = [QueryAutomaton(self.vocabulary, e.table.header, e.question) for e in examples]
        constraint = LogitsProcessorList([ConstrainedSQL(automata)] if how.constrained else [])
        predictions = []
        rows = self.saved.generated(ids, logits_processor=constraint, **how.options)
        for example, automaton, row in zip(examples, automata, rows, strict=True):
            query: Query | None
            if how.constrained:
                query = automaton.finish(row)
                text = format_query(query, example.table.header)
            else:
                text = self.tokenizer.decode(row, skip_special_tokens=True)
                query = parse_query(text, example.table.header)
            predictions.append(Prediction(index=example.index, question=example.question, text=text, query=query))
        return predictions


class ConstrainedSQL(LogitsProcessor):
    """Scores of what the grammar does not allow become minus infinity, in greedy search and with beams.

    States are found again from the ids at each step, through remembered transitions, so beams may be
    reordered at will. Rows that have ended are left alone, and so are rows that left the grammar: beam
    search keeps such where fewer tokens than beams are allowed, at a score that never wins.
    """

    def __init__(self, automata: Sequence[QueryAutomaton]) -> None:
        """Constrain one batch, with an automaton per question; all have as many neighbouring rows (beams)."""
        self._automata = automata

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Mask scores [rows, vocabulary] after ids [rows, length], in place.

        In place, because another tensor of this size costs more than the rest: `generate(output_logits=True)`
        would show masked logits.
        """
        # A row begins with T5's `<pad>`.
        states = self._states(input_ids[:, 1:].tolist())
        rows = [row for row, state in enumerate(states) if state is not None]
        if not rows:
            return scores
        allowed = [state.allowed for state in states if state is not None]
        places = np.repeat(rows, [len(ids) for ids in allowed]) * scores.shape[1] + np.concatenate(allowed)
        flat = torch.from_numpy(places).to(scores.device)
        others = [row for row, state in enumerate(states) if state is None]
        kept, left_alone = scores.take(flat), scores[others]
        scores.fill_(-torch.inf)
        scores.put_(flat, kept)
        scores[others] = left_alone
        return scores

    def _states(self, rows: list[list[int]]) -> list[GrammarState | None]:
        """The state of each row; None where it has ended or left the grammar."""
        beams = len(rows) // len(self._automata)
        states = [self._automata[number // beams].follow(ids) for number, ids in enumerate(rows)]
        return [None if state is None or state.ended else state for state in states]


# Answers of a causal model to SQuAD's questions.


@dataclass(frozen=True)
class QuestionAnswerer(Answerer[SquadExample, Prediction]):
    """A causal model that answers questions about a text."""

    # Batches are smaller because a causal model keeps keys and values of a whole context.
    usual = Generation(max_new_tokens=32, batch_size=16)
    own_options = ("max_seq_length",)

    max_seq_length: int
    """The most tokens of prompt and answer together: no more than the model was trained on."""

    @classmethod
    def load(
        cls, source: str | Path, precision: str = "fp32", max_seq_length: int | None = None
    ) -> QuestionAnswerer:  # fmt: skip
        """From a run folder, a model folder or a hub id; the length is what the run was trained on, else 512."""
        saved = load_model(source, precision, causal=True)
        length = max_seq_length or trained_length(source) or DEFAULT_LENGTH
        return cls(saved, min(length, saved.positions or length))

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end an answer: the end token, and every one with a line break in it."""
        pieces = self.tokenizer.backend_tokenizer.decode_batch([[i] for i in range(len(self.tokenizer))])
        return sorted({self.tokenizer.eos_token_id, *(i for i, piece in enumerate(pieces) if "\n" in piece)})

    def _read(self, data: str | Path, split: str, limit: int | None) -> Iterable[SquadExample]:
        return islice(read_squad(Path(data), split), limit)

    def _encoded(self, examples: Sequence[SquadExample], how: Generation) -> Sequence[Any]:
        """As in training: a context that is too long is cut, question and room for the answer stay."""
        room = self.max_seq_length - how.max_new_tokens
        if room < 1:
            raise UserError(
                f"--max-new-tokens {how.max_new_tokens}: no room for a prompt in the {self.max_seq_length} tokens that "
                "the model was trained on; lower it"
            )
        return SquadEncoder(self.tokenizer, room).prompts(examples)

    def _batch(self, examples: list[SquadExample], ids: list[Any], how: Generation) -> list[Prediction]:
        new = self.saved.generated(ids, eos_token_id=self.ends, **how.options)
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [
            Prediction(index=example.index, id=example.id, question=example.question, text=answer_in(text))
            for example, text in zip(examples, texts, strict=True)
        ]


# What a causal model writes after a few words: a sample for people to read.


@dataclass(frozen=True, kw_only=True)
class SampledText:
    """A prompt and what a model wrote after it: what `generated.json` of a run holds."""

    prompt: str
    text: str
    """What followed the prompt, without it; the end token is not shown."""
    new_tokens: int
    seconds: float
    """Time of generation; loading left out."""


def sample_text(source: str | Path, prompt: str, *, max_new_tokens: int = 60) -> SampledText:
    """Let a saved causal model go on from a prompt, with the likeliest token each time.

    Args:
        source: run folder, model folder or hub id.
        max_new_tokens: at most; fewer where the model ends, or where its positions do.

    Raises:
        UserError: a prompt of no tokens or of more than the model has positions, or a model that cannot be loaded.
    """
    saved = load_model(source, causal=True)
    words = saved.tokenizer(prompt, add_special_tokens=False).input_ids
    ids = [*first_tokens(saved.tokenizer), *words]
    room = max_new_tokens if saved.positions is None else min(max_new_tokens, saved.positions - len(ids))
    if not words:
        raise UserError(f"prompt {prompt!r}: no tokens; give some words to go on from")
    if room < 1:
        raise UserError(f"prompt of {len(ids)} tokens, the model has {saved.positions} positions; give a shorter one")
    began = time.perf_counter()
    (new,) = saved.generated([ids], max_new_tokens=room, eos_token_id=saved.tokenizer.eos_token_id)
    text = saved.tokenizer.decode(new, skip_special_tokens=True)
    return SampledText(prompt=prompt, text=text, new_tokens=len(new), seconds=time.perf_counter() - began)
