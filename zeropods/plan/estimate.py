"""The plan: for each technique whether it fits, the largest batch, time and cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeropods.plan.memory import PlannedMemory, plan_memory
from zeropods.plan.request import AnyRequest, Variant
from zeropods.plan.step_time import StepTime, step_time
from zeropods.plan.workload import Workload
from zeropods.techniques import Technique

# The largest batch that still fits.


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


# The plan: for each technique whether it fits, the largest batch, time and cost.

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One technique, in one way of training, on the machines of a request."""

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
    tokens_per_second: float
    """Padding included."""
    labels: dict[str, Any] = field(default_factory=dict)
    """What tells this way of training from others of the request."""

    @property
    def host_bytes(self) -> int:
        """Of a pod."""
        return self.slots * self.memory.host_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes of one GPU, host bytes of one pod."""
        return {
            "technique": self.technique.name,
            **self.labels,
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
            "tokens_per_second": self.tokens_per_second,
            "total_seconds": self.total_seconds,
            "cost": self.cost,
            "cost_per_million_samples": self.cost_per_million_samples,
            "terms": [asdict(term) for term in self.memory.terms],
            "host_terms": [asdict(term) for term in self.memory.host_terms],
        }


@dataclass(frozen=True)
class Plan:
    """All techniques of a request, each in all ways of training."""

    request: AnyRequest
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
            "request": asdict(self.request),
            "techniques": [estimate.to_json() for estimate in self.estimates],
            "best": self.best.technique.name if self.best else None,
            "best_labels": self.best.labels if self.best else {},
            "remark": self.request.remark,
        }


def plan(request: AnyRequest) -> Plan:
    """Estimate every technique of a request, in each of its ways of training.

    Raises:
        UserError: unknown model, technique, or GPU; a way of training that the model does not have.
    """
    variants = request.variants()
    return Plan(request, tuple(_estimate(request, each, variant) for variant in variants for each in request.chosen()))


def _estimate(request: AnyRequest, technique: Technique, variant: Variant) -> Estimate:
    machines, work = request.machines, variant.work
    pods, slots = (1, 1) if technique.is_alone else (machines.pods, machines.slots)
    time = step_time(work, technique, machines, request.zero, request.gradient_accumulation)
    rate = request.gradient_accumulation * request.batch_size * pods * slots / time.seconds
    seconds = _total_seconds(request, pods * slots, time.seconds)
    hourly = None if request.price_per_hour is None else pods * request.price_per_hour / 3600
    return Estimate(
        technique=technique,
        pods=pods,
        slots=slots,
        memory=plan_memory(work, technique, pods * slots, request.zero),
        fits=_fits(request, technique, pods, slots, work),
        largest_batch_size=largest(lambda rows: _fits(request, technique, pods, slots, replace(work, rows=rows))),
        time=time,
        samples_per_second=rate,
        total_seconds=seconds,
        cost=None if hourly is None or seconds is None else hourly * seconds,
        cost_per_million_samples=None if hourly is None else hourly * MILLION / rate,
        tokens_per_second=rate * request.tokens,
        labels=variant.labels,
    )


def _fits(request: AnyRequest, technique: Technique, pods: int, slots: int, work: Workload) -> bool:
    memory = plan_memory(work, technique, pods * slots, request.zero)
    host = request.host_memory_bytes
    return memory.device_bytes <= request.gpu_memory_bytes and (host is None or slots * memory.host_bytes <= host)


def _total_seconds(request: AnyRequest, ranks: int, step_seconds: float) -> float | None:
    if request.steps is not None:
        return request.steps * step_seconds
    if request.samples is None:
        return None
    a_step = request.gradient_accumulation * request.batch_size * ranks
    return request.epochs * math.ceil(request.samples / a_step) * step_seconds
