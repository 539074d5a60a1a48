"""Run textsql_train.py without one of the measures that have no flag, to see what that measure
brings.

python -m benchmarks.gpu.without label-positions --model_id t5-small ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.training_args import OptimizerNames

from zeropods.errors import UserError, guarded
from zeropods.train import run, run_argv
from zeropods.train.engines import ddp
from zeropods.train.flags import RunArguments
from zeropods.train.job import Task
from zeropods.train.text2sql import T5ForTextToSQL

SCRIPT = "textsql_train.py"


def train_without(measure: str, flags: Sequence[str]) -> int:
    """Train as the script does, in this process, which stays changed afterwards."""
    if measure not in TAKEN:
        raise UserError(f"{measure!r}: no measure; expected {', '.join(TAKEN)}")
    TAKEN[measure]()
    return run_argv([SCRIPT, *flags])


def whole_logits(
    self: T5ForTextToSQL, *args: Any, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any
) -> Seq2SeqLMOutput:
    """`T5ForTextToSQL.forward` with a loss, over the logits of all positions, most of which are
    thrown away."""
    kwargs.pop("label_positions", None)
    hidden = self._decode(self._shift_right(labels), *args, **kwargs)
    scale = 1.0
    if self.config.scale_decoder_outputs:
        scale = self.model_dim**-0.5
    logits = self.lm_head(hidden * scale).flatten(0, 1).float()
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    items = num_items_in_batch
    if items is None:
        items = (labels != -100).sum()
    return Seq2SeqLMOutput(loss=total / items)


def _take_label_positions() -> None:
    """Compute logits at all positions."""
    setattr(T5ForTextToSQL, "forward", whole_logits)  # noqa: B010


def _take_running_ahead() -> None:
    """Make copies wait for the device, and masks too where nothing is compiled."""

    def decode(
        self: T5ForTextToSQL, ids: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.decoder(
            input_ids=ids,
            encoder_hidden_states=encoded,
            encoder_attention_mask=attention_mask,
            use_cache=False,
        ).last_hidden_state

    def waiting(settings: TrainingArguments) -> None:
        settings.accelerator_config.non_blocking = False

    setattr(T5ForTextToSQL, "_decode", decode)  # noqa: B010
    _change_settings(waiting)


def _take_fused_adamw() -> None:
    """Let AdamW step each tensor by several operations."""
    ours = ddp.adamw_settings

    def unfused_settings(arguments: RunArguments) -> dict[str, object]:
        return {**ours(arguments), "fused": False}

    # What transformers makes where the engine, as DeepSpeed's does, brings no optimizer.
    def unfused(settings: TrainingArguments) -> None:
        settings.optim = OptimizerNames.ADAMW_TORCH

    setattr(ddp, "adamw_settings", unfused_settings)  # noqa: B010
    _change_settings(unfused)


def _change_settings(change: Callable[[TrainingArguments], None]) -> None:
    """Let a run make the arguments of its trainer as it does, and change them then."""
    ours = run.training_arguments

    def changed(task: Task) -> TrainingArguments:
        settings = ours(task)
        change(settings)
        return settings

    setattr(run, "training_arguments", changed)  # noqa: B010


TAKEN: dict[str, Callable[[], None]] = {
    "label-positions": _take_label_positions,
    "running-ahead": _take_running_ahead,
    "fused-adamw": _take_fused_adamw,
}


def main() -> int:
    """Train without the measure that the command line names first, with the flags after it."""
    measure = ""
    if len(sys.argv) > 1:
        measure = sys.argv[1]
    return train_without(measure, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(guarded(main))
