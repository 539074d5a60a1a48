"""Every figure of a summary: one pure function of a record, with its unit and its formula, and its rule for repeats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter
from statistics import mean, median
from typing import Any

from zeropods.measure.calibration import PLAN_KEYS, plan_figures, planned
from zeropods.measure.record import PHASES, Record, Statistics, real_tokens
from zeropods.plan.facts import shape_recorded
from zeropods.plan.machines import published_flops

DEVICE_USED, ALLOCATED, RESERVED, RESIDENT = "device-used", "allocated", "reserved", "resident"
"""Kinds of memory. They are four different things and never mixed."""
LIVE_STATES = "live states"
PUBLISHED, MEASURED = "published", "measured matmul"
USED = ("utilization_percent", "memory_utilization_percent", "power_watts", "cpu_percent", "io_wait_percent")
"""Columns of samples that say how busy the hardware was."""
JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3_600
Values = dict[str, Any]
"""Figures by their keys."""


@dataclass(frozen=True)
class Figure:
    """One figure of a run."""

    key: str
    """Its name in JSON and CSV, with the unit of the raw value."""
    of: Callable[[Record], Any]
    """Its value, or None where it was not measured; the docstring has the formula."""
    of_repeats: Callable[[Sequence[Any]], Any] = mean
    """One value from those of the repeats that have it: their mean; of peaks the largest; of words the common one."""


@dataclass(frozen=True)
class MatmulPeak:
    """The best matrix multiplication of one device that was measured on some hardware, and by which run."""

    flops_per_second: float
    run: str


def figures(
    record: Record | None,
    price_per_hour: float | None = None,
    *,
    earlier: Sequence[Record] = (),
    peak: MatmulPeak | None = None,
) -> Values:
    """Every figure of a run by its key; all None where there is no record.

    Args:
        price_per_hour: price of one pod, in any currency.
        earlier: records of the run's earlier attempts, in their order.
        peak: the best that was measured on such hardware; the run's own where it is not given.
    """
    if record is None:
        return dict.fromkeys([*(figure.key for figure in FIGURES), *DERIVED])
    values = {figure.key: figure.of(record) for figure in FIGURES}
    values["peak_flops_run"] = None
    if peak is not None and values["peak_flops_kind"] == MEASURED:
        values |= {"peak_flops_per_second": _of_all_devices(record, peak.flops_per_second), "peak_flops_run": peak.run}
    seconds = values["duration_seconds"]
    priced = seconds is not None and price_per_hour is not None
    return {
        **values,
        "model_flops_utilization": ratio(values["model_flops_per_second"], values["peak_flops_per_second"]),
        "measured_to_planned": ratio(values["measured_bytes"], values["planned_bytes"]),
        "energy_kwh": ratio(values["energy_joules"], JOULES_PER_KWH),
        **plan_figures(record),
        **_over_attempts(record, earlier),
        "cost": record.pods * seconds / SECONDS_PER_HOUR * price_per_hour if priced else None,
    }


def of_repeats(runs: Sequence[Values]) -> Values:
    """Every figure of repeats, from `figures` of each of them that has it."""
    rules = {**{figure.key: figure.of_repeats for figure in FIGURES}, **DERIVED}
    known = {key: [run[key] for run in runs if run[key] is not None] for key in rules}
    together = {key: rules[key](values) if values else None for key, values in known.items()}
    mixed = [keys for kind, keys in OF_KIND.items() if together[kind] is None]
    return {**together, **dict.fromkeys(key for keys in mixed for key in keys)}


def of_ranks(record: Record, key: str) -> list[Any] | None:
    """A field of each rank, in their order; None unless every rank of the run has measured it."""
    values = [value for rank in record.ranks if (value := getattr(rank, key)) is not None]
    return values if len(values) == len(record.ranks) == record.world_size else None


# Time and rates. A rate is of all ranks together.


def over_ranks(record: Record, key: str, rule: Callable[[list[Any]], Any]) -> Any:
    """One value from a field of all ranks: of seconds those of the slowest, of joules their sum; None without it."""
    values = of_ranks(record, key)
    return None if values is None else rule(values)


def longest(seconds: Sequence[Statistics]) -> float:
    """Sum of durations, of the slowest rank."""
    return max(each.total for each in seconds)


def is_resumed(record: Record) -> bool:
    """Whether the last attempt, the one that was measured, went on from an earlier one's checkpoint."""
    return any(rank.first_step > 0 for rank in record.ranks)


def duration_seconds(record: Record) -> float | None:
    """Seconds from a process's start to its end, of the slowest rank: start-up, steps, evaluation and saving.

    None for a run that was resumed: nobody has measured all of it.
    """
    return None if is_resumed(record) else over_ranks(record, "wall_seconds", max)


def samples(record: Record) -> int:
    """Training rows of all ranks in the steps of this attempt: rows x passes x steps, summed over ranks."""
    per_step = record.per_device_train_batch_size * record.gradient_accumulation_steps
    return sum(per_step * rank.steps for rank in record.ranks)


def tokens_per_second(record: Record) -> float | None:
    """Real tokens per second, no padding: samples/s x mean real tokens per sample, of T5 both sides."""
    tokens = sum(real_tokens(rank, record.task) for rank in record.ranks)
    rate = record.samples_per_second
    return None if rate is None or not tokens else rate * tokens / samples(record)


def padding_share(record: Record) -> float | None:
    """Share of 1 of what was computed that was padding: 1 - real tokens / tokens with padding, of all ranks."""
    padded = sum(rank.padded_tokens for rank in record.ranks)
    real = sum(real_tokens(rank, record.task) for rank in record.ranks)
    return 1 - real / padded if padded else None


def evaluation_samples_per_second(record: Record) -> float | None:
    """Rows of the dev split / mean seconds of an evaluation, of the slowest rank."""
    seconds = of_ranks(record, "evaluate_seconds")
    slowest = max(each.mean for each in seconds) if seconds else 0.0
    return record.dev_rows / slowest if record.dev_rows and slowest else None


# Arithmetic: how much of the hardware a run has used. Operations are the model's: real tokens, no recomputation.


def model_flops_per_second(record: Record) -> float | None:
    """FLOP/s that the model needs: FLOPs of a sample of mean real tokens x samples/s.

    Tokens are those of source and target; of a causal model all, and those with a loss.
    """
    rate, rows = record.samples_per_second, samples(record)
    recorded = next((rank.shape for rank in record.ranks if rank.shape), None)
    shape = None if recorded is None else shape_recorded(json.dumps(recorded))
    source = sum(rank.source_tokens for rank in record.ranks)
    target = sum(rank.target_tokens for rank in record.ranks)
    if rate is None or shape is None or not rows or not source + target:
        return None
    return shape.training_flops(source / rows, target / rows) * rate


def peak_flops(record: Record) -> tuple[float | None, str | None]:
    """FLOP/s of all that the run ran on, at its precision, and where they are from; None where there is no peak.

    The published peak of each rank's GPU, summed; where one is not published, or on CPUs, the best matrix
    multiplication that rank 0 measured x GPUs, or x machines: pods of one machine share its cores.
    """
    peaks = [published_flops(name, record.precision) for name in of_ranks(record, "gpu") or ()]
    known = [peak for peak in peaks if peak is not None]
    if known and len(known) == len(peaks):
        return sum(known), PUBLISHED
    one = record.matmul_flops_per_second
    measured = None if one is None else _of_all_devices(record, one)
    return measured, None if measured is None else MEASURED


def machines(record: Record) -> int | None:
    """Number of distinct machines that the ranks ran on; pods of one machine are one."""
    found: int | None = over_ranks(record, "machine", lambda names: len(set(names)))
    return found


def matmul_key(record: Record) -> str:
    """Equal for runs whose matrix multiplications are equally fast: the same device and precision."""
    gpu, hardware = next((rank.gpu for rank in record.ranks), None), record.hardware
    return f"{gpu or (hardware.get('cpu'), hardware.get('instructions'), hardware.get('cores'))} {record.precision}"


def _of_all_devices(record: Record, one: float) -> float | None:
    devices = len(record.ranks) if of_ranks(record, "gpu") else machines(record)
    return None if devices is None else one * devices


# A run that was restarted.


def _over_attempts(record: Record, earlier: Sequence[Record]) -> Values:
    """Seconds of the steps that count, and their share of the wall time, from the first attempt's start to the last
    one's end.

    A step counts once: in the last attempt that did it. Lost are the steps that were done again. The seconds are None
    where one of these steps was not timed; the others for a run without an earlier attempt, or where an attempt or the
    end is not recorded.
    """
    attempts = [*earlier, record]
    useful, timed, lost, following = 0.0, 0, 0, record.steps
    for attempt in reversed(attempts):
        first = min((rank.first_step for rank in attempt.ranks), default=following)
        useful += max((rank.seconds_of_first(following - first) for rank in attempt.ranks), default=0.0)
        timed += max(0, min(following, attempt.steps) - first)
        lost += max(0, attempt.steps - following)
        following = min(following, first)
    whole = useful if timed == record.steps else None
    values: Values = {"train_seconds": whole if is_resumed(record) else record.train_seconds}
    ended = [rank.ended_unix_seconds for rank in record.ranks if rank.ended_unix_seconds is not None]
    if not earlier or len(attempts) != record.attempt + 1 or not ended:
        return {**values, "goodput": None, "lost_steps": None}
    began = datetime.fromisoformat(attempts[0].started_at).timestamp()
    return {**values, "goodput": ratio(useful, max(ended) - began), "lost_steps": lost}


# Memory, in bytes.


def peak_bytes(record: Record, kind: str) -> float | None:
    """Peak of one kind of memory, of the rank that needed most.

    Allocated and reserved are the allocator's own peaks, resident is the kernel's (VmHWM); device-used is the
    highest sample of NVML, context and other processes included.
    """
    return max(_peaks(record, kind) or (), default=None)


def pod_memory_kind(record: Record) -> str | None:
    """The kind in which pods are compared: the first of device-used, allocated and resident that every rank has."""
    return _first_kind(record, (DEVICE_USED, ALLOCATED, RESIDENT))


def pod_memory_bytes(record: Record) -> list[float] | None:
    """Peak memory of each pod, in the order of the pods, in the kind of `pod_memory_kind`.

    A pod's device memory is that of its fullest GPU. Its resident memory is the sum of its ranks' peaks: no less
    than the peak of their sum, since they need not come at one time.
    """
    kind = pod_memory_kind(record)
    if kind is None:
        return None
    return _of_pods(record, _peaks(record, kind) or (), sum if kind == RESIDENT else max)


def pod_state_bytes(record: Record) -> list[float] | None:
    """Live parameters, gradients and optimizer states of each pod before an optimizer step, wherever they lie."""
    live = of_ranks(record, "live_bytes")
    return None if live is None else _of_pods(record, [each.total for each in live], sum)


def _of_pods(record: Record, values: Sequence[float], rule: Callable[[Iterable[float]], float]) -> list[float]:
    """One value for each pod, in their order, from those of its ranks."""
    pods: dict[int, list[float]] = {}
    for rank, value in zip(record.ranks, values, strict=True):
        pods.setdefault(rank.rank // record.slots, []).append(value)
    return [rule(of_pod) for of_pod in pods.values()]


def pod_activation_bytes(record: Record) -> float | None:
    """Activations of a pod's processes at their largest batch, by the plan: nothing counts them on a CPU."""
    plan = planned(record)
    return None if plan is None else plan.parts()["activations"] * record.slots


def peak_memory_bytes(record: Record) -> float | None:
    """Memory of the pod that needed most."""
    return max(pod_memory_bytes(record) or (), default=None)


def phase_kind(record: Record) -> str | None:
    """Allocated on GPUs, resident on CPUs: whose own counters are reset between phases; None without phases."""
    return _first_kind(record, (ALLOCATED, RESIDENT)) if any(rank.phases for rank in record.ranks) else None


def phase_peak_bytes(record: Record, phase: str) -> float | None:
    """Peak within a phase, of the rank that needed most, in the kind of `phase_kind`; None if a rank has none."""
    kind, phases = phase_kind(record), of_ranks(record, "phases")
    if kind is None or phases is None:
        return None
    peaks: list[Any] = [getattr(of_rank.get(phase), f"peak_{kind}_bytes", None) for of_rank in phases]
    return None if None in peaks else max(peaks)


def planned_bytes(record: Record) -> float | None:
    """What the plan says of `measured_bytes`, for a run of this shape, batch and technique."""
    plan = planned(record)
    if plan is None:
        return None
    return plan.device_bytes if of_ranks(record, "gpu") else plan.state_bytes


def measured_bytes(record: Record) -> float | None:
    """What is compared with the plan, of the rank that needed most.

    On GPUs the peak of device-used memory; on CPUs live parameters, gradients and optimizer states before a step.
    """
    if of_ranks(record, "gpu"):
        return peak_bytes(record, DEVICE_USED)
    return max((each.total for each in of_ranks(record, "live_bytes") or ()), default=None)


def planned_kind(record: Record) -> str:
    """What `planned_bytes` and `measured_bytes` are of: `device-used` on GPUs, `live states` on CPUs."""
    return DEVICE_USED if of_ranks(record, "gpu") else LIVE_STATES


def use(record: Record, column: str, statistic: str) -> float | None:
    """Mean over ranks of each one's mean or 95th percentile of a column of samples; None unless all have it."""
    values = [getattr(each, statistic) for each in samples_of(record, column) or ()]
    return mean(values) if values and None not in values else None


def samples_of(record: Record, column: str) -> list[Statistics] | None:
    """Statistics of each rank's samples of one column; None unless every rank has some."""
    found = [sampled.get(column) for sampled in of_ranks(record, "sampled") or ()]
    known = [one for one in found if one is not None]
    return known if known and len(known) == len(found) else None


def column_of(kind: str) -> str:
    """The column of samples of a kind of memory."""
    return f"{kind.replace('-', '_')}_bytes"


def _peaks(record: Record, kind: str) -> list[float] | None:
    if kind != DEVICE_USED:
        return of_ranks(record, f"peak_{kind}_bytes")
    sampled = samples_of(record, column_of(kind))
    return None if sampled is None else [one.peak for one in sampled]


def _first_kind(record: Record, kinds: Sequence[str]) -> str | None:
    return next((kind for kind in kinds if peak_bytes(record, kind) is not None), None)


def ratio(value: float | None, base: float | None) -> float | None:
    """The one over the other; None where it cannot be."""
    return None if value is None or not base else value / base


# The registry.


def agreed(values: Sequence[Any]) -> Any:
    """The value of all repeats, or None where they differ."""
    return values[0] if all(value == values[0] for value in values) else None


def fullest(values: Sequence[list[float]]) -> list[float]:
    """For each pod the most that it needed in any repeat."""
    return [max(pods) for pods in zip(*values, strict=True)]


FIGURES = (
    Figure("duration_seconds", duration_seconds),
    *(Figure(key, attrgetter(key)) for key in ("steps", "train_seconds", "samples_per_second")),
    Figure("tokens_per_second", tokens_per_second),
    Figure("padding_share", padding_share),
    Figure("evaluation_samples_per_second", evaluation_samples_per_second),
    Figure("start_seconds", partial(over_ranks, key="start_seconds", rule=max)),
    *(Figure(key, partial(over_ranks, key=key, rule=longest)) for key in ("evaluate_seconds", "save_seconds")),
    Figure("model_flops_per_second", model_flops_per_second),
    Figure("peak_flops_per_second", lambda record: peak_flops(record)[0]),
    Figure("peak_flops_kind", lambda record: peak_flops(record)[1], agreed),
    Figure("machines", machines, agreed),
    Figure("pod_memory_bytes", pod_memory_bytes, fullest),
    Figure("peak_memory_bytes", peak_memory_bytes, max),
    Figure("pod_state_bytes", pod_state_bytes, fullest),
    Figure("pod_activation_bytes", pod_activation_bytes, max),
    Figure("memory_kind", pod_memory_kind, agreed),
    Figure("peak_device_used_bytes", partial(peak_bytes, kind=DEVICE_USED), max),
    Figure("peak_reserved_bytes", partial(peak_bytes, kind=RESERVED), max),
    Figure("peak_allocated_bytes", partial(peak_bytes, kind=ALLOCATED), max),
    Figure("peak_resident_bytes", partial(peak_bytes, kind=RESIDENT), max),
    Figure("phase_kind", phase_kind, agreed),
    *(Figure(f"peak_{phase}_bytes", partial(phase_peak_bytes, phase=phase), max) for phase in PHASES),
    Figure("planned_kind", planned_kind, agreed),
    Figure("planned_bytes", planned_bytes, max),
    Figure("measured_bytes", measured_bytes, max),
    *(
        Figure(f"{column}_{statistic}", partial(use, column=column, statistic=statistic))
        for column in USED
        for statistic in ("mean", "p95")
    ),
    Figure("train_loss", lambda record: record.losses[-1].loss if record.losses else None),
    Figure("eval_loss", lambda record: record.eval_losses[-1].loss if record.eval_losses else None),
    Figure("energy_joules", partial(over_ranks, key="energy_joules", rule=sum)),
)
DERIVED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "model_flops_utilization": mean,
    "measured_to_planned": max,
    "energy_kwh": mean,
    **dict.fromkeys(PLAN_KEYS, median),
    "goodput": mean,
    "lost_steps": mean,
    "cost": mean,
    "peak_flops_run": agreed,
}
"""Figures from other figures, and their rules for repeats: MFU, a share of 1; ratios; pods x hours x price."""
OF_KIND = {
    "memory_kind": ("pod_memory_bytes", "peak_memory_bytes"),
    "phase_kind": tuple(f"peak_{phase}_bytes" for phase in PHASES),
    "planned_kind": ("planned_bytes", "measured_bytes", "measured_to_planned"),
    "peak_flops_kind": ("peak_flops_per_second", "model_flops_utilization"),
}
"""Figures that are of one kind or another, by the figure that says which: repeats of two kinds have none."""
