"""Batched generation, with an `Answerer` class per task: a T5's queries, constrained or free, a causal model's answers.

They are written to a file, which `zeropods.evaluate.score` scores without the model. A text has no answers to keep:
its score, the perplexity, is computed here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, PreTrainedTokenizerBase

from zeropods.data.encoding import fingerprint, first_tokens
from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.prepare import Preparation
from zeropods.data.squad import SquadEncoder, SquadExample, answer_in, read_squad
from zeropods.data.tokenizers import with_ends
from zeropods.data.wikisql import Example, read_split, source_of
from zeropods.errors import UserError
from zeropods.evaluate.models import (
    SavedModel,
    answer_task,
    chosen_prompt,
    load_model,
    trained_length,
)
from zeropods.evaluate.score import Prediction, check_place, write_predictions
from zeropods.evaluate.score_json import LM, SQUAD, TEXT2SQL, TextScore, text_score
from zeropods.sql.grammar import GrammarState, QueryAutomaton, Vocabulary
from zeropods.sql.query import Query, format_query, parse_query
from zeropods.train.sampler import load_split

Progress = Callable[[int], object]
"""A function that takes the number of examples answered since its last call."""
UNWANTED = 1e9
"""Amount subtracted from a score that is to count only where there is no other."""
DEFAULT_LENGTH = 512
"""Tokens of a prompt and its answer, or of a block of text, for a model that does not say its training length."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How answers are generated."""

    max_new_tokens: int = 96
    num_beams: int = 1
    batch_size: int = 64
    """Number of questions answered at once."""
    constrained: bool = True
    """Whether only tokens that lead to a query on the question's table are allowed."""
    fixed_length: bool = False
    """Whether each answer has `max_new_tokens`: random weights never stop, and speeds are compared at equal lengths."""

    @property
    def options(self) -> dict[str, int]:
        """Arguments for transformers' `generate`."""
        shortest = {"min_new_tokens": self.max_new_tokens} if self.fixed_length else {}
        return {"max_new_tokens": self.max_new_tokens, "num_beams": self.num_beams, **shortest}


@dataclass(frozen=True)
class Speed:
    """How long the answers took, without loading."""

    examples: int
    seconds: float

    def to_json(self) -> dict[str, float]:
        """The keys that `zeropods predict --json` prints."""
        return {**vars(self), "questions_per_second": self.examples / self.seconds}


@dataclass(frozen=True)
class Answerer(ABC):
    """A trained model that answers the examples of one task; each task has a subclass."""

    usual: ClassVar[Generation]
    """How answers are generated unless the caller asks otherwise."""
    own_options: ClassVar[tuple[str, ...]]
    """Names of the arguments of `load` that only this task has."""

    saved: SavedModel

    @property
    def model(self) -> PreTrainedModel:
        return self.saved.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.saved.tokenizer

    def answer(
        self, examples: Sequence[Any], how: Generation | None = None, progress: Progress = lambda rows: None
    ) -> list[Prediction]:
        """An answer to each example, in order; batches have prompts of similar length."""
        how = how or self.usual
        ids = self._encoded(examples, how)
        answers: dict[int, Prediction] = {}
        for rows in _batches(ids, how.batch_size):
            batch = self._batch([examples[i] for i in rows], [ids[i] for i in rows], how)
            answers.update(zip(rows, batch, strict=True))
            progress(len(rows))
        return [answers[i] for i in range(len(examples))]

    def timed(
        self, examples: Sequence[Any], how: Generation | None = None, progress: Progress = lambda rows: None
    ) -> tuple[list[Prediction], Speed]:
        """Answers, and the wall time from the first question to the last answer."""
        began = time.perf_counter()
        answers = self.answer(examples, how, progress)
        return answers, Speed(len(examples), time.perf_counter() - began)

    @abstractmethod
    def _encoded(self, examples: Sequence[Any], how: Generation) -> Sequence[Any]:
        """Token ids of each prompt, a sequence per prompt."""

    @abstractmethod
    def _batch(self, examples: list[Any], ids: list[Any], how: Generation) -> list[Prediction]:
        """Answers to one batch of prompts."""


def _batches(ids: Sequence[Any], size: int) -> Iterator[list[int]]:
    """Batches of `size` indices of sequences of similar length, the shortest first."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    return (order[start : start + size] for start in range(0, len(order), size))


# Queries of a T5.


@dataclass(frozen=True)
class QueryAnswerer(Answerer):
    """A T5 that writes queries on tables."""

    usual = Generation()
    own_options = ("prompt", "force_prompt")

    prompt: str

    @classmethod
    def load(
        cls, folder: Path, precision: str = "fp32", prompt: str | None = None, force_prompt: bool = False
    ) -> QueryAnswerer:
        """Load from a run folder or a model folder; the prompt is the one that the model was trained with.

        Args:
            prompt: the prompt of a model that does not say its own, or of any model where it is forced.
        """
        chosen = chosen_prompt(folder, prompt, force_prompt)
        return cls(load_model(folder, precision, causal=False), chosen)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's pieces, as the grammar reads them."""
        return Vocabulary(self.tokenizer)

    def _encoded(self, examples: Sequence[Example], how: Generation) -> list[list[int]]:
        sources = [source_of(example, self.prompt) for example in examples]
        return [encoding.ids for encoding in self.tokenizer.backend_tokenizer.encode_batch_fast(sources)]

    def _batch(self, examples: list[Example], ids: list[Any], how: Generation) -> list[Prediction]:
        automata = [QueryAutomaton(self.vocabulary, e.table.header, e.question) for e in examples]
        predictions = []
        if how.num_beams == 1:
            rows = self._likeliest(ids, automata, how)
        else:
            allowed = partial(self._allowed, automata) if how.constrained else None
            rows = self.saved.generated(ids, prefix_allowed_tokens_fn=allowed, **how.options)
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

    def _allowed(self, automata: list[QueryAutomaton], number: int, ids: Tensor) -> NDArray[np.int64]:
        """Tokens that can follow a beam's ids: any after its end, or once it has left the grammar.

        Beam search keeps such beams where fewer tokens than beams are allowed, with a score that never wins.
        """
        # A row begins with T5's `<pad>`.
        state = automata[number].follow(ids[1:].tolist())
        return np.arange(self.model.config.vocab_size) if state is None or state.ended else state.allowed

    @torch.inference_mode()
    def _likeliest(self, ids: list[Any], automata: list[QueryAutomaton], how: Generation) -> list[list[int]]:
        """The likeliest token at each step, as transformers' `generate` finds it; rows that have ended are dropped."""
        batch = self.saved.batch(ids)
        encoded, mask = self.model.encoder(**batch).last_hidden_state, batch["attention_mask"]
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        answers: list[list[int]] = [[] for _ in ids]
        going, states = answers, [automaton.start for automaton in automata]
        last = torch.full((len(ids), 1), self.model.config.decoder_start_token_id, device=mask.device)
        for _ in range(how.max_new_tokens):
            decoded = self.model.decoder(
                input_ids=last, encoder_hidden_states=encoded, encoder_attention_mask=mask, past_key_values=cache
            )
            chosen = self._chosen(decoded.last_hidden_state[:, -1], states, how)
            for answer, id_ in zip(going, chosen, strict=True):
                answer.append(id_)
            stay = [row for row, id_ in enumerate(chosen) if id_ != self.vocabulary.eos]
            if not stay:
                break
            if how.constrained:
                states = [state for row in stay if (state := states[row].next(chosen[row]))]
            last = torch.tensor([[chosen[row]] for row in stay], device=mask.device)
            if len(stay) < len(going):
                going = [going[row] for row in stay]
                rows = torch.tensor(stay, device=mask.device)
                encoded, mask = encoded[rows], mask[rows]
                cache.batch_select_indices(rows)
        return answers

    def _chosen(self, decoded: Tensor, states: list[GrammarState], how: Generation) -> list[int]:
        """The likeliest next token of each row; `decoded` is (rows, width).

        Under the grammar only tokens that some row may take are scored: about a hundred of T5's 32,128. T5's scaling of
        the scores is left out, since it does not change their order.
        """
        weights = self.model.get_output_embeddings().weight
        ids, barred = np.arange(len(weights)), np.zeros((1, len(weights)), np.float32)
        if how.constrained:
            allowed = [state.allowed for state in states]
            ids, columns = np.unique(np.concatenate(allowed), return_inverse=True)
            barred = np.full((len(allowed), len(ids)), -np.inf, np.float32)
            barred[np.repeat(np.arange(len(allowed)), [len(row) for row in allowed]), columns] = 0
            weights = weights[torch.from_numpy(ids).to(weights.device)]
        barred[:, ids == self.vocabulary.eos] -= UNWANTED * how.fixed_length
        scores = linear(decoded, weights) + torch.from_numpy(barred).to(weights.device)
        # On a CPU `max` takes a sixth of the time of `argmax`.
        return ids[scores.max(-1).indices.cpu().numpy()].tolist()


# Answers of a causal model to SQuAD's questions.


@dataclass(frozen=True)
class QuestionAnswerer(Answerer):
    """A causal model that answers questions about a text."""

    # Batches are smaller because a causal model keeps keys and values of a whole context.
    usual = Generation(max_new_tokens=32, batch_size=16)
    own_options = ("max_seq_length",)

    max_seq_length: int
    """Maximum number of tokens of prompt and answer together; unless given, no more than the model was trained on."""

    @classmethod
    def load(
        cls, source: str | Path, precision: str = "fp32", max_seq_length: int | None = None
    ) -> QuestionAnswerer:  # fmt: skip
        """Load from a run or model folder or a hub id; the default length is the run's training length, else 512."""
        saved = load_model(source, precision, causal=True)
        length = max_seq_length or trained_length(source) or DEFAULT_LENGTH
        return cls(saved, min(length, saved.positions or length))

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end an answer: the end token, and every one with a line break in it."""
        pieces = self.tokenizer.backend_tokenizer.decode_batch([[i] for i in range(len(self.tokenizer))])
        return sorted({self.tokenizer.eos_token_id, *(i for i, piece in enumerate(pieces) if "\n" in piece)})

    def _encoded(self, examples: Sequence[SquadExample], how: Generation) -> Sequence[Any]:
        """Token ids of prompts, as in training: too long a context is cut; question and room for the answer stay."""
        room = self.max_seq_length - how.max_new_tokens
        if room < 1:
            raise UserError(
                f"--max-new-tokens {how.max_new_tokens}: leaves no room for a prompt in the {self.max_seq_length} "
                "tokens that the model was trained on; lower it"
            )
        return [row.ids for row in SquadEncoder(self.tokenizer, room).rows(examples, has_answer=False)]

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
    """Seconds of generation, without loading."""


def sample_text(source: str | Path, prompt: str, *, max_new_tokens: int = 60) -> SampledText:
    """Let a saved causal model continue a prompt, with the likeliest token each time.

    Args:
        source: run folder, model folder or hub id.
        max_new_tokens: maximum number of new tokens; fewer where the model ends, or where its positions do.

    Raises:
        UserError: a prompt without tokens or that leaves no position for a new one; a model that cannot be loaded.
    """
    saved = load_model(source, causal=True)
    words = saved.tokenizer(prompt, add_special_tokens=False).input_ids
    ids = [*first_tokens(saved.tokenizer), *words]
    room = max_new_tokens if saved.positions is None else min(max_new_tokens, saved.positions - len(ids))
    if not words:
        raise UserError(f"prompt {prompt!r}: contains no tokens; give some words to continue")
    if room < 1:
        fault = f"prompt of {len(ids)} tokens, but the model has only {saved.positions} positions"
        raise UserError(f"{fault}; give a shorter one")
    began = time.perf_counter()
    (new,) = saved.generated([ids], max_new_tokens=room, eos_token_id=saved.tokenizer.eos_token_id)
    text = saved.tokenizer.decode(new, skip_special_tokens=True)
    return SampledText(prompt=prompt, text=text, new_tokens=len(new), seconds=time.perf_counter() - began)


# What a model is asked to do, by task.

TASKS: dict[str, type[QueryAnswerer] | type[QuestionAnswerer]] = {TEXT2SQL: QueryAnswerer, SQUAD: QuestionAnswerer}
READERS: dict[str, Callable[[Path, str], Iterable[Any]]] = {TEXT2SQL: read_split, SQUAD: read_squad}


def predict(
    model: Path,
    data: Path,
    split: str,
    out: Path,
    how: Generation | None = None,
    *,
    task: str | None = None,
    precision: str = "auto",
    limit: int | None = None,
    progress: Progress = lambda rows: None,
    **options: Any,
) -> Speed:
    """Write an answer to each example of a split (or its first `limit`), atomically, and time the answers.

    The score of a run's own answers is deleted when they are replaced.

    Args:
        model: run folder, model folder, or hub id of a causal model.
        task: the task of a model that does not say its own.
        options: the task's own options: `prompt` of text2sql; `max_seq_length` of squad, the maximum number of tokens
            of prompt and answer together. None leaves them to the model.

    Raises:
        UserError: a model, data or option does not fit the task, or `out` holds something else.
    """
    out = Path(out)
    check_place(out)
    task = answer_task(model, task)
    given = {name: value for name, value in options.items() if value is not None}
    unconstrained = ["unconstrained"] if how is not None and not how.constrained and task != TEXT2SQL else []
    for name in [*(given.keys() - {*TASKS[task].own_options}), *unconstrained]:
        other = SQUAD if name in QuestionAnswerer.own_options else TEXT2SQL
        raise UserError(f"--{name.replace('_', '-')}: is for {other}, but this task is {task}; leave it out")
    answerer: Answerer = TASKS[task].load(model, precision, **given)
    answers, speed = answerer.timed(list(islice(READERS[task](Path(data), split), limit)), how, progress)
    write_predictions(out, answers)
    if out.name == f"predictions.{split}.jsonl":
        # What was replaced may have been scored.
        (out.parent / f"score.{split}.json").unlink(missing_ok=True)
    return speed


# A text, whose tokens a causal model predicts.

Block = tuple[np.ndarray, np.ndarray]
"""Token ids of a block, and labels: -100 where nothing is predicted."""


def text_perplexity(
    source: str | Path,
    data: str | Path,
    split: str,
    *,
    limit: int | None = None,
    batch_size: int = 4,
    precision: str = "fp32",
    progress: Progress = lambda blocks: None,
    max_seq_length: int | None = None,
    dataset_config: str | None = None,
    text_field: str = "text",
) -> TextScore:
    """Loss and perplexity of a model over the blocks of a split, the same before and after training.

    Args:
        source: run folder, model folder or hub id.
        data: a set that was prepared with the model's tokenizer, or raw text as `zeropods prepare --task lm` takes it,
            cut as for training.
        limit: number of blocks of a prepared set, or of documents of raw text, that are read from its start; None: all.
        max_seq_length: number of tokens per block of raw text; if not given, what the run was trained on, else 512 or
            the model's positions, whichever is less.
        dataset_config: configuration of raw text at the hub, as for `zeropods prepare`; `text_field` likewise.

    Raises:
        UserError: a missing split, another tokenizer, or blocks longer than the model's positions.
    """
    saved = load_model(source, precision, causal=True)
    blocks: list[Block]
    if (Path(data) / FILE).is_file():
        manifest = read_manifest(Path(data))
        if max_seq_length is not None:
            raise UserError(f"--max-seq-length {max_seq_length}: {data} is already cut into blocks; leave it out")
        if manifest.task != LM:
            raise UserError(f"{data}: prepared for {manifest.task}; perplexity needs text: prepare it with --task lm")
        if manifest.tokenizer_fingerprint != fingerprint(saved.tokenizer):
            raise UserError(f"{data}: prepared with a tokenizer other than the model's; give the raw text")
        _check_blocks(saved, data, manifest.max_seq_length or 0, split, list(manifest.splits))
        found = load_split(Path(data), split)
        blocks = [] if found is None else [found[i] for i in range(len(found))][:limit]
    else:
        length = max_seq_length or trained_length(source)
        length = length or min(DEFAULT_LENGTH, saved.positions or DEFAULT_LENGTH)
        wanted = Preparation(
            task=LM, data=str(data), tokenizer=str(source), max_seq_length=length, limit=limit,
            dataset_config=dataset_config, text_field=text_field,
        )  # fmt: skip
        corpus = wanted.open()
        _check_blocks(saved, data, length, split, corpus.splits)
        rows = corpus.rows(split, with_ends(str(source), saved.tokenizer), lambda documents: None)
        blocks = list(zip(rows.input_ids, rows.labels, strict=True))
    nats, tokens = [0.0] * len(blocks), 0
    for places in _batches([ids for ids, _ in blocks], batch_size):
        for i, (of_block, predicted) in zip(places, _nats(saved, [blocks[i] for i in places]), strict=True):
            nats[i] = of_block
            tokens += predicted
        progress(len(places))
    return text_score(sum(nats), tokens)


def _nats(saved: SavedModel, blocks: Sequence[Any]) -> list[tuple[float, int]]:
    """Nats and number of predicted tokens of each block, which is a pair of token ids and labels.

    This is a separate function, so that its logits are freed before those of the next batch are made.
    """
    inputs, labels = (
        pad_sequence([torch.tensor(block[side]).long() for block in blocks], batch_first=True, padding_value=filler)
        for side, filler in enumerate((0, -100))
    )
    with torch.inference_mode():
        # Padding is on the right, where a causal model sees it after all that is predicted.
        logits = saved.model(input_ids=inputs.to(saved.model.device), use_cache=False).logits
        # Row by row: in FP32 all logits of a batch would be in memory a second time.
        return [
            (float(cross_entropy(row.float(), right.to(row.device), reduction="sum")), int((right >= 0).sum()))
            for row, right in zip(logits[:, :-1], labels[:, 1:], strict=True)
        ]


def _check_blocks(saved: SavedModel, data: str | Path, length: int, split: str, splits: list[str]) -> None:
    """Refuse a split that is not in the data, and blocks of more tokens than the model has positions."""
    if split not in splits:
        raise UserError(f"{data}: has no split {split!r}; expected {' or '.join(splits)}")
    if saved.positions is not None and length > saved.positions:
        fault = f"its blocks have {length} tokens, but the model has only {saved.positions} positions"
        raise UserError(f"{data}: {fault}; use shorter blocks")
