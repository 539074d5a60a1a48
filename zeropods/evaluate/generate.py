"""Batched generation: the queries of a T5, constrained or free, and the answers of a causal model.

Each task has an `Answerer` class. Answers are written to a file, which `zeropods.evaluate.score`
scores without the model. A text has no answers to keep: its score, the perplexity, is computed
here.
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

from zeropods.data.encoding import fingerprint
from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.prepare import TASK_DATA, Preparation
from zeropods.data.squad import SquadEncoder, SquadExample, answer_in
from zeropods.data.tokenizers import with_ends
from zeropods.data.wikisql import Example, in_words_of, source_of
from zeropods.errors import UserError
from zeropods.evaluate.score import Prediction, check_place, write_predictions
from zeropods.measure.score_json import TextScore, text_score
from zeropods.sql.grammar import GrammarState, QueryAutomaton, Vocabulary
from zeropods.sql.linking import links
from zeropods.sql.query import Query, format_query, parse_query, with_values_of
from zeropods.tasks import LM, SQUAD, TEXT2SQL
from zeropods.train.sampler import load_split
from zeropods.train.saved_models import (
    SavedModel,
    answer_task,
    chosen_prompt,
    load_model,
    trained_length,
)

Progress = Callable[[int], object]
"""A function that takes the number of examples answered since its last call."""
UNWANTED = 1e9
"""Amount subtracted from a score that is to count only where there is no other."""
DEFAULT_LENGTH = 512
"""Tokens of a prompt and its answer, or of a block of text, for a model that does not say its
training length."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How answers are generated."""

    max_new_tokens: int = 96
    num_beams: int = 1
    batch_size: int = 64
    """Number of questions answered at once."""
    constrained: bool = True
    """Whether only tokens that lead to a query on the question's table are allowed."""
    linked: bool = False
    """Whether conditions compare only what the question quotes from the rows of its table, as
    `zeropods.sql.linking` finds it. The rows must be at hand. Scores are not to be compared with
    those of models that read the names of the columns only."""
    fixed_length: bool = False
    """Whether each answer has `max_new_tokens`: random weights never stop, and speeds are compared
    at equal lengths."""

    @property
    def options(self) -> dict[str, int]:
        """Arguments for transformers' `generate`."""
        options = {"max_new_tokens": self.max_new_tokens, "num_beams": self.num_beams}
        if self.fixed_length:
            options["min_new_tokens"] = self.max_new_tokens
        return options


@dataclass(frozen=True)
class Speed:
    """How long the answers took, without loading."""

    examples: int
    seconds: float

    def to_json(self) -> dict[str, float]:
        """The keys that `zeropods predict --json` prints."""
        return {
            "examples": self.examples,
            "seconds": self.seconds,
            "questions_per_second": self.examples / self.seconds,
        }


@dataclass(frozen=True)
class Answerer(ABC):
    """A trained model that answers the examples of one task; each task has a subclass."""

    usual: ClassVar[Generation]
    """How answers are generated unless the caller asks otherwise."""
    task_options: ClassVar[tuple[str, ...]]
    """Names of the options that not every task has: arguments of `load`, `unconstrained` where
    answers may be free, and `link_cells` where they may be linked."""

    saved: SavedModel

    @property
    def model(self) -> PreTrainedModel:
        return self.saved.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.saved.tokenizer

    def answer(
        self,
        examples: Sequence[Any],
        how: Generation | None = None,
        progress: Progress = lambda rows: None,
    ) -> list[Prediction]:
        """An answer to each example, in order; batches have prompts of similar length."""
        how = how or self.usual
        prompts = self._encoded(examples, how)
        answers: dict[int, Prediction] = {}
        for indices in _batches(prompts, how.batch_size):
            batch_examples = [examples[i] for i in indices]
            batch_prompts = [prompts[i] for i in indices]
            batch_answers = self._answer_batch(batch_examples, batch_prompts, how)
            answers.update(zip(indices, batch_answers, strict=True))
            progress(len(indices))
        return [answers[i] for i in range(len(examples))]

    def timed(
        self,
        examples: Sequence[Any],
        how: Generation | None = None,
        progress: Progress = lambda rows: None,
    ) -> tuple[list[Prediction], Speed]:
        """Answers, and the wall time from the first question to the last answer."""
        began = time.perf_counter()
        answers = self.answer(examples, how, progress)
        seconds = time.perf_counter() - began
        return answers, Speed(len(examples), seconds)

    @abstractmethod
    def _encoded(self, examples: Sequence[Any], how: Generation) -> Sequence[Any]:
        """Token ids of each example's prompt, in order."""

    @abstractmethod
    def _answer_batch(
        self, examples: list[Any], prompts: list[Any], how: Generation
    ) -> list[Prediction]:
        """Answers to one batch of examples, whose prompts are given as token ids."""


def _batches(sequences: Sequence[Any], size: int) -> Iterator[list[int]]:
    """Batches of `size` indices of sequences of similar length, the shortest first."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


# Queries of a T5.


@dataclass(frozen=True)
class QueryAnswerer(Answerer):
    """A T5 that writes queries on tables."""

    usual = Generation()
    task_options = ("prompt", "force_prompt", "unconstrained", "link_cells")

    prompt: str

    @classmethod
    def load(
        cls,
        folder: Path,
        precision: str = "fp32",
        prompt: str | None = None,
        force_prompt: bool = False,
    ) -> QueryAnswerer:
        """Load from a run folder or a model folder, with the prompt that it was trained with.

        Args:
            prompt: the prompt of a model that does not say its own, or of any model where it is
                forced.
        """
        chosen = chosen_prompt(folder, prompt, force_prompt)
        return cls(load_model(folder, precision, causal=False), chosen)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's pieces, as the grammar reads them."""
        return Vocabulary(self.tokenizer)

    def _encoded(self, examples: Sequence[Example], how: Generation) -> list[list[int]]:
        sources = [source_of(example, self.prompt) for example in examples]
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(sources)
        return [encoding.ids for encoding in encodings]

    def _answer_batch(
        self, examples: list[Example], prompts: list[Any], how: Generation
    ) -> list[Prediction]:
        automata = []
        for example in examples:
            # The answer uses the names and values as the prompt has them.
            worded = in_words_of(self.prompt, example)
            quoted = links(example.question, example.table) if how.linked else None
            automaton = QueryAutomaton(
                self.vocabulary, worded.table.header, worded.question, quoted
            )
            automata.append(automaton)
        answers = self._answer_ids(prompts, automata, how)
        predictions = []
        for example, automaton, answer in zip(examples, automata, answers, strict=True):
            header = example.table.header
            query: Query | None
            if how.constrained:
                query = with_values_of(example.question, automaton.finish(answer))
                text = format_query(query, header)
            else:
                text = self.tokenizer.decode(answer, skip_special_tokens=True)
                query = parse_query(text, header)
                if query is not None:
                    query = with_values_of(example.question, query)
            prediction = Prediction(
                index=example.index,
                question=example.question,
                text=text,
                query=query,
                linked=how.linked,
            )
            predictions.append(prediction)
        return predictions

    def _answer_ids(
        self, prompts: list[Any], automata: list[QueryAutomaton], how: Generation
    ) -> list[list[int]]:
        """The token ids of each answer; the end token and padding may follow."""
        if how.num_beams == 1:
            return self._likeliest(prompts, automata, how)
        allowed = partial(self._allowed, automata) if how.constrained else None
        return self.saved.generated(prompts, prefix_allowed_tokens_fn=allowed, **how.options)

    def _allowed(self, automata: list[QueryAutomaton], row: int, ids: Tensor) -> NDArray[np.int64]:
        """Tokens that can follow a beam's ids: any after its end, or once it has left the grammar.

        Where fewer tokens than beams are allowed, beam search also keeps beams that have left the
        grammar, with a score that never wins.

        Args:
            automata: the grammar of each prompt of the batch.
            row: place of the beam's prompt in the batch.
            ids: the beam's ids so far, T5's `<pad>` in front.
        """
        state = automata[row].follow(ids[1:].tolist())
        if state is None or state.ended:
            return np.arange(self.model.config.vocab_size)
        return state.allowed

    @torch.inference_mode()
    def _likeliest(
        self, prompts: list[Any], automata: list[QueryAutomaton], how: Generation
    ) -> list[list[int]]:
        """The likeliest token at each step, as transformers' `generate` finds it.

        Rows that have ended are dropped, with their part of the encoder's output and of the cache.
        """
        batch = self.saved.batch(prompts)
        mask = batch["attention_mask"]
        # No other variable refers to the encoder's output, so that it is freed when ended rows are
        # dropped.
        encoded = self.model.encoder(**batch).last_hidden_state
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first_token = self.model.config.decoder_start_token_id
        last_tokens = torch.full((len(prompts), 1), first_token, device=mask.device)
        states = [automaton.start for automaton in automata]
        answers: list[list[int]] = [[] for _ in prompts]
        # The answers of the rows that have not ended. They are the same lists as in `answers`, and
        # grow in place.
        unfinished = answers
        for _ in range(how.max_new_tokens):
            decoded = self.model.decoder(
                input_ids=last_tokens,
                encoder_hidden_states=encoded,
                encoder_attention_mask=mask,
                past_key_values=cache,
            )
            tokens = self._chosen(decoded.last_hidden_state[:, -1], states, how)
            for answer, token in zip(unfinished, tokens, strict=True):
                answer.append(token)

            staying = [row for row, token in enumerate(tokens) if token != self.vocabulary.eos]
            if not staying:
                break
            if how.constrained:
                # No state is None, since only allowed tokens are chosen. The test is for mypy.
                next_states = [states[row].next(tokens[row]) for row in staying]
                states = [state for state in next_states if state is not None]
            last_tokens = torch.tensor([[tokens[row]] for row in staying], device=mask.device)
            if len(staying) < len(unfinished):
                unfinished = [unfinished[row] for row in staying]
                rows = torch.tensor(staying, device=mask.device)
                encoded = encoded[rows]
                mask = mask[rows]
                cache.batch_select_indices(rows)
        return answers

    def _chosen(self, decoded: Tensor, states: list[GrammarState], how: Generation) -> list[int]:
        """The likeliest next token of each row.

        Under the grammar only tokens that some row may take are scored: about a hundred of T5's
        32,128. T5's scaling of the scores is left out, since it does not change their order.

        Args:
            decoded: the decoder's output at the last token, (rows, width).
            states: the grammar's state of each row; not read in free decoding.
        """
        weights = self.model.get_output_embeddings().weight
        if how.constrained:
            allowed = [state.allowed for state in states]
            # `added` has a column for each token that any row may take: 0 in the rows that may take
            # it, and minus infinity in the others.
            tokens, columns = np.unique(np.concatenate(allowed), return_inverse=True)
            rows = np.repeat(np.arange(len(allowed)), [len(row) for row in allowed])
            added = np.full((len(allowed), len(tokens)), -np.inf, np.float32)
            added[rows, columns] = 0
            weights = weights[torch.from_numpy(tokens).to(weights.device)]
        else:
            tokens = np.arange(len(weights), dtype=np.int64)
            added = np.zeros((1, len(weights)), np.float32)
        if how.fixed_length:
            # A finite amount: where nothing but the end is allowed, the row ends all the same.
            added[:, tokens == self.vocabulary.eos] -= UNWANTED
        scores = linear(decoded, weights) + torch.from_numpy(added).to(weights.device)
        # On a CPU `max` takes a sixth of the time of `argmax`.
        likeliest = scores.max(-1).indices.cpu().numpy()
        return tokens[likeliest].tolist()


# Answers of a causal model to SQuAD's questions.


@dataclass(frozen=True)
class QuestionAnswerer(Answerer):
    """A causal model that answers questions about a text."""

    # Batches are smaller because a causal model keeps keys and values of a whole context.
    usual = Generation(max_new_tokens=32, batch_size=16)
    task_options = ("max_seq_length",)

    max_seq_length: int
    """Maximum number of tokens of prompt and answer together; unless given, no more than the model
    was trained on."""

    @classmethod
    def load(
        cls, source: str | Path, precision: str = "fp32", max_seq_length: int | None = None
    ) -> QuestionAnswerer:
        """Load from a run folder, a model folder or a hub id.

        Args:
            max_seq_length: if not given, the run's training length, else 512.
        """
        saved = load_model(source, precision, causal=True)
        length = max_seq_length or trained_length(source) or DEFAULT_LENGTH
        return cls(saved, min(length, saved.positions or length))

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end an answer: the end token, and every one with a line break in it."""
        ids = range(len(self.tokenizer))
        pieces = self.tokenizer.backend_tokenizer.decode_batch([[id_] for id_ in ids])
        line_breaks = [id_ for id_, piece in enumerate(pieces) if "\n" in piece]
        return sorted({self.tokenizer.eos_token_id, *line_breaks})

    def _encoded(self, examples: Sequence[SquadExample], how: Generation) -> Sequence[Any]:
        """Token ids of prompts as in training.

        Too long a context is cut, so that the question and room for the answer stay.
        """
        room = self.max_seq_length - how.max_new_tokens
        if room < 1:
            raise UserError(
                f"--max-new-tokens {how.max_new_tokens}: leaves no room for a prompt in the "
                f"{self.max_seq_length} tokens that the model was trained on; lower it"
            )
        rows = SquadEncoder(self.tokenizer, room).rows(examples, has_answer=False)
        return [row.ids for row in rows]

    def _answer_batch(
        self, examples: list[SquadExample], prompts: list[Any], how: Generation
    ) -> list[Prediction]:
        new_ids = self.saved.generated(prompts, eos_token_id=self.ends, **how.options)
        texts = self.tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        predictions = []
        for example, text in zip(examples, texts, strict=True):
            prediction = Prediction(
                index=example.index,
                id=example.id,
                question=example.question,
                text=answer_in(text),
            )
            predictions.append(prediction)
        return predictions


# What a model is asked to do, by task.

ANSWERERS: dict[str, type[QueryAnswerer] | type[QuestionAnswerer]] = {
    TEXT2SQL: QueryAnswerer,
    SQUAD: QuestionAnswerer,
}
"""The class that answers the examples of each task, by the task's name. Its `load` takes a folder,
a precision and those of its `task_options` that are not about decoding."""


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
    """Write an answer to each example of a split, and return how long the answers took.

    The file appears only when it is complete. If it is named `predictions.SPLIT.jsonl`, the score
    file beside it is deleted, which may be of the answers that were replaced.

    Args:
        model: run folder, model folder, or hub id of a causal model.
        data: folder of the raw data.
        out: the file of the answers.
        task: the task of a model that does not say its own.
        limit: number of examples that are answered, from the start of the split; None: all.
        options: the task's own options: `prompt` of text2sql; `max_seq_length` of squad, the
            maximum number of tokens of prompt and answer together. None leaves them to the model.

    Raises:
        UserError: a model, data or option does not fit the task, or `out` holds something else.
    """
    out = Path(out)
    check_place(out)
    task = answer_task(model, task)
    given_options = {name: value for name, value in options.items() if value is not None}
    _check_options(task, given_options, how)
    answerer: Answerer = ANSWERERS[task].load(model, precision, **given_options)
    answers, speed = answerer.timed(_examples(task, Path(data), split, limit), how, progress)
    write_predictions(out, answers)
    if out.name == f"predictions.{split}.jsonl":
        # It may be of the answers that were replaced.
        old_score = out.parent / f"score.{split}.json"
        old_score.unlink(missing_ok=True)
    return speed


def _check_options(task: str, given_options: Iterable[str], how: Generation | None) -> None:
    """Refuse an option that is for another task, and options that contradict each other."""
    options = list(given_options)
    # Two options are no arguments of `load`, but part of how answers are generated.
    if how is not None and not how.constrained:
        options.append("unconstrained")
    if how is not None and how.linked:
        options.append("link_cells")
    for name in options:
        if name not in ANSWERERS[task].task_options:
            flag = name.replace("_", "-")
            others = _tasks_with_option(name)
            raise UserError(f"--{flag}: is for {others}, but this task is {task}; leave it out")
    if {"unconstrained", "link_cells"} <= set(options):
        raise UserError("--link-cells: binds what is constrained; leave out --unconstrained")


def _tasks_with_option(name: str) -> str:
    """The names of the tasks that have an option."""
    tasks = [task for task, answerer in ANSWERERS.items() if name in answerer.task_options]
    return " and ".join(tasks)


def _examples(task: str, data: Path, split: str, limit: int | None) -> list[Any]:
    """The first `limit` examples of a split, or all of them."""
    read = TASK_DATA[task].read
    # Only text has no examples to read, and `answer_task` refuses models of text.
    assert read is not None
    return list(islice(read(data, split), limit))


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
    """Loss and perplexity of a model over the blocks of a split.

    A model and the one that it was trained from are scored on the same blocks.

    Args:
        source: run folder, model folder or hub id.
        data: a set that was prepared with the model's tokenizer, or raw text as `zeropods prepare
            --task lm` takes it, cut as for training.
        limit: number of blocks of a prepared set, or of documents of raw text, that are read from
            its start; None: all.
        max_seq_length: number of tokens per block of raw text; if not given, what the run was
            trained on, else 512 or the model's positions, whichever is less.
        dataset_config: configuration of raw text at the hub, as for `zeropods prepare`;
            `text_field` likewise.

    Raises:
        UserError: a missing split, another tokenizer, or blocks longer than the model's positions.
    """
    saved = load_model(source, precision, causal=True)
    if (Path(data) / FILE).is_file():
        blocks = _prepared_blocks(saved, data, split, max_seq_length)[:limit]
    else:
        length = max_seq_length or trained_length(source)
        length = length or min(DEFAULT_LENGTH, saved.positions or DEFAULT_LENGTH)
        preparation = Preparation(
            task=LM,
            data=str(data),
            tokenizer=str(source),
            max_seq_length=length,
            limit=limit,
            dataset_config=dataset_config,
            text_field=text_field,
        )
        blocks = _raw_blocks(saved, preparation, split)
    return _score_blocks(saved, blocks, batch_size, progress)


def _prepared_blocks(
    saved: SavedModel, data: str | Path, split: str, max_seq_length: int | None
) -> list[Block]:
    """All blocks of a split of a prepared set; `UserError` if the set does not fit the model."""
    manifest = read_manifest(Path(data))
    if max_seq_length is not None:
        fault = f"{data} is already cut into blocks"
        raise UserError(f"--max-seq-length {max_seq_length}: {fault}; leave it out")
    if manifest.task != LM:
        fault = f"prepared for {manifest.task}"
        raise UserError(f"{data}: {fault}; perplexity needs text: prepare it with --task lm")
    if manifest.tokenizer_fingerprint != fingerprint(saved.tokenizer):
        fault = "prepared with a tokenizer other than the model's"
        raise UserError(f"{data}: {fault}; give the raw text")
    _check_blocks(saved, data, manifest.max_seq_length or 0, split, list(manifest.splits))
    rows = load_split(Path(data), split)
    if rows is None:
        return []
    return [rows[i] for i in range(len(rows))]


def _raw_blocks(saved: SavedModel, preparation: Preparation, split: str) -> list[Block]:
    """The blocks of raw text, cut as for training."""
    corpus = preparation.open()
    _check_blocks(saved, preparation.data, preparation.max_seq_length, split, corpus.splits)
    tokenizer = with_ends(preparation.tokenizer, saved.tokenizer)
    rows = corpus.rows(split, tokenizer, lambda documents: None)
    return list(zip(rows.input_ids, rows.labels, strict=True))


def _score_blocks(
    saved: SavedModel, blocks: Sequence[Block], batch_size: int, progress: Progress
) -> TextScore:
    """The score of blocks, which are run in batches of similar length.

    Nats are summed in the order of the blocks, so that rounding does not depend on the batches.
    """
    nats = [0.0] * len(blocks)
    tokens = 0
    for indices in _batches([ids for ids, _ in blocks], batch_size):
        batch = _nats(saved, [blocks[i] for i in indices])
        for i, (block_nats, block_tokens) in zip(indices, batch, strict=True):
            nats[i] = block_nats
            tokens += block_tokens
        progress(len(indices))
    return text_score(sum(nats), tokens)


def _nats(saved: SavedModel, blocks: Sequence[Block]) -> list[tuple[float, int]]:
    """The sum of the loss in nats, and the number of predicted tokens, of each block of a batch.

    This is a separate function, so that its logits are freed before those of the next batch are
    made.
    """
    inputs = _padded([ids for ids, _ in blocks], filler=0)
    labels = _padded([labels for _, labels in blocks], filler=-100)
    scored = []
    with torch.inference_mode():
        # Padding is on the right. There a causal model needs no mask: no predicted token depends
        # on what comes after it.
        logits = saved.model(input_ids=inputs.to(saved.model.device), use_cache=False).logits
        # The logits at one token are about the next one.
        rows_and_targets = zip(logits[:, :-1], labels[:, 1:], strict=True)
        # Row by row: in FP32 all logits of a batch would be in memory a second time.
        for row, targets in rows_and_targets:
            # No variable refers to the FP32 row, so that it is freed before the next one is made.
            nats = float(cross_entropy(row.float(), targets.to(row.device), reduction="sum"))
            predicted = int((targets >= 0).sum())
            scored.append((nats, predicted))
    return scored


def _padded(rows: Sequence[np.ndarray], filler: int) -> Tensor:
    """(rows, tokens): rows of token ids or labels, filled up on the right."""
    tensors = [torch.tensor(row).long() for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=filler)


def _check_blocks(
    saved: SavedModel, data: str | Path, length: int, split: str, splits: list[str]
) -> None:
    """Refuse a split that is not there, and blocks of more tokens than the model has positions."""
    if split not in splits:
        raise UserError(f"{data}: has no split {split!r}; expected {' or '.join(splits)}")
    if saved.positions is not None and length > saved.positions:
        raise UserError(
            f"{data}: its blocks have {length} tokens, but the model has only {saved.positions} "
            "positions; use shorter blocks"
        )
