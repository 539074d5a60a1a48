"""What one attempt measures of itself: its phases, steps, tokens, losses and memory.

TensorBoard's curves are here too.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.heartbeat import HeartbeatWriter
from zeropods.measure.mlflow_runs import Points
from zeropods.measure.record import BatchShape, LiveBytes, Loss, RankMeasurement, Statistics
from zeropods.measure.sampling import PEAKS, Counters, Cpu, Phases, Sampler
from zeropods.train.device import CudaCounters, gpu_by_nvml, gpu_name, held_bytes, synchronize
from zeropods.train.engines.base import Engine

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)


MOST_LOSSES = 4_096
"""Number of points at which a curve loses every second one; TensorBoard has all of them."""


class Meter(TrainerCallback):
    """Measures a rank while its context is entered, and can write the measurement at any time.

    As a callback of the trainer it times every optimizer step apart from evaluation and saving, and
    keeps the losses.
    """

    def __init__(
        self,
        folder: Path,
        measured: RankMeasurement,
        *,
        interval: float,
        age_seconds: float,
        is_one_text: bool = False,
    ) -> None:
        """Begin with phase `load`.

        Args:
            folder: the run folder.
            measured: receives losses and steps at once, the rest when it is written.
            interval: seconds between two samples of memory; 0: none.
            age_seconds: seconds since the process began.
            is_one_text: whether a row is one text in which some tokens carry a loss; otherwise it
                is a source and a target.
        """
        measured.machine = environment.machine()
        measured.gpu = gpu_name()
        self.folder = folder
        self.measured = measured
        self.is_one_text = is_one_text
        self.tokens = Tokens()
        """Tokens of the current step so far."""
        self._largest: BatchShape | None = None
        """Shape of the pass with the most tokens, padding included."""
        counters = Counters()
        if torch.cuda.is_available():
            counters = CudaCounters()
        self.phases = Phases(counters, age_seconds)
        self.failed_in: str | None = None
        """Phase in which an error was raised; None where there was none."""
        self.clock = StepClock()
        self.evaluate_seconds: list[float] = []
        self.save_seconds: list[float] = []
        self._gpu = gpu_by_nvml()
        self._energy_at_start = self._energy_joules()
        self.sampler = self._memory_sampler(interval)
        self.heartbeat = HeartbeatWriter(folder, measured.rank, self._phase)

    def _memory_sampler(self, interval: float) -> Sampler:
        """What samples this process's memory and the device's use, in a thread of its own."""
        device = self._gpu or Cpu()

        def read() -> dict[str, float | None]:
            return held_bytes() | device.read()

        path = self.folder / "memory" / f"{self.measured.rank}.csv"
        return Sampler(path, interval, read, self._phase)

    def _phase(self) -> str:
        return self.phases.phase

    def _energy_joules(self) -> float | None:
        """What the GPU has used since its driver was loaded; None where it does not say."""
        if self._gpu is None:
            return None
        return self._gpu.energy_joules()

    def __enter__(self) -> Meter:
        self.heartbeat.__enter__()
        self.sampler.__enter__()
        return self

    def __exit__(self, *about: object) -> None:
        error_type = about[0]
        if error_type is not None:
            # Where an inner phase has failed, it is known already.
            self.failed_in = self.failed_in or self.phases.phase
        self.sampler.__exit__(*about)
        self.heartbeat.__exit__(*about)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Enter a phase between steps.

        The device is waited for at both ends, and the phase counts in no step. The duration of each
        save is kept; a model that is saved within a checkpoint is part of the checkpoint's save.
        """
        synchronize()
        before = self.phases.enter(phase)
        began = time.perf_counter()
        self.heartbeat.mark()
        try:
            yield
            synchronize()
            if phase == "save" and before != phase:
                self.save_seconds.append(time.perf_counter() - began)
        except BaseException:
            self.failed_in = self.failed_in or phase
            raise
        finally:
            synchronize()
            self.phases.enter(before)
            self.heartbeat.mark()
            self.clock.restart()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Not 0 where the attempt goes on from a checkpoint.
        self.measured.first_step = state.global_step
        self.measured.step = state.global_step
        self.heartbeat.mark(state.global_step)
        self.heartbeat.training = True
        # Entering a phase ends the one before, `load`.
        self.phases.enter("first_step")
        by_phase, _peaks = self.phases.measured()
        self.measured.start_seconds = by_phase["load"].seconds
        self.clock.restart()

    def count(self, inputs: dict[str, Tensor]) -> None:
        """Count the tokens of a forward pass of a collator's batch.

        Without a mask none of them is padding.
        """
        rows, source_length = inputs["input_ids"].shape
        target_length = 0
        if not self.is_one_text:
            target_length = inputs["labels"].shape[1]
        padded_tokens = rows * (source_length + target_length)
        attention_mask = inputs.get("attention_mask")
        source_tokens: int | Tensor = rows * source_length
        if attention_mask is not None:
            source_tokens = attention_mask.sum()
        label_tokens = inputs["label_positions"].numel()
        self.tokens = Tokens(
            source=self.tokens.source + source_tokens,
            target=self.tokens.target + label_tokens,
            padded=self.tokens.padded + padded_tokens,
        )
        largest = self._largest
        if largest is None or padded_tokens > _padded_tokens(largest):
            self._largest = BatchShape(
                rows=rows,
                source_tokens=source_length,
                target_tokens=target_length,
                label_tokens=label_tokens,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        tokens = self.tokens
        self.tokens = Tokens()
        if isinstance(tokens.source, Tensor):
            # The copy to the CPU is under way; it has arrived when the step's mark is past.
            tokens = tokens._replace(source=tokens.source.to("cpu", non_blocking=True))
        self.clock.lap(tokens)
        self.measured.largest_batch = self._largest
        if self.phases.phase == "first_step":
            synchronize()
            self.phases.enter("steady")
        self.heartbeat.mark(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.training = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        self.evaluate_seconds.append(about["metrics"]["eval_runtime"])

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        logs = about["logs"]
        for key, curve in (
            ("loss", self.measured.losses),
            ("eval_loss", self.measured.eval_losses),
        ):
            if key in logs:
                _keep_loss(curve, key, state.global_step, logs[key])

    def write(self, measured: RankMeasurement) -> None:
        """Write what has been measured so far, whole steps only.

        Beside the measurement, `steps/N.npy` has the wall time of every step, (steps,) float32 in
        seconds.
        """
        steps = self.clock.steps()
        seconds = steps["seconds"]
        warmup = measured.warmup_steps
        measured.warmup_seconds = float(seconds[:warmup].sum())
        measured.step_seconds = Statistics.of(seconds[warmup:])
        measured.evaluate_seconds = Statistics.of(self.evaluate_seconds)
        measured.save_seconds = Statistics.of(self.save_seconds)
        measured.step = measured.first_step + len(steps)
        measured.source_tokens = int(steps["source_tokens"].sum())
        measured.target_tokens = int(steps["target_tokens"].sum())
        measured.padded_tokens = int(steps["padded_tokens"].sum())
        measured.phases, peaks = self.phases.measured()
        for key in PEAKS:
            setattr(measured, key, getattr(peaks, key))
        measured.wall_seconds = sum(phase.seconds for phase in measured.phases.values())
        measured.sampled = self.sampler.statistics()
        energy = self._energy_joules()
        if energy is not None and self._energy_at_start is not None:
            measured.energy_joules = energy - self._energy_at_start
        content = io.BytesIO()
        np.save(content, seconds.astype(np.float32))
        files.write_bytes(self.folder / "steps" / f"{measured.rank}.npy", content.getvalue())
        measured.ended_unix_seconds = time.time()
        measured.write(self.folder)


def _padded_tokens(batch: BatchShape) -> int:
    """Number of tokens of a batch, padding included."""
    return batch.rows * (batch.source_tokens + batch.target_tokens)


def _keep_loss(curve: list[Loss], key: str, step: int, loss: float) -> None:
    """Append a loss to a curve, which loses every second point where it has become long.

    Args:
        key: transformers' name of the loss.
    """
    if not math.isfinite(loss):
        remedy = "lower --learning_rate, or choose --precision fp32"
        raise UserError(f"step {step}: {key} {loss}; {remedy}")
    curve.append(Loss(step=step, loss=loss))
    if len(curve) == MOST_LOSSES:
        del curve[::2]
    log.info("step %d %s %.6g", step, key, loss)


# Times and tokens of optimizer steps, measured without making any step wait for the device.


class Tokens(NamedTuple):
    """Numbers of tokens of a step, on this rank."""

    source: int | Tensor = 0
    """A tensor where a GPU counts the tokens."""
    target: int = 0
    padded: int = 0


class Mark:
    """A moment in the device's work.

    It is a time of the process's clock, or an event in a GPU's queue of work. A CPU has done its
    work when a call returns; the host of a GPU runs ahead, and the event does not stop it.
    """

    def __init__(self) -> None:
        self.at = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def is_past(self) -> bool:
        """Whether the device has reached this moment."""
        if self.event is None:
            return True
        try:
            return self.event.query()
        except torch.AcceleratorError:
            # A device that has failed gets no further; what it did before stays measured.
            return False

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two moments that are past."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1_000


STEP = [
    ("seconds", "f8"),
    ("source_tokens", "f8"),
    ("target_tokens", "f8"),
    ("padded_tokens", "f8"),
]
"""Fields of the NumPy record of a finished optimizer step."""


class StepClock:
    """Times of training steps, without what happens between them."""

    def __init__(self, mark: Callable[[], Mark] = Mark) -> None:
        """`mark` returns the current moment."""
        self._mark = mark
        self._began = mark()
        self._laps: dict[int, tuple[Mark, Mark, Tokens]] = {}
        """Beginning, end and tokens of each step that the device may still be at, by its number."""
        self._count = 0
        """Number of steps that have ended here."""
        self._done = array("d")
        """Values of the steps that the device has done."""

    def restart(self) -> None:
        """Begin a step here; the time before it belongs to no step."""
        self._began = self._mark()

    def lap(self, tokens: Tokens) -> None:
        """End a step here, and begin the next one."""
        now = self._mark()
        self._laps[self._count] = (self._began, now, tokens)
        self._count += 1
        self._began = now

    def steps(self, first: int = 0) -> np.ndarray:
        """`STEP` of the steps that the device has done, from `first` on.

        An interruption anywhere leaves them right.
        """
        while True:
            # `_done` has the values of one step after the other, `len(STEP)` of each.
            number = len(self._done) // len(STEP)
            lap = self._laps.get(number)
            if lap is None:
                break
            began, ended, tokens = lap
            if not ended.is_past():
                break
            step = (
                ended.seconds_since(began),
                int(tokens.source),
                tokens.target,
                tokens.padded,
            )
            # All four values at once: an interruption cannot come between them.
            self._done.extend(step)
            del self._laps[number]
        values_from_first = self._done[len(STEP) * first :]
        return np.array(values_from_first).view(STEP)


# Bytes of a model's tensors while it trains: what ZeRO divides, as it is held in memory.


@dataclass(eq=False)
class LiveBytesRecorder(TrainerCallback):
    """Counts the bytes of parameters, gradients and optimizer states once.

    It does so at the second step of an attempt. The first step may still be different, since ZeRO-3
    learns in it what it will need; it is used where it is the only one. Parameters and gradients
    are counted before the optimizer's step, the optimizer's states after it.

    Each storage is counted once: tied weights, views into a flat buffer, and a partition that is
    its own master are one piece of memory. Padding of flat buffers counts. Buckets through which
    gradients and parameters travel do not, since they hold no state.
    """

    measured: RankMeasurement
    engine: Engine
    wrapped: Callable[[], object]
    """Returns the model as the engine has wrapped it."""
    due: bool = field(default=False, init=False)
    """Whether the bytes are counted at the current step."""
    before_step: tuple[int, int] | None = field(default=None, init=False)
    """Bytes of parameters and of gradients just before the optimizer's step, once counted."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        counted_step = self.measured.first_step
        has_second_step = state.max_steps > self.measured.first_step + 1
        if has_second_step:
            counted_step += 1
        self.due = state.global_step == counted_step
        if not self.due:
            return

        def count() -> None:
            self._count_before_step(about["model"], about["optimizer"])

        self.engine.call_before_step(self.wrapped(), count)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        # Where this comes too late, the engine has had them counted.
        if self.due and self.before_step is None:
            self._count_before_step(about["model"], about["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if self.due and self.before_step is not None:
            parameters, gradients = self.before_step
            tensors = self.engine.optimizer_states(about["optimizer"])
            self.measured.live_bytes = LiveBytes(
                parameters=parameters,
                gradients=gradients,
                optimizer=_bytes(tensors, besides=self.engine.parameters(about["model"])),
            )
        self.due = False

    def _count_before_step(self, model: nn.Module, optimizer: Any) -> None:
        gradients = self.engine.gradients(model, optimizer)
        self.before_step = (
            _bytes(self.engine.parameters(model)),
            _bytes(gradients, besides=self.engine.parameters(model)),
        )


def _bytes(tensors: Iterable[object], besides: Iterable[object] = ()) -> int:
    """Bytes of the storages that hold `tensors`, without those that also hold any of `besides`."""
    sizes = _storage_sizes(tensors)
    others = _storage_sizes(besides)
    return sum(size for address, size in sizes.items() if address not in others)


def _storage_sizes(tensors: Iterable[object]) -> dict[int, int]:
    """Bytes of the storages that hold these tensors, by address; what is no tensor is left out."""
    sizes = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


# TensorBoard's curves of a run.

USE = (
    "allocated_bytes",
    "resident_bytes",
    "utilization_percent",
    "memory_utilization_percent",
    "power_watts",
    "cpu_percent",
    "io_wait_percent",
)
"""Figures of a device that are drawn as curves."""


@dataclass(eq=False)
class Curves(TrainerCallback):
    """Draws training and validation loss in one chart, and figures of the steps between points.

    The losses have one tag, and are two runs to TensorBoard.
    """

    folder: Path
    """TensorBoard's folder in the run folder."""
    meter: Meter
    effective_batch_size: int
    points: Points | None = None
    """What sends the same figures to MLflow, where that was asked for."""
    writers: dict[str, SummaryWriter] = field(default_factory=dict, init=False)
    drawn_steps: int = field(default=0, init=False)
    """Number of steps whose figures are drawn."""

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        logs = about["logs"]
        curves: dict[str, dict[str, float]] = {}
        if "loss" in logs:
            curves["train"] = {
                "loss": logs["loss"],
                "learning_rate": logs["learning_rate"],
                **self._next_point(),
            }
        if "eval_loss" in logs:
            curves["validation"] = {
                "loss": logs["eval_loss"],
                "samples_per_second": logs["eval_samples_per_second"],
            }
        for run, values in curves.items():
            if run not in self.writers:
                self.writers[run] = SummaryWriter(str(self.folder / run))
            writer = self.writers[run]
            for tag, value in values.items():
                writer.add_scalar(tag, value, state.global_step)
        if self.points is not None:
            self.points.add(curves, state.global_step)
        if "eval_loss" in logs:
            # The last evaluation may come after training, where nothing else would write it out.
            self.writers["validation"].flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for writer in self.writers.values():
            writer.flush()

    def _next_point(self) -> dict[str, float]:
        """Memory and utilization now, and figures of the steps since the last point, if any; each
        step counts once.

        Those are the mean seconds of a step, the samples of all ranks per second, and the share of
        padding among this rank's tokens.
        """
        new_steps = self.meter.clock.steps(self.drawn_steps)
        self.drawn_steps += len(new_steps)
        now = {**self.meter.sampler.last, **held_bytes()}
        figures: dict[str, float] = {}
        for key in USE:
            value = now.get(key)
            if value is not None:
                figures[key] = value
        if len(new_steps):
            seconds = float(new_steps["seconds"].sum())
            real_tokens = float(new_steps["source_tokens"].sum())
            # Where a row is one text, its label tokens are among the source tokens.
            if not self.meter.is_one_text:
                real_tokens += float(new_steps["target_tokens"].sum())
            tokens_with_padding = float(new_steps["padded_tokens"].sum())
            figures["step_seconds"] = seconds / len(new_steps)
            figures["samples_per_second"] = self.effective_batch_size * len(new_steps) / seconds
            figures["padding_share"] = 1 - real_tokens / tokens_with_padding
        return figures
