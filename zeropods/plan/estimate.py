"""The plan: for each technique whether it fits, the largest batch, time and cost."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from zeropods.plan.largest import largest
from zeropods.plan.memory import PlannedMemory, plan_memory
from zeropods.plan.request import Request
from zeropods.plan.step_time import StepTime, step_time
from zeropods.plan.technique import Technique

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One technique on the machines of a request."""

    technique: Technique
    pods: int
    """That it uses: `none` is one process on one pod, however many there are."""
    slots: int
    memory: PlannedMemory
    """Of one process."""
    fits: bool
    largest_batch_size: int | None
    """Rows a process; None where not even one fits."""
    time: StepTime
    samples_per_second: float
    total_seconds: float | None
    """Of the steps or samples that were asked for, without evaluation and saving."""
    cost: float | None
    cost_per_million_samples: float | None

    @property
    def host_bytes(self) -> int:
        """Of a pod."""
        return self.slots * self.memory.host_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes of one GPU, host bytes of one pod."""
        return {
            "technique": self.technique.name,
            "fits": self.fits,
            "bytes": self.memory.parts(),
            "host_bytes": self.host_bytes,
            "largest_batch_size": self.largest_batch_size,
            "step_seconds": self.time.seconds,
            "pods": self.pods,
            "slots": self.slots,
            "peak_allocated_bytes": self.memory.peak_allocated_bytes,
            **asdict(self.time),
            "samples_per_second": self.samples_per_second,
            "total_seconds": self.total_seconds,
            "cost": self.cost,
            "cost_per_million_samples": self.cost_per_million_samples,
            "terms": [asdict(term) for term in self.memory.terms],
            "host_terms": [asdict(term) for term in self.memory.host_terms],
        }


@dataclass(frozen=True)
class Plan:
    """All techniques of a request."""

    request: Request
    estimates: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate | None:
        """The one that fits and trains most samples a second; None where none fits."""
        fitting = [estimate for estimate in self.estimates if estimate.fits]
        return max(fitting, key=lambda estimate: estimate.samples_per_second, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "request": asdict(self.request),
            "techniques": [estimate.to_json() for estimate in self.estimates],
            "best": self.best.technique.name if self.best else None,
        }


def plan(request: Request) -> Plan:
    """Estimate every technique of a request.

    Raises:
        UserError: unknown model, technique, or GPU.
    """
    request.job()
    return Plan(request, tuple(_estimate(request, technique) for technique in request.chosen()))


def _estimate(request: Request, technique: Technique) -> Estimate:
    machines = request.machines
    pods, slots = (1, 1) if technique.is_alone else (machines.pods, machines.slots)
    time = step_time(request.job(), technique, machines, request.zero)
    rate = request.batch_size * pods * slots / time.seconds
    seconds = _total_seconds(request, pods * slots, time.seconds)
    hourly = None if request.price_per_hour is None else pods * request.price_per_hour / 3600
    return Estimate(
        technique=technique,
        pods=pods,
        slots=slots,
        memory=_memory(request, technique, pods * slots, request.batch_size),
        fits=_fits(request, technique, pods, slots, request.batch_size),
        largest_batch_size=largest(lambda rows: _fits(request, technique, pods, slots, rows)),
        time=time,
        samples_per_second=rate,
        total_seconds=seconds,
        cost=None if hourly is None or seconds is None else hourly * seconds,
        cost_per_million_samples=None if hourly is None else hourly * MILLION / rate,
    )


def _memory(request: Request, technique: Technique, ranks: int, rows: int) -> PlannedMemory:
    return plan_memory(request.job(rows), technique, ranks, request.zero)


def _fits(request: Request, technique: Technique, pods: int, slots: int, rows: int) -> bool:
    memory = _memory(request, technique, pods * slots, rows)
    host = request.host_memory_bytes
    return memory.device_bytes <= request.gpu_memory_bytes and (host is None or slots * memory.host_bytes <= host)


def _total_seconds(request: Request, ranks: int, step_seconds: float) -> float | None:
    if request.steps is not None:
        return request.steps * step_seconds
    if request.samples is None:
        return None
    return request.epochs * math.ceil(request.samples / (request.batch_size * ranks)) * step_seconds
