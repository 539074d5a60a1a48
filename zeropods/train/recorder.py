"""Follows a trainer: its steps, phases, losses, and the bytes of its tensors."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import TrainerCallback

from zeropods.errors import UserError
from zeropods.measure.rank import Loss, RankMeasurement
from zeropods.train.live_bytes import LiveBytesCount
from zeropods.train.meter import Meter
from zeropods.train.token_count import TokenCount

log = logging.getLogger(__name__)


class Recorder(TrainerCallback):
    """Times every optimizer step apart from evaluation and saving, and keeps the losses."""

    def __init__(self, measured: RankMeasurement, meter: Meter) -> None:
        self.measured = measured
        self.meter = meter
        self.tokens = TokenCount()
        """Of the step that goes on; a trainer puts its own here."""

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase between steps; how long saving takes is kept, a model within a checkpoint with it."""
        outermost = self.meter.phases.phase != phase
        with self.meter.within(phase):
            began = time.perf_counter()
            yield
            self.meter.clock.settle()
            if phase == "save" and outermost:
                self.measured.save_seconds.append(time.perf_counter() - began)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.measured.first_step = self.measured.step = state.global_step
        self.meter.beating.mark(state.global_step)
        self.meter.beating.training = True
        self.meter.phases.enter("first_step")
        self.measured.start_seconds = self.meter.phases.measured()[0]["load"].seconds
        self.meter.clock.restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.clock.lap(self.tokens.take())
        self.measured.largest_batch = self.tokens.largest
        if self.meter.phases.phase == "first_step":
            self.meter.clock.settle()
            self.meter.phases.enter("steady")
        self.meter.beating.mark(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.beating.training = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        self.measured.evaluate_seconds.append(about["metrics"]["eval_runtime"])

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        logs = about["logs"]
        for key, entries in (("loss", self.measured.losses), ("eval_loss", self.measured.eval_losses)):
            if key in logs:
                _refuse_nonsense(state.global_step, key, logs[key])
                entries.append(Loss(step=state.global_step, loss=logs[key]))
                log.info("step %d %s %.6g", state.global_step, key, logs[key])


class LiveBytesRecorder(TrainerCallback):
    """Counts the bytes of parameters, gradients and optimizer states once, at the second step of an attempt.

    The first one may still be different: ZeRO-3 learns in it what it will need. It is taken where it is the only one.
    """

    def __init__(self, measured: RankMeasurement, engine: Callable[[], Any]) -> None:
        """`engine` gives DeepSpeed's, None where there is none."""
        self.measured = measured
        self.engine = engine
        self.count = LiveBytesCount()
        self._due = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        wanted = self.measured.first_step + (state.max_steps > self.measured.first_step + 1)
        self._due = state.global_step == wanted
        engine = self.engine()
        if self._due and engine is not None:
            # DeepSpeed reduces, steps and drops the gradients inside of the backward pass, as accelerate sees it.
            _before_next_step(engine, partial(self.count.before_step, about["model"], about["optimizer"]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if self._due and self.engine() is None:
            self.count.before_step(about["model"], about["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if self._due:
            self.measured.live_bytes = self.count.after_step(about["model"], about["optimizer"])
            self._due = False


def _before_next_step(engine: Any, act: Callable[[], None]) -> None:
    """Call `act` before the next `engine.step()`, and only before that."""
    step = engine.step

    def counted(*arguments: Any, **options: Any) -> Any:
        del engine.step
        act()
        return step(*arguments, **options)

    engine.step = counted


def _refuse_nonsense(step: int, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise UserError(f"step {step}: {name} {value}; lower --learning_rate, or take --precision fp32")
