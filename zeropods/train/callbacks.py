"""How a trainer's epochs begin, and when it must stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from zeropods.measure.rank import RankMeasurement

if TYPE_CHECKING:
    from zeropods.train.trainer import MeasuredTrainer


class EpochOrder(TrainerCallback):
    """Tells the sampler its epoch.

    transformers does so too, but does not reach it on several processes once a resumed run has skipped rows
    of its first epoch: that epoch would have the order of epoch 0.
    """

    def __init__(self, trainer: MeasuredTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.sampler is not None:
            self.trainer.sampler.set_epoch(int(state.epoch))


class TimeLimit(TrainerCallback):
    """Ends training when its time is up; one process only, since clocks differ."""

    def __init__(self, trainer: MeasuredTrainer, measured: RankMeasurement) -> None:
        self.trainer = trainer
        self.measured = measured

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        began = self.trainer.began
        if began is not None and time.monotonic() - began >= self.trainer.seconds:
            self.measured.stopped_by = "time"
            control.should_training_stop = True
