"""What one attempt measures of itself: its phases, its steps, its memory over time, its tensors."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.phases import Phases
from zeropods.measure.record import BatchShape, LiveBytes, Loss, RankMeasurement
from zeropods.measure.sampler import Sampler
from zeropods.train.beating import Beating
from zeropods.train.device import MemoryReader, counters, gpu_by_nvml, gpu_name, synchronize

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


# Times of optimizer steps, of which none waits for the device.


class Mark(Protocol):
    """A moment in the device's work."""

    def is_past(self) -> bool:
        """Whether the device has come there."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds between two moments of one kind that are past."""


class HostMark:
    """A moment by this process's clock: a CPU has done its work when the call returns."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def is_past(self) -> bool:
        return True

    def seconds_since(self, earlier: Any) -> float:
        return self.at - earlier.at


class CudaMark:
    """An event in the GPU's own sequence of work, so that the host runs ahead undisturbed."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def is_past(self) -> bool:
        try:
            return self.event.query()
        except torch.AcceleratorError:
            # A device that has failed comes no further; what it had done before stays measured.
            return False

    def seconds_since(self, earlier: Any) -> float:
        return earlier.event.elapsed_time(self.event) / 1_000


@dataclass(frozen=True)
class Tokens:
    """What a step was made of, on this rank."""

    source: int | Tensor
    """A tensor on the CPU where a GPU counts them; its value is there when the step is."""
    target: int
    padded: int


@dataclass(frozen=True)
class TimedStep:
    """An optimizer step that is done."""

    seconds: float
    tokens: Tokens


@dataclass(frozen=True)
class _Lap:
    began: Mark
    ended: Mark
    tokens: Tokens

    def timed(self) -> TimedStep:
        tokens = Tokens(int(self.tokens.source), self.tokens.target, self.tokens.padded)
        return TimedStep(self.ended.seconds_since(self.began), tokens)


class StepClock:
    """Laps of training, without what lies between them."""

    def __init__(self, mark: Callable[[], Mark], wait: Callable[[], None]) -> None:
        """`mark` makes the present moment; `wait` ends when the device has done all its work."""
        self._mark = mark
        self._wait = wait
        self._began = mark()
        self._laps: list[_Lap | TimedStep] = []
        self._past = 0

    def restart(self) -> None:
        """A step begins here: what was before belongs to none."""
        self._began = self._mark()

    def lap(self, tokens: Tokens) -> None:
        """A step ends here, and the next one begins."""
        now = self._mark()
        self._laps.append(_Lap(self._began, now, tokens))
        self._began = now

    def settle(self) -> None:
        """Wait for the device, so that every step is timed."""
        self._wait()

    def steps(self) -> list[TimedStep]:
        """The steps that the device has done, in order. An interruption at any place leaves them right."""
        while self._past < len(self._laps):
            lap = self._laps[self._past]
            if isinstance(lap, _Lap):
                if not lap.ended.is_past():
                    break
                self._laps[self._past] = lap.timed()
            self._past += 1
        return [step for step in self._laps[: self._past] if isinstance(step, TimedStep)]


def step_clock() -> StepClock:
    """A clock for the device that this process trains on."""
    return StepClock(CudaMark if torch.cuda.is_available() else HostMark, synchronize)


# What one attempt measures of itself: its phases, its steps, its memory over time.


class Meter:
    """Measures while it is entered, and fills in a rank's measurement at any time."""

    def __init__(self, folder: Path, measured: RankMeasurement, *, interval: float, age_seconds: float) -> None:
        """Begin with phase `load`.

        Args:
            folder: the run folder.
            interval: seconds between two samples of memory; 0: none.
            age_seconds: how long ago the process began.
        """
        measured.machine, measured.gpu = environment.machine(), gpu_name()
        self.phases = Phases(counters(), age_seconds)
        self.clock = step_clock()
        self._gpu = gpu_by_nvml()
        self._energy = self._gpu.energy_joules() if self._gpu else None
        path = folder / "memory" / f"{measured.rank}.csv"
        self.read = MemoryReader(self._gpu)
        self.sampler = Sampler(path, interval, self.read, lambda: self.phases.phase)
        self.beating = Beating(folder, measured.rank, lambda: self.phases.phase)
        self.failed_in: str | None = None
        """The phase in which an error came up."""

    def __enter__(self) -> Meter:
        self.beating.__enter__()
        self.sampler.__enter__()
        return self

    def __exit__(self, *about: object) -> None:
        if about[0] is not None:
            self.failed_in = self.failed_in or self.phases.phase
        self.sampler.__exit__(*about)
        self.beating.__exit__(*about)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase between steps: the device is waited for at both ends, and no step counts it in."""
        self.clock.settle()
        before = self.phases.enter(phase)
        self.beating.mark()
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or phase
            raise
        finally:
            self.clock.settle()
            self.phases.enter(before)
            self.beating.mark()
            self.clock.restart()

    def fill(self, measured: RankMeasurement) -> None:
        """Write what was measured so far into a measurement, whole steps only."""
        steps = self.clock.steps()
        measured.step_seconds = [step.seconds for step in steps]
        measured.step = measured.first_step + len(steps)
        measured.source_tokens = sum(int(step.tokens.source) for step in steps)
        measured.target_tokens = sum(step.tokens.target for step in steps)
        measured.padded_tokens = sum(step.tokens.padded for step in steps)
        measured.phases, most = self.phases.measured()
        measured.peak_resident_bytes = most.resident
        measured.peak_allocated_bytes, measured.peak_reserved_bytes = most.allocated, most.reserved
        measured.wall_seconds = sum(phase.seconds for phase in measured.phases.values())
        measured.sampled = self.sampler.statistics()
        energy = self._gpu.energy_joules() if self._gpu else None
        if energy is not None and self._energy is not None:
            measured.energy_joules = energy - self._energy


# Tokens of a step, counted without waiting for the device.


class TokenCount:
    """Counts the forward passes of this rank, step by step."""

    def __init__(self, joint: bool = False) -> None:
        """`joint`: a row is one text, of which some tokens carry a loss; else it is a source and a target."""
        self.joint = joint
        self.largest: BatchShape | None = None
        """The pass with the most tokens, padding included."""
        self._source: int | Tensor = 0
        self._target = 0
        self._padded = 0

    def add(self, inputs: dict[str, Any]) -> None:
        """Count a forward pass of a collator's batch. Without a mask no token of it is padding."""
        (rows, source), target = inputs["input_ids"].shape, 0 if self.joint else inputs["labels"].shape[1]
        mask = inputs.get("attention_mask")
        self._source = self._source + (rows * source if mask is None else mask.sum())
        self._target += inputs["label_positions"].numel()
        self._padded += rows * (source + target)
        if self.largest is None or rows * (source + target) > _tokens(self.largest):
            self.largest = BatchShape(rows=rows, source_tokens=source, target_tokens=target)

    def take(self) -> Tokens:
        """The tokens since they were last taken."""
        source = self._source
        if isinstance(source, Tensor):
            # On its way to the CPU; it is there when the step's mark is past.
            source = source.to("cpu", non_blocking=True)
        taken = Tokens(source, self._target, self._padded)
        self._source, self._target, self._padded = 0, 0, 0
        return taken


def _tokens(batch: BatchShape) -> int:
    return batch.rows * (batch.source_tokens + batch.target_tokens)


# Bytes of a model's tensors while it trains: what ZeRO divides, as it lies in memory.
#
# Memory is counted by storage, each once: tied weights, views into a flat buffer and a partition that is its own
# master
# are one piece of memory. Padding of flat buffers counts. Buckets through which gradients and parameters travel do
# not:
# they are no state.

MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""Where DeepSpeed 0.19's optimizers keep a rank's master partition: stages 1 and 2, stage 3, `BF16_Optimizer`."""
PARTITIONS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
    "fp32_groups_gradients_flat",
)
"""Where they keep gradients that are reduced."""


def parameter_storages(model: nn.Module) -> dict[int, int]:
    """Bytes by address of the memory that holds the model's parameters, on this rank."""
    return _storages(_parameters(model))


def gradient_storages(model: nn.Module, optimizer: Any) -> dict[int, int]:
    """Bytes by address of the memory that holds gradients; `optimizer` is the outermost."""
    return _storages(_gradients(model, optimizer))


def optimizer_storages(optimizer: Any) -> dict[int, int]:
    """Bytes by address of the memory that holds states and master weights; `optimizer` is the outermost."""
    return _storages(_states(optimizer))


class LiveBytesCount:
    """Counts at one step: parameters and gradients before the optimizer's step, its states after it.

    The states are there from the first step on and stay; so a run of a single step is counted as well.
    """

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def before_step(self, model: nn.Module, optimizer: Any) -> None:
        """Count parameters and gradients."""
        parameters = parameter_storages(model)
        gradients = _without(gradient_storages(model, optimizer), parameters)
        self._before = sum(parameters.values()), sum(gradients.values())

    def after_step(self, model: nn.Module, optimizer: Any) -> LiveBytes | None:
        """Count the states; None where nothing was counted before."""
        if self._before is None:
            return None
        states = _without(optimizer_storages(optimizer), parameter_storages(model))
        parameters, gradients = self._before
        return LiveBytes(parameters=parameters, gradients=gradients, optimizer=sum(states.values()))


def _parameters(model: nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter.data
        # ZeRO-3's share of it; the parameter itself is empty unless gathered.
        yield getattr(parameter, "ds_tensor", None)


def _gradients(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter.grad
        yield getattr(parameter, "grad_accum", None)
    for layer in _layers(optimizer):
        for name in PARTITIONS:
            yield from _flat(getattr(layer, name, None))
        for name in MASTERS:
            yield from (master.grad for master in _flat(getattr(layer, name, None)))


def _states(optimizer: Any) -> Iterator[Any]:
    for layer in _layers(optimizer):
        for name in MASTERS:
            yield from _flat(getattr(layer, name, None))
        for group in getattr(layer, "param_groups", ()):
            yield from group["params"]
        for state in getattr(layer, "state", {}).values():
            yield from _flat(state)


def _layers(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those that it wraps: accelerate's, DeepSpeed's, torch's."""
    seen: list[Any] = []
    while optimizer is not None and not any(optimizer is known for known in seen):
        seen.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)
    yield from seen


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from _flat(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _flat(value)


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _without(storages: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return {address: size for address, size in storages.items() if address not in others}


# Follows a trainer: its steps, phases, losses, and the bytes of its tensors.

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


# TensorBoard's curves of a run.

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
