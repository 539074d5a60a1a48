"""What is noted while a run trains: times, losses, TensorBoard, and when it must stop."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from zeropods.measure.rank import Loss, RankMeasurement

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from zeropods.train.trainer import TextToSQLTrainer

log = logging.getLogger(__name__)


class Recorder(TrainerCallback):
    """Times every optimizer step apart from evaluation and saving, and keeps the losses."""

    def __init__(self, measured: RankMeasurement, process_began: float) -> None:
        """`process_began`: `time.time()` at the start of the process."""
        self.measured = measured
        self.process_began = process_began
        self.mark = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.measured.start_seconds = time.time() - self.process_began
        self.measured.step = self.measured.first_step = state.global_step
        self.mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.measured.step_seconds.append(self._lap())
        self.measured.step = state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        self._lap()
        self.measured.evaluate_seconds.append(about["metrics"]["eval_runtime"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.measured.save_seconds.append(self._lap())

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        logs = about["logs"]
        for key, entries in (("loss", self.measured.losses), ("eval_loss", self.measured.eval_losses)):
            if key in logs:
                entries.append(Loss(step=state.global_step, loss=logs[key]))
                log.info("step %d %s %.6g", state.global_step, key, logs[key])

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self.mark = now - self.mark, now
        return lap


class EpochOrder(TrainerCallback):
    """Tells the sampler its epoch.

    transformers does so too, but does not reach it on several processes once a resumed run has skipped rows
    of its first epoch: that epoch would have the order of epoch 0.
    """

    def __init__(self, trainer: TextToSQLTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.sampler is not None:
            self.trainer.sampler.set_epoch(int(state.epoch))


class LossCurves(TrainerCallback):
    """Training and validation loss in one TensorBoard chart: one tag, two runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers: dict[str, SummaryWriter] = {}

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        logs = about["logs"]
        if "loss" in logs:
            self._add("train", "loss", logs["loss"], state.global_step)
            self._add("train", "learning_rate", logs["learning_rate"], state.global_step)
        if "eval_loss" in logs:
            self._add("validation", "loss", logs["eval_loss"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for writer in self.writers.values():
            writer.flush()

    def _add(self, run: str, tag: str, value: float, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if run not in self.writers:
            self.writers[run] = SummaryWriter(str(self.folder / run))
        self.writers[run].add_scalar(tag, value, step)


class TimeLimit(TrainerCallback):
    """Ends training when its time is up; one process only, since clocks differ."""

    def __init__(self, trainer: TextToSQLTrainer, measured: RankMeasurement) -> None:
        self.trainer = trainer
        self.measured = measured

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        began = self.trainer.began
        if began is not None and time.monotonic() - began >= self.trainer.seconds:
            self.measured.stopped_by = "time"
            control.should_training_stop = True
