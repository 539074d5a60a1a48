"""The recipe of `causal_train.py`: a causal language model on questions or text, one text in each row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zeropods import atomic
from zeropods.errors import UserError
from zeropods.train import processes
from zeropods.train.attention import check_attention
from zeropods.train.causal_arguments import CausalArguments
from zeropods.train.causal_batch import collate_causal
from zeropods.train.causal_config import positions_of
from zeropods.train.causal_data import CausalData
from zeropods.train.causal_model import load_causal, shape_of
from zeropods.train.dataset import Row, load_split
from zeropods.train.recipe import Prepared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zeropods.train.trainer import MeasuredTrainer

GENERATED = "generated.json"
"""What the trained model goes on with after `--generation_prompt`, in the run folder."""


class Causal:
    """Causal language modelling, as `recipe.Recipe` has it."""

    joint = True

    def __init__(self, arguments: CausalArguments) -> None:
        self.arguments = arguments
        self.data = CausalData(arguments)

    def check(self, precision: str) -> None:
        """Refuse an attention that cannot run, and data that are not there."""
        check_attention(self.arguments.attn_implementation, precision)
        self.data.check()

    def found(self) -> Prepared | None:
        """The set at `--data`; None where that is raw data."""
        return self.data.read() if self.data.is_prepared else None

    def prepare(self) -> None:
        """Make `data/` of the run folder from raw data."""
        self.data.prepare()

    def prepared(self) -> Prepared:
        """The set at `--data`, or the one that was made of it."""
        return self.data.read()

    def settings(self, data: Prepared) -> dict[str, Any]:
        """The flags, with the data's own in the place of those that the data decide."""
        return {**self._said_by(data).comparable(), "data": data.manifest.content_key}

    def model(self, data: Prepared, precision: str) -> PreTrainedModel:
        """A causal model; one for questions carries the prompt, so that it knows how it wants to be asked."""
        model = load_causal(self._said_by(data), data.tokenizer, precision=precision)
        if self.arguments.generation_prompt is not None:
            _check_prompt(self.arguments.generation_prompt, data, positions_of(model.config))
        if data.manifest.task == "squad":
            model.config.prompt = data.manifest.prompt
        return model

    def shape(self, model: PreTrainedModel) -> dict[str, Any] | None:
        """The numbers of `plan.causal_shapes.CausalShape`."""
        return shape_of(model.config)

    def collate(self, data: Prepared, rows: list[Row]) -> dict[str, Tensor]:
        """Rows padded to the longest."""
        return collate_causal(rows, data.tokenizer.pad_token_id)

    def architecture(self, model: PreTrainedModel) -> str:
        """The model's class, of which ours differs in its loss alone."""
        return type(model).__name__

    def conclude(self, trainer: MeasuredTrainer, data: Prepared, folder: Path) -> None:
        """Write the perplexity of text, and what the model goes on with after a prompt."""
        if data.manifest.task == "lm" and self.arguments.max_eval_steps is None:
            _write_perplexities(trainer, data, folder)
        if self.arguments.generation_prompt is not None:
            prompt, seed = self.arguments.generation_prompt, self.arguments.seed
            processes.on_rank_zero(lambda: _write_sample(folder, prompt, seed))

    def _said_by(self, data: Prepared) -> CausalArguments:
        """The flags, with those filled in that a prepared set decides."""
        manifest = data.manifest
        return replace(
            self.arguments, task=manifest.task, max_seq_length=manifest.max_seq_length, loss_on=manifest.loss_on
        )


def _check_prompt(prompt: str, data: Prepared, positions: int | None) -> None:
    """Refuse before training what could not be gone on with after it."""
    tokens = len(data.tokenizer(prompt).input_ids)
    if not prompt.strip() or tokens == 0:
        raise UserError(f"--generation_prompt {prompt!r}: no words; give some to go on from")
    if positions is not None and tokens >= positions:
        raise UserError(f"--generation_prompt: {tokens} tokens, the model has {positions} positions; shorten it")


def _write_perplexities(trainer: MeasuredTrainer, data: Prepared, folder: Path) -> None:
    """`score.SPLIT.json` of the whole dev and test splits, by the loss over all their tokens and ranks."""
    test = load_split(data.folder, "test")
    sums = {"dev": trainer.evaluated, "test": None if test is None else trainer.summed_loss(test)}
    processes.on_rank_zero(lambda: _write_scores(folder, sums))


def _write_scores(folder: Path, sums: dict[str, tuple[float, int] | None]) -> None:
    from zeropods.evaluate.perplexity import write_perplexity

    for split, found in sums.items():
        if found is not None:
            write_perplexity(folder, split, loss_sum=found[0], tokens=found[1])


def _write_sample(folder: Path, prompt: str, seed: int) -> None:
    from zeropods.evaluate.sample_text import sample_text

    atomic.write_json(folder / GENERATED, sample_text(folder / "model", prompt, seed=seed).to_json())
