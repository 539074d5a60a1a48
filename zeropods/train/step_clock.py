"""Times of optimizer steps, of which none waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zeropods.train.device import synchronize


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
