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
"""Number of points at which a loss curve of the record loses every second one; TensorBoard has all
of them."""


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
            measured: receives the machine, the GPU's name, losses and the number of the first step
                as soon as they are known; everything else when it is passed to `write`.
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
        self._largest_batch: BatchShape | None = None
        """Shape of the batch of one forward pass with the most tokens, padding included."""
        counters = Counters()
        if torch.cuda.is_available():
            counters = CudaCounters()
        self.phases = Phases(counters, age_seconds)
        self.failed_in: str | None = None
        """The innermost phase in which an error was raised; None where there was none."""
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
        """Energy that the GPU has used since its driver was loaded, in joules.

        None without a GPU, or where the GPU does not report it.
        """
        if self._gpu is None:
            return None
        return self._gpu.energy_joules()

    def __enter__(self) -> Meter:
        self.heartbeat.__enter__()
        self.sampler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        error_type = error[0]
        # `within` has already noted the phase of an error that was raised inside it.
        if error_type is not None and self.failed_in is None:
            self.failed_in = self.phases.phase
        self.sampler.__exit__(*error)
        self.heartbeat.__exit__(*error)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Be in a phase during the block, and afterwards in the one before it again.

        The block must lie between two steps: the step clock starts anew behind it, so that the
        block's time counts in no step. The device is waited for at both ends. The duration of a
        save is added to `save_seconds`; a model that is saved within a checkpoint is part of the
        checkpoint's save. The phase of an error is kept in `failed_in`.
        """
        synchronize()
        outer_phase = self.phases.enter(phase)
        began = time.perf_counter()
        self.heartbeat.mark()
        try:
            yield
            # Here too, so that an error of the device counts as one of this phase, and its work as
            # part of the save.
            synchronize()
            if phase == "save" and outer_phase != "save":
                self.save_seconds.append(time.perf_counter() - began)
        except BaseException:
            # An error passes the innermost phase first.
            if self.failed_in is None:
                self.failed_in = phase
            raise
        finally:
            synchronize()
            self.phases.enter(outer_phase)
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
        """Add the tokens of a forward pass to those of the current step; keep the largest batch.

        Args:
            inputs: what the task's `batch` returned. Without an `attention_mask` none of its source
                tokens is padding.
        """
        rows, source_length = inputs["input_ids"].shape
        target_length = 0
        if not self.is_one_text:
            target_length = inputs["labels"].shape[1]
        padded_tokens = rows * (source_length + target_length)
        attention_mask = inputs.get("attention_mask")
        source_tokens: int | Tensor = rows * source_length
        if attention_mask is not None:
            # It stays a tensor: a GPU would have to finish its work before this is a number.
            source_tokens = attention_mask.sum()
        label_tokens = inputs["label_positions"].numel()
        self.tokens = Tokens(
            source=self.tokens.source + source_tokens,
            target=self.tokens.target + label_tokens,
            padded=self.tokens.padded + padded_tokens,
        )
        largest = self._largest_batch
        if largest is None or padded_tokens > _padded_tokens(largest):
            self._largest_batch = BatchShape(
                rows=rows,
                source_tokens=source_length,
                target_tokens=target_length,
                label_tokens=label_tokens,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        tokens = self.tokens
        self.tokens = Tokens()
        if isinstance(tokens.source, Tensor):
            # This only begins the copy. In the device's queue it comes before the mark that `lap`
            # sets, so it has arrived when that mark is past; the number is read only then.
            tokens = tokens._replace(source=tokens.source.to("cpu", non_blocking=True))
        self.clock.lap(tokens)
        self.measured.largest_batch = self._largest_batch
        if self.phases.phase == "first_step":
            # Once only: peaks of the first step's work must not count in the phase after it.
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
        """Complete a measurement with the figures so far, whole steps only, and write it.

        Beside the measurement, `steps/N.npy` of rank N has the wall time of every step of this
        attempt, (steps,) float32 in seconds.

        Args:
            measured: `self.measured`, or a copy of it with another status; it is changed.
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
    """Append a loss to a curve, and log it; thin the curve out once it has `MOST_LOSSES` points.

    Args:
        key: transformers' name of the loss, for messages.

    Raises:
        UserError: the loss is infinite or not a number.
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
    """Tokens of the sources, without padding; a tensor where they were counted by a mask."""
    target: int = 0
    """Tokens that carry a loss."""
    padded: int = 0
    """Tokens of sources and targets, padding included."""


class Mark:
    """A moment in the device's work.

    It is a time of the process's clock, or an event in a GPU's queue of work. A CPU has done its
    work when a call returns; the host of a GPU runs ahead, and the event does not stop it.
    """

    def __init__(self) -> None:
        self.at = time.perf_counter()
        """Seconds of the host's clock when this mark was made."""
        self.event: torch.cuda.Event | None = None
        """The event in the GPU's queue; None on a CPU."""
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
    """Times of training steps, without what happens between them.

    The host ends a step with `lap` and runs ahead; `steps` later reads the times of those that the
    device has finished too. Steps are numbered from 0.
    """

    def __init__(self, mark: Callable[[], Mark] = Mark) -> None:
        """`mark` returns the current moment."""
        self._mark = mark
        self._began = mark()
        self._laps: dict[int, tuple[Mark, Mark, Tokens]] = {}
        """Beginning, end and tokens of each step that the device may still be at, by its number."""
        self._laps_ended = 0
        """Number of steps that the host has ended."""
        self._finished_values = array("d")
        """The fields of `STEP` of each step that the device has finished, one step after the
        other."""

    def restart(self) -> None:
        """Begin a step here; the time before it belongs to no step."""
        self._began = self._mark()

    def lap(self, tokens: Tokens) -> None:
        """End a step here, and begin the next one."""
        now = self._mark()
        self._laps[self._laps_ended] = (self._began, now, tokens)
        self._laps_ended += 1
        self._began = now

    def steps(self, first: int = 0) -> np.ndarray:
        """The steps that the device has finished, from step `first` on: (steps,) records of `STEP`.

        It moves newly finished steps out of `_laps`. A signal may interrupt it anywhere and the
        next call is still right: the number of the next step follows from `_finished_values`.
        """
        while True:
            number = len(self._finished_values) // len(STEP)
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
            self._finished_values.extend(step)
            del self._laps[number]
        values_from_first = self._finished_values[len(STEP) * first :]
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
    is_due: bool = field(default=False, init=False)
    """Whether the bytes are counted at the current step."""
    before_step: tuple[int, int] | None = field(default=None, init=False)
    """Bytes of parameters and of gradients just before the optimizer's step, once counted."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        counted_step = self.measured.first_step
        has_second_step = state.max_steps > self.measured.first_step + 1
        if has_second_step:
            counted_step += 1
        self.is_due = state.global_step == counted_step
        if not self.is_due:
            return

        def count() -> None:
            self._count_before_step(about["model"], about["optimizer"])

        self.engine.call_before_step(self.wrapped(), count)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        # With DeepSpeed this comes too late, and `call_before_step` has had the bytes counted.
        if self.is_due and self.before_step is None:
            self._count_before_step(about["model"], about["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if self.is_due and self.before_step is not None:
            parameters, gradients = self.before_step
            tensors = self.engine.optimizer_states(about["optimizer"])
            self.measured.live_bytes = LiveBytes(
                parameters=parameters,
                gradients=gradients,
                optimizer=_bytes(tensors, besides=self.engine.parameters(about["model"])),
            )
        self.is_due = False

    def _count_before_step(self, model: nn.Module, optimizer: Any) -> None:
        """Set `before_step` to what is held now."""
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
    """Bytes of the storages that hold these tensors, by the storage's address.

    What is no tensor is left out: engines also yield None.
    """
    sizes = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


# TensorBoard's curves of a run.

DRAWN_FIGURES = (
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

    TensorBoard draws the two losses in one chart since both have the tag `loss`, in two of its runs
    (`train` and `validation`).
    """

    folder: Path
    """TensorBoard's folder in the run folder."""
    meter: Meter
    effective_batch_size: int
    points: Points | None = None
    """Sends the same figures to MLflow; None where that was not asked for."""
    writers: dict[str, SummaryWriter] = field(default_factory=dict, init=False)
    """TensorBoard's writers by the name of its run."""
    drawn_steps: int = field(default=0, init=False)
    """Number of steps of this attempt whose figures are drawn."""

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        # Only rank 0 draws; the other ranks need not load this.
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
        for curve, values in curves.items():
            if curve not in self.writers:
                self.writers[curve] = SummaryWriter(str(self.folder / curve))
            writer = self.writers[curve]
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
        """Figures of the next point by tag: memory and utilization now, and those of new steps.

        New steps are those that the device has finished since the last point; they count as drawn
        from now on. Their figures are the mean seconds of a step, the samples of all ranks per
        second, and the share of padding among this rank's tokens; without new steps they are left
        out.
        """
        new_steps = self.meter.clock.steps(self.drawn_steps)
        self.drawn_steps += len(new_steps)
        now = {**self.meter.sampler.last, **held_bytes()}
        figures: dict[str, float] = {}
        for key in DRAWN_FIGURES:
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
