"""The plan: for each technique whether it fits, the largest batch, time and cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeropods.plan.memory import PlannedMemory, plan_memory
from zeropods.plan.request import Request
from zeropods.plan.step_time import StepTime, step_time
from zeropods.plan.workload import Workload
from zeropods.techniques import Technique

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One technique, in one way of training, on the machines of a request."""

    technique: Technique
    pods: int
    """Pods that it uses: `none` is one process on one pod, however many there are."""
    slots: int
    memory: PlannedMemory
    """Memory of one process."""
    fits: bool
    largest_batch_size: int | None
    """Rows per process; None where not even one fits."""
    time: StepTime
    samples_per_second: float
    total_seconds: float | None
    """Seconds of the steps or samples that were asked for, without evaluation and saving."""
    cost: float | None
    cost_per_million_samples: float | None
    tokens_per_second: float
    """Padding included."""
    labels: dict[str, Any] = field(default_factory=dict)
    """What tells this way of training from others of the request."""

    @property
    def host_bytes(self) -> int:
        """Host memory of a pod."""
        return self.slots * self.memory.host_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes of one GPU, host bytes of one pod."""
        own = ("fits", "largest_batch_size", "pods", "slots", "host_bytes", "samples_per_second", "tokens_per_second",
               "total_seconds", "cost", "cost_per_million_samples")  # fmt: skip
        return {
            "technique": self.technique.name,
            **self.labels,
            **{name: getattr(self, name) for name in own},
            "bytes": self.memory.parts(),
            "step_seconds": self.time.seconds,
            "peak_allocated_bytes": self.memory.peak_allocated_bytes,
            **asdict(self.time),
            "terms": [asdict(term) for term in self.memory.terms],
            "host_terms": [asdict(term) for term in self.memory.host_terms],
        }


@dataclass(frozen=True)
class Plan:
    """All techniques of a request, each in all ways of training."""

    request: Request
    estimates: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate | None:
        """The one that fits and trains most samples a second, of equal ones the first; None where none fits."""
        fitting = [estimate for estimate in self.estimates if estimate.fits]
        # In as many digits as rounding leaves: recomputation that hides behind the network costs nothing.
        return max(fitting, key=lambda estimate: float(f"{estimate.samples_per_second:.9g}"), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "request": self.request.to_json(),
            "techniques": [estimate.to_json() for estimate in self.estimates],
            "best": self.best.technique.name if self.best else None,
            "best_labels": self.best.labels if self.best else {},
            "remark": self.request.remark,
        }


def plan(request: Request) -> Plan:
    """Estimate every technique of a request, in each of its ways of training.

    Raises:
        UserError: unknown technique or GPU; a way of training that the model does not have.
    """
    variants, chosen = request.variants(), request.chosen()
    return Plan(request, tuple(_estimate(request, each, *variant) for variant in variants for each in chosen))


def _estimate(request: Request, technique: Technique, work: Workload, labels: dict[str, Any]) -> Estimate:
    machines = request.machines
    pods, slots = (1, 1) if technique.is_alone else (machines.pods, machines.slots)

    def fits(rows: int) -> bool:
        memory = plan_memory(replace(work, rows=rows), technique, pods * slots, request.zero)
        host = request.host_memory_bytes
        return memory.device_bytes <= request.gpu_memory_bytes and (host is None or slots * memory.host_bytes <= host)

    time = step_time(work, technique, machines, request.zero, request.gradient_accumulation)
    a_step = request.gradient_accumulation * request.batch_size * pods * slots
    seconds = _total_seconds(request, a_step, time.seconds)
    hourly = None if request.price_per_hour is None else pods * request.price_per_hour / 3600
    rate = a_step / time.seconds
    return Estimate(
        technique=technique,
        pods=pods,
        slots=slots,
        memory=plan_memory(work, technique, pods * slots, request.zero),
        fits=fits(work.rows),
        largest_batch_size=largest(fits),
        time=time,
        samples_per_second=rate,
        total_seconds=seconds,
        cost=None if hourly is None or seconds is None else hourly * seconds,
        cost_per_million_samples=None if hourly is None else hourly * MILLION / rate,
        tokens_per_second=rate * request.tokens,
        labels=labels,
    )


def _total_seconds(request: Request, samples_per_step: int, step_seconds: float) -> float | None:
    if request.steps is not None:
        return request.steps * step_seconds
    if request.samples is None:
        return None
    return request.epochs * math.ceil(request.samples / samples_per_step) * step_seconds


def largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number for which `fits` holds, by bisection; None where not even 1 does.

    `fits` must hold for every number below one for which it holds, and not for all.
    """
    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
