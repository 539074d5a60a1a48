"""The tasks of a model, one class of `Answerer` each: queries, answers, and text, whose tokens it predicts.

What the first two answer is written into a file, which `zeropods.evaluate.score` scores without the model. A text has
no answers to keep: its score, the perplexity, is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.prepare import CausalPreparation
from zeropods.data.tokenizers import fingerprint, with_ends
from zeropods.errors import UserError
from zeropods.evaluate.generate import (
    DEFAULT_LENGTH,
    Answerer,
    Generation,
    Progress,
    QueryAnswerer,
    QuestionAnswerer,
    Speed,
)
from zeropods.evaluate.models import load_model, task_of, trained_length
from zeropods.evaluate.score import write_predictions
from zeropods.evaluate.score_file import LM, SQUAD, TEXT2SQL, TextScore, text_score
from zeropods.train.sampler import load_split

Block = tuple[np.ndarray, np.ndarray]
"""Token ids of a block, and labels: -100 where nothing is predicted."""


@dataclass(frozen=True)
class TextAnswerer(Answerer[Block, tuple[float, int]]):
    """A causal model that predicts every token of a text: nats and number of predicted tokens of each block."""

    usual = Generation(batch_size=4)
    own_options = ("max_seq_length", "dataset_config", "text_field")

    source: str
    max_seq_length: int | None = None
    """Tokens per block of raw text; if not given, what the run was trained on, else 512 or as many as the model has
    positions for."""
    dataset_config: str | None = None
    """Configuration of raw text at the hub, as `zeropods prepare` has it; `text_field` too."""
    text_field: str = "text"

    @classmethod
    def load(cls, source: str | Path, precision: str = "fp32", **options: Any) -> TextAnswerer:
        """From a run folder, a model folder or a hub id, with the task's own options."""
        return cls(load_model(source, precision, causal=True), str(source), **options)

    def _read(self, data: str | Path, split: str, limit: int | None) -> Iterable[Block]:
        """Blocks of a set that was prepared with the model's tokenizer, or of raw text, cut as for training."""
        prepared = (Path(data) / FILE).is_file()
        return self._prepared(Path(data), split)[:limit] if prepared else self._cut(str(data), split, limit)

    def _prepared(self, data: Path, split: str) -> list[Block]:
        manifest = read_manifest(data)
        if self.max_seq_length is not None:
            raise UserError(f"--max-seq-length {self.max_seq_length}: {data} is in blocks already; leave it out")
        if manifest.task != LM:
            raise UserError(f"{data}: prepared for {manifest.task}; perplexity is of text: prepare it with --task lm")
        if manifest.tokenizer_fingerprint != fingerprint(self.tokenizer):
            raise UserError(f"{data}: prepared with another tokenizer than the model's; give the raw text")
        self._check(data, manifest.max_seq_length or 0, split, list(manifest.splits))
        rows = load_split(data, split)
        return [] if rows is None else [rows[i] for i in range(len(rows))]

    def _cut(self, data: str, split: str, limit: int | None) -> list[Block]:
        length = self.max_seq_length or trained_length(self.source)
        length = length or min(DEFAULT_LENGTH, self.saved.positions or DEFAULT_LENGTH)
        wanted = CausalPreparation(
            task=LM, data=data, tokenizer=self.source, max_seq_length=length, limit=limit,
            dataset_config=self.dataset_config, text_field=self.text_field,
        )  # fmt: skip
        corpus = wanted.open()
        self._check(data, length, split, corpus.splits)
        rows = corpus.rows(split, with_ends(self.source, self.tokenizer), lambda documents: None)
        return list(zip(rows.input_ids, rows.labels, strict=True))

    def _check(self, data: str | Path, length: int, split: str, splits: list[str]) -> None:
        if split not in splits:
            raise UserError(f"{data}: no split {split!r} in it; expected {' or '.join(splits)}")
        if self.saved.positions is not None and length > self.saved.positions:
            raise UserError(
                f"{data}: blocks of {length} tokens, the model has {self.saved.positions} positions; cut shorter"
            )

    def _encoded(self, examples: Sequence[Block], how: Generation) -> list[np.ndarray]:
        return [ids for ids, _ in examples]

    def _batch(self, examples: list[Block], ids: list[Any], how: Generation) -> list[tuple[float, int]]:
        columns = zip(*examples, strict=True)
        inputs, labels = (
            pad_sequence([torch.tensor(row).long() for row in rows], batch_first=True, padding_value=filler)
            for rows, filler in zip(columns, (0, -100), strict=True)
        )
        with torch.inference_mode():
            # Padding is on the right, where a causal model sees it after all that is predicted.
            logits = self.saved.model(input_ids=inputs.to(self.saved.model.device), use_cache=False).logits
            # Row by row: in FP32 the logits of a batch would be there a second time.
            return [
                (float(cross_entropy(row.float(), wanted.to(row.device), reduction="sum")), int((wanted >= 0).sum()))
                for row, wanted in zip(logits[:, :-1], labels[:, 1:], strict=True)
            ]


TASKS: dict[str, type[QueryAnswerer] | type[QuestionAnswerer] | type[TextAnswerer]] = {
    TEXT2SQL: QueryAnswerer,
    SQUAD: QuestionAnswerer,
    LM: TextAnswerer,
}


def answer_task(model: Path, asked: str | None = None) -> str:
    """The task of a model: `asked`, else what the model says; `UserError` where it answers no questions."""
    task = asked or task_of(model)
    if task == LM:
        raise UserError(f"{model}: trained on text, it answers nothing; see zeropods perplexity, or --task")
    return task


def predict(
    model: Path,
    data: Path,
    split: str,
    out: Path,
    how: Generation | None = None,
    *,
    task: str | None = None,
    precision: str = "fp32",
    limit: int | None = None,
    progress: Progress = lambda rows: None,
    **options: Any,
) -> Speed:
    """Write an answer to each example of a split (its first `limit`), atomically, and time it.

    Args:
        model: run folder, model folder, or hub id of a causal model.
        task: for a model that does not say its own.
        options: the task's own: `prompt` of text2sql; `max_seq_length` of squad, the most tokens of prompt and answer
            together. None leaves them to the model.

    Raises:
        UserError: a model, data or option that does not fit the task.
    """
    task = answer_task(model, task)
    given = {name: value for name, value in options.items() if value is not None}
    unconstrained = ["unconstrained"] if how is not None and not how.constrained and task != TEXT2SQL else []
    for name in [*(given.keys() - {*TASKS[task].own_options}), *unconstrained]:
        other = SQUAD if name in QuestionAnswerer.own_options else TEXT2SQL
        raise UserError(f"--{name.replace('_', '-')}: is for {other}, this is {task}; leave it out")
    answerer: Answerer[Any, Any] = TASKS[task].load(model, precision, **given)
    answers, speed = answerer.timed(answerer.examples(data, split, limit), how, progress)
    write_predictions(out, answers)
    return speed


def text_perplexity(
    source: str | Path,
    data: str | Path,
    split: str,
    *,
    limit: int | None = None,
    batch_size: int = TextAnswerer.usual.batch_size,
    precision: str = "fp32",
    progress: Progress = lambda blocks: None,
    **options: Any,
) -> TextScore:
    """Loss and perplexity of a model over the blocks of a split, the same before and after training.

    Args:
        source: run folder, model folder or hub id.
        data: a prepared set, or raw text as `zeropods prepare --task lm` takes it.
        limit: only the first so many blocks of a prepared set, or documents of raw text.
        options: those of `TextAnswerer`.

    Raises:
        UserError: a split that is not there, another tokenizer, blocks longer than the model's positions.
    """
    how = Generation(batch_size=batch_size)
    answerer = TextAnswerer.load(source, precision, **options)
    found = answerer.answer(answerer.examples(data, split, limit), how, progress)
    return text_score(sum(nats for nats, _ in found), sum(tokens for _, tokens in found))
