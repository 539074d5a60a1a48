"""The task of `causal_train.py`: a causal language model on questions or text, one text in each row."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from zeropods import files
from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.prepare import Preparation, key_of_preparation, prepare
from zeropods.data.tokenizers import GPT_TINY
from zeropods.errors import UserError
from zeropods.plan.models import CAUSAL_TINY
from zeropods.tables import progress
from zeropods.train import processes
from zeropods.train.arguments import MAX_SEQ_LENGTH, OWN, TASKS, CausalArguments, RunArguments
from zeropods.train.causal_models import check_attention, load_causal, positions_of
from zeropods.train.pretrained import check_source
from zeropods.train.sampler import Prepared, Row, load_split, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zeropods.train.trainer import MeasuredTrainer

GENERATED = "generated.json"
"""What the trained model goes on with after `--generation_prompt`, in the run folder."""


class Causal:
    """Causal language modelling, as `job.Task` has it."""

    flags: ClassVar[type[RunArguments]] = CausalArguments
    joint: ClassVar[bool] = True

    def __init__(self, arguments: CausalArguments) -> None:
        self.arguments = arguments

    def check(self, precision: str) -> None:
        """Refuse an attention that cannot run, and a model that is not there."""
        check_attention(self.arguments.attn_implementation, precision)
        check_source(self.arguments)

    @property
    def is_prepared(self) -> bool:
        """Whether `--data` is a prepared set."""
        return (self._given / FILE).is_file()

    def prepare(self) -> None:
        """Make `data/` of the run folder where it is not there yet; a set of other data is never replaced."""
        if self.is_prepared:
            return
        if (self._folder / FILE).is_file():
            made = read_manifest(self._folder)
            if made.content_key != key_of_preparation(self._wanted, made):
                raise UserError(
                    f"{self._folder}: was prepared from other data, or with other settings, than --data "
                    f"{self.arguments.data} now has; choose another --outputdir"
                )
            return
        saved = files.said_in_one_line(
            self._folder, "the prepared data", "free some space on the disk, then call again"
        )
        with progress("prepare", "rows") as bar, saved:
            prepare(self._wanted, self._folder, bar.update)

    def data(self) -> Prepared:
        """The set at `--data`, or the one that was made of it."""
        whole, a = Prepared.read(self._folder), self.arguments
        if whole.tokenizer.pad_token_id is None:
            raise UserError(f"{self._folder}: its tokenizer has no token to pad with; prepare the data again")
        # Of raw data the subset was prepared.
        subset = a.subset if self.is_prepared else None
        evaluated = a.max_eval_steps and a.max_eval_steps * a.per_device_eval_batch_size
        dev = None if whole.dev is None else whole.dev.first(subset).first(evaluated)
        return Prepared(whole.folder, whole.manifest, whole.train.first(subset), dev)

    def settings(self, data: Prepared) -> dict[str, object]:
        """The flags, with the data's own in the place of those that the data decide."""
        return {**self._said_by(data).comparable(), "data": data.manifest.content_key}

    def model(self, data: Prepared) -> PreTrainedModel:
        """A causal model; one for questions carries the prompt, so that it knows how it wants to be asked."""
        model = load_causal(self._said_by(data), data.tokenizer)
        if self.arguments.generation_prompt is not None:
            _check_prompt(self.arguments.generation_prompt, data, positions_of(model.config))
        if data.manifest.task == "squad":
            model.config.prompt = data.manifest.prompt
        return model

    def batch(self, data: Prepared, rows: list[Row]) -> dict[str, Tensor]:
        """Rows padded to the longest."""
        return collate_causal(rows, data.tokenizer.pad_token_id)

    def score(self, trainer: MeasuredTrainer, data: Prepared, folder: Path) -> str:
        """Write the perplexity of text over all ranks, and what the model goes on with after a prompt."""
        scored = ""
        if data.manifest.task == "lm" and self.arguments.max_eval_steps is None:
            test = load_split(data.folder, "test")
            sums = {"dev": trainer.evaluated, "test": None if test is None else trainer.summed_loss(test)}
            scored = processes.on_rank_zero(lambda: _write_scores(folder, sums))
        prompt = self.arguments.generation_prompt
        if prompt is not None:
            processes.on_rank_zero(lambda: _write_sample(folder, prompt))
        return scored

    @property
    def _given(self) -> Path:
        return Path(self.arguments.data)

    @property
    def _folder(self) -> Path:
        """Where the prepared set is, or will be."""
        return self._given if self.is_prepared else self.arguments.run_folder / OWN

    @cached_property
    def _wanted(self) -> Preparation:
        a = self.arguments
        task = a.task or TASKS[0]
        # The small models of ours have a tokenizer that is trained on the data.
        tiny = a.init == "random" and a.model_id in CAUSAL_TINY
        return Preparation(
            task=task,
            data=self._given if self._given.is_dir() or task == "squad" else a.data,
            tokenizer=a.tokenizer_name or (GPT_TINY if tiny else a.model_id),
            max_seq_length=a.max_seq_length or MAX_SEQ_LENGTH,
            loss_on=a.loss_on,
            limit=a.subset,
            dataset_config=a.dataset_config,
            text_field=a.text_field or "text",
        )

    def _said_by(self, data: Prepared) -> CausalArguments:
        """The flags, with those filled in that a prepared set decides."""
        manifest = data.manifest
        return replace(
            self.arguments, task=manifest.task, max_seq_length=manifest.max_seq_length, loss_on=manifest.loss_on
        )


def collate_causal(rows: list[Row], pad: int) -> dict[str, Tensor]:
    """Pad rows of (token ids, labels) on the right, to the longest of the batch.

    Returns:
        input_ids: (rows, tokens) int64.
        attention_mask: the same shape, 1 for a token and 0 for a pad; left out where no row is padded.
        labels: the same shape, not shifted; -100 where there is no loss, and at first tokens, which nothing predicts.
        label_positions: (n,) int64, flat positions p of the tokens that predict a label: the one at p + 1.
    """
    ids, is_token = padded([row[0] for row in rows], pad)
    labels, _ = padded([row[1] for row in rows], -100)
    labels[:, 0] = -100
    batch = {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "label_positions": torch.from_numpy(np.flatnonzero(labels.ravel()[1:] != -100)),
    }
    if not is_token.all():
        batch["attention_mask"] = torch.from_numpy(is_token.astype(np.int64))
    return batch


def _check_prompt(prompt: str, data: Prepared, positions: int | None) -> None:
    """Refuse before training what could not be gone on with after it."""
    tokens = len(data.tokenizer(prompt).input_ids)
    if not prompt.strip() or tokens == 0:
        raise UserError(f"--generation_prompt {prompt!r}: no words; give some to continue")
    if positions is not None and tokens >= positions:
        raise UserError(f"--generation_prompt: {tokens} tokens, the model has {positions} positions; shorten it")


def _write_scores(folder: Path, sums: dict[str, tuple[float, int] | None]) -> str:
    """Write the score of each split; returns the last one's perplexity in words."""
    from zeropods.evaluate.score_file import text_score

    said = ""
    for split, found in sums.items():
        if found is not None:
            score = text_score(*found)
            score.write(folder, split)
            said = f"perplexity {score.perplexity:.4g} ({split})"
    return said


def _write_sample(folder: Path, prompt: str) -> None:
    from zeropods.evaluate.generate import sample_text

    files.write_json(folder / GENERATED, asdict(sample_text(folder / "model", prompt)))
