"""TensorBoard's curves of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from zeropods.train.meter import Meter
from zeropods.train.step_clock import TimedStep

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MEMORY = ("allocated_bytes", "resident_bytes")


class Curves(TrainerCallback):
    """Training and validation loss in one chart (one tag, two runs), and what the steps since the last point took."""

    def __init__(self, folder: Path, meter: Meter, effective_batch_size: int, *, joint: bool = False) -> None:
        """Curves in TensorBoard's files.

        Args:
            folder: TensorBoard's, in the run folder.
            joint: whether label tokens are among the source's.
        """
        self.folder = folder
        self.joint = joint
        self.meter = meter
        self.effective_batch_size = effective_batch_size
        self.writers: dict[str, SummaryWriter] = {}
        self._drawn = 0

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        logs = about["logs"]
        if "loss" in logs:
            self._add("train", {key: logs[key] for key in ("loss", "learning_rate")}, state.global_step)
            self._add("train", self._since_last_point(), state.global_step)
        if "eval_loss" in logs:
            validation = {"loss": logs["eval_loss"], "samples_per_second": logs["eval_samples_per_second"]}
            self._add("validation", validation, state.global_step)
            # The last evaluation may come after training, where nothing else would write it out.
            self.writers["validation"].flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for writer in self.writers.values():
            writer.flush()

    def _since_last_point(self) -> dict[str, float]:
        steps = self.meter.clock.steps()
        fresh, self._drawn = steps[self._drawn :], len(steps)
        memory = {key: value for key, value in self.meter.read().items() if key in MEMORY and value is not None}
        return memory | (_figures(fresh, self.effective_batch_size, self.joint) if fresh else {})

    def _add(self, run: str, values: dict[str, float], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if run not in self.writers:
            self.writers[run] = SummaryWriter(str(self.folder / run))
        for tag, value in values.items():
            self.writers[run].add_scalar(tag, value, step)


def _figures(steps: Sequence[TimedStep], effective_batch_size: int, joint: bool) -> dict[str, float]:
    """Mean seconds a step, samples of all ranks a second, and the share of this rank's tokens that is padding."""
    seconds = sum(step.seconds for step in steps)
    real = sum(int(step.tokens.source) + (0 if joint else step.tokens.target) for step in steps)
    padded = sum(step.tokens.padded for step in steps)
    return {
        "step_seconds": seconds / len(steps),
        "samples_per_second": effective_batch_size * len(steps) / seconds,
        "padding_share": 1 - real / padded,
    }
