"""Batched generation: a trained model answers questions about tables, free or constrained by the grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    T5ForConditionalGeneration,
)

from zeropods.data.prompts import PROMPTS, source_text
from zeropods.data.wikisql import Example
from zeropods.errors import UserError
from zeropods.evaluate.predictions import Prediction
from zeropods.evaluate.saved import model_folder
from zeropods.measure.record import read_json
from zeropods.sql.grammar import QueryAutomaton, State, Vocabulary
from zeropods.sql.text import format_query, parse_query

# Constrained decoding: only tokens that lead to a query on the question's table keep their score.


class ConstrainedSQL(LogitsProcessor):
    """Scores of what the grammar does not allow become minus infinity. For greedy search and beams.

    States are found again from the ids at each step, through remembered transitions, so beams may be
    reordered at will. Rows that have ended are left alone, and so are rows that left the grammar: beam
    search keeps such where fewer tokens than beams are allowed, at a score that never wins.
    """

    def __init__(self, automata: Sequence[QueryAutomaton], begin: int = 1) -> None:
        """Constrain one batch.

        Args:
            automata: one for each question; all have the same number of neighbouring rows (beams).
            begin: how many ids of a row come before the generated text (T5: `<pad>`).
        """
        self._starts = [automaton.start for automaton in automata]
        self._begin = begin

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Mask scores [rows, vocabulary] after ids [rows, length], in place.

        In place, because another tensor of this size costs more than the rest: `generate(output_logits=True)`
        would show masked logits.
        """
        states = self._states(input_ids[:, self._begin :].tolist())
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

    def _states(self, rows: list[list[int]]) -> list[State | None]:
        """The state of each row; None where it has ended or left the grammar."""
        beams, rest = divmod(len(rows), len(self._starts))
        if rest:
            raise ValueError(f"{len(rows)} rows for {len(self._starts)} questions; expected a multiple")
        return [_after(self._starts[number // beams], ids) for number, ids in enumerate(rows)]


def _after(state: State | None, ids: list[int]) -> State | None:
    for id_ in ids:
        if state is None:
            return None
        state = state.next(id_)
    return None if state is None or state.ended else state


# Batched generation: a trained model answers questions about tables.

Question = TypeVar("Question", contravariant=True)
Answer = TypeVar("Answer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How answers are generated."""

    max_new_tokens: int = 96
    num_beams: int = 1
    batch_size: int = 64
    """Questions at once."""
    constrained: bool = True
    """Only tokens that lead to a query on the question's table."""
    fixed_length: bool = False
    """Always `max_new_tokens`: random weights never stop, and speeds are compared at equal lengths."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}; expected at least 1")


@dataclass(frozen=True)
class Answerer:
    """A trained model with what it needs to answer."""

    model: T5ForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    prompt: str

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's pieces, as the grammar reads them."""
        return Vocabulary.of(self.tokenizer)

    @classmethod
    def load(cls, folder: Path, precision: str = "fp32", prompt: str | None = None) -> Answerer:
        """From a run folder or a model folder; the prompt is what the model was trained with.

        Weights come from safetensors only.
        """
        within = model_folder(folder)
        if precision not in DTYPES:
            raise UserError(f"--precision {precision!r}; expected {' or '.join(DTYPES)}")
        config = read_json(within / "config.json")
        prompt = prompt or config.get("prompt")
        if prompt not in PROMPTS:
            raise UserError(f"{within}: does not say its prompt ({prompt!r}); give --prompt {' or '.join(PROMPTS)}")
        model = T5ForConditionalGeneration.from_pretrained(within, dtype=DTYPES[precision], use_safetensors=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.eval().to(device), AutoTokenizer.from_pretrained(within), prompt)

    def answer(
        self,
        examples: Sequence[Example],
        how: Generation,
        progress: Callable[[int], object] = lambda rows: None,
    ) -> list[Prediction]:
        """A prediction for each example, in their order. Batches are of like length."""
        sources = [source_text(self.prompt, e.question, e.table.header, e.table.types) for e in examples]
        ids = (
            [encoding.ids for encoding in self.tokenizer.backend_tokenizer.encode_batch_fast(sources)]
            if sources
            else []
        )
        order = sorted(range(len(examples)), key=lambda i: len(ids[i]))
        answers: dict[int, Prediction] = {}
        for start in range(0, len(order), how.batch_size):
            rows = order[start : start + how.batch_size]
            batch = self._batch([examples[i] for i in rows], [ids[i] for i in rows], how)
            answers.update(zip(rows, batch, strict=True))
            progress(len(rows))
        return [answers[i] for i in range(len(examples))]

    def _batch(self, examples: list[Example], ids: list[list[int]], how: Generation) -> Iterator[Prediction]:
        automata = self._automata(examples) if how.constrained else None
        rows = self._generate(ids, automata, how)
        for number, (example, row) in enumerate(zip(examples, rows, strict=True)):
            header = example.table.header
            if automata is None:
                text = self.tokenizer.decode(row, skip_special_tokens=True)
                query = parse_query(text, header)
            else:
                query = automata[number].finish(row)
                text = format_query(query, header)
            yield Prediction(index=example.index, question=example.question, text=text, query=query)

    def _automata(self, examples: list[Example]) -> list[QueryAutomaton]:
        return [QueryAutomaton(self.vocabulary, e.table.header, e.question) for e in examples]

    @torch.inference_mode()
    def _generate(
        self, ids: list[list[int]], automata: list[QueryAutomaton] | None, how: Generation
    ) -> list[list[int]]:
        """New token ids of each row; the end token and pads may follow."""
        batch = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self.model.device)
        processors = LogitsProcessorList([] if automata is None else [ConstrainedSQL(automata)])
        options: dict[str, Any] = {"min_new_tokens": how.max_new_tokens} if how.fixed_length else {}
        generated = self.model.generate(
            **batch,
            max_new_tokens=how.max_new_tokens,
            num_beams=how.num_beams,
            do_sample=False,
            logits_processor=processors,
            **options,
        )
        return generated[:, 1:].tolist()


@dataclass(frozen=True)
class Speed:
    """How long the answers took, loading left out."""

    examples: int
    seconds: float

    def to_json(self) -> dict[str, float | int | None]:
        """The keys that `zeropods predict --json` prints."""
        rate = self.examples / self.seconds if self.seconds else None
        return {"examples": self.examples, "seconds": self.seconds, "questions_per_second": rate}


class Answers(Protocol[Question, Answer]):
    """A model that answers questions of one kind."""

    def answer(self, examples: Sequence[Question], how: Generation, progress: Callable[[int], object]) -> list[Answer]:
        """An answer to each example, in their order; `progress` takes how many were answered since its last call."""


def timed_answers(
    answerer: Answers[Question, Answer],
    examples: Sequence[Question],
    how: Generation,
    progress: Callable[[int], object],
) -> tuple[list[Answer], Speed]:
    """Answers and the wall time from the first question to the last answer."""
    began = time.perf_counter()
    answers = answerer.answer(examples, how, progress)
    return answers, Speed(len(examples), time.perf_counter() - began)
