"""What one attempt measures of itself: its phases, its steps, its tokens, its memory over time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeropods.measure import environment
from zeropods.measure.heartbeat import HeartbeatWriter
from zeropods.measure.phases import Phases
from zeropods.measure.record import BatchShape, RankMeasurement
from zeropods.measure.sampler import Sampler
from zeropods.train.device import DeviceReader, counters, gpu_by_nvml, gpu_name, synchronize


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
        self.clock = StepClock()
        self._gpu = gpu_by_nvml()
        self._energy = self._gpu.energy_joules() if self._gpu else None
        path = folder / "memory" / f"{measured.rank}.csv"
        self.read = DeviceReader(self._gpu)
        self.sampler = Sampler(path, interval, self.read, lambda: self.phases.phase)
        self.heartbeat = HeartbeatWriter(folder, measured.rank, lambda: self.phases.phase)
        self.failed_in: str | None = None
        """The phase in which an error came up."""

    def __enter__(self) -> Meter:
        self.heartbeat.__enter__()
        self.sampler.__enter__()
        return self

    def __exit__(self, *about: object) -> None:
        if about[0] is not None:
            self.failed_in = self.failed_in or self.phases.phase
        self.sampler.__exit__(*about)
        self.heartbeat.__exit__(*about)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase between steps: the device is waited for at both ends, and no step counts it in."""
        self.clock.settle()
        before = self.phases.enter(phase)
        self.heartbeat.mark()
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or phase
            raise
        finally:
            self.clock.settle()
            self.phases.enter(before)
            self.heartbeat.mark()
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


@dataclass(frozen=True)
class Tokens:
    """What a step was made of, on this rank."""

    source: int | Tensor
    """A tensor on the CPU where a GPU counts them; its value is there when the step is."""
    target: int
    padded: int


class TokenCount:
    """Counts the forward passes of this rank, step by step."""

    def __init__(self, joint: bool = False) -> None:
        """`joint`: a row is one text, of which some tokens carry a loss; else it is a source and a target."""
        self.joint = joint
        self.largest: BatchShape | None = None
        """The pass with the most tokens, padding included."""
        self._source: int | Tensor = 0
        self._target = self._padded = self._most = 0

    def add(self, inputs: dict[str, Tensor]) -> None:
        """Count a forward pass of a collator's batch. Without a mask no token of it is padding."""
        (rows, source), target = inputs["input_ids"].shape, 0 if self.joint else inputs["labels"].shape[1]
        mask, padded = inputs.get("attention_mask"), rows * (source + target)
        self._source = self._source + (rows * source if mask is None else mask.sum())
        self._target += inputs["label_positions"].numel()
        self._padded += padded
        if padded > self._most:
            self._most = padded
            self.largest = BatchShape(rows=rows, source_tokens=source, target_tokens=target)

    def take(self) -> Tokens:
        """The tokens since they were last taken."""
        # On its way to the CPU; it is there when the step's mark is past.
        source = self._source.to("cpu", non_blocking=True) if isinstance(self._source, Tensor) else self._source
        taken = Tokens(source, self._target, self._padded)
        self._source = self._target = self._padded = 0
        return taken


# Times of optimizer steps, of which none waits for the device.


class Mark:
    """A moment in the device's work: by the process's clock, or as an event among what a GPU was given to do.

    A CPU has done its work when a call returns; a GPU's host runs ahead undisturbed.
    """

    def __init__(self) -> None:
        self.at = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self.event is not None:
            self.event.record()

    def is_past(self) -> bool:
        """Whether the device has come there."""
        try:
            return self.event is None or self.event.query()
        except torch.AcceleratorError:
            # A device that has failed comes no further; what it had done before stays measured.
            return False

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two moments that are past."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1_000


@dataclass(frozen=True)
class TimedStep:
    """An optimizer step that is done."""

    seconds: float
    tokens: Tokens


class StepClock:
    """Times of training steps, without what lies between them."""

    def __init__(self, mark: Callable[[], Mark] = Mark) -> None:
        """`mark` makes the present moment."""
        self._mark = mark
        self._began = mark()
        self._laps: list[tuple[Mark, Mark, Tokens] | TimedStep] = []
        self._past = 0

    def settle(self) -> None:
        """Wait for the device, so that every step is timed."""
        synchronize()

    def restart(self) -> None:
        """Begin a step here: what was before belongs to none."""
        self._began = self._mark()

    def lap(self, tokens: Tokens) -> None:
        """End a step here, and begin the next one."""
        now = self._mark()
        self._laps.append((self._began, now, tokens))
        self._began = now

    def steps(self) -> list[TimedStep]:
        """The steps that the device has done, in order. An interruption at any place leaves them right."""
        for number in range(self._past, len(self._laps)):
            lap = self._laps[number]
            if not isinstance(lap, TimedStep):
                began, ended, tokens = lap
                if not ended.is_past():
                    break
                counted = Tokens(int(tokens.source), tokens.target, tokens.padded)
                self._laps[number] = TimedStep(ended.seconds_since(began), counted)
            self._past = number + 1
        return [step for step in self._laps[: self._past] if isinstance(step, TimedStep)]
