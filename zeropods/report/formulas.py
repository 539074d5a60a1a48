"""Every figure of a summary, by topic, from a record alone, with its unit, its formula and its rule
for repeats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from statistics import mean, median
from typing import Any, NamedTuple

from zeropods.measure.calibration import PLAN_KEYS, plan_figures
from zeropods.measure.planned_runs import planned_memory
from zeropods.measure.record import PHASES, PRECISION_PARTS, Record, Statistics, real_tokens
from zeropods.plan.facts import shape_recorded
from zeropods.plan.gpus import published_flops

DEVICE_USED, ALLOCATED, RESERVED, RESIDENT = "device-used", "allocated", "reserved", "resident"
"""Kinds of memory. They are four different things and are never mixed."""
LIVE_STATES = "live states"
PUBLISHED_PEAK = "published"
MEASURED_PEAK = "measured matmul"
BUSY_COLUMNS = (
    "utilization_percent",
    "memory_utilization_percent",
    "power_watts",
    "cpu_percent",
    "io_wait_percent",
)
"""Columns of samples that say how busy the hardware was."""
JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3_600

Values = dict[str, Any]
"""Figures by their keys, which name the unit of the raw value; None where it was not measured."""


def figures(
    record: Record | None,
    price_per_hour: float | None = None,
    *,
    earlier: Sequence[Record] = (),
    peak: tuple[float, str] | None = None,
) -> Values:
    """Every figure of a run by its key; all None where there is no record.

    Args:
        price_per_hour: price of one pod, in any currency.
        earlier: records of the run's earlier attempts, in their order.
        peak: the best FLOP/s measured on one such device, and the name of the run that did; the
            run's own if not given.
    """
    if record is None:
        return dict.fromkeys(RULES)
    values = {
        **_speed(record),
        **_precision(record),
        **_arithmetic(record, peak),
        **_memory(record),
        **_use(record),
    }
    model_flops = values["model_flops_per_second"]
    peak_flops = values["peak_flops_per_second"]
    return {
        **values,
        "model_flops_utilization": ratio(model_flops, peak_flops),
        "measured_to_planned": ratio(values["measured_bytes"], values["planned_bytes"]),
        "energy_kwh": ratio(values["energy_joules"], JOULES_PER_KWH),
        **plan_figures(record),
        **_over_attempts(record, earlier),
        "cost": _cost(record.pods, values["duration_seconds"], price_per_hour),
    }


def _cost(pods: int, seconds: float | None, price_per_hour: float | None) -> float | None:
    """The price of all pods from start to end."""
    if seconds is None or price_per_hour is None:
        return None
    return pods * seconds / SECONDS_PER_HOUR * price_per_hour


def of_ranks(record: Record, key: str) -> list[Any] | None:
    """A field of each rank, in rank order; None unless every rank of the run has measured it."""
    values = []
    for rank in record.ranks:
        value = getattr(rank, key)
        if value is not None:
            values.append(value)
    is_whole = len(values) == len(record.ranks) == record.world_size
    return values if is_whole else None


def over_ranks(record: Record, key: str, rule: Callable[[list[Any]], Any]) -> Any:
    """One value from a field of all ranks, such as the slowest's seconds or the sum of joules; None
    if one lacks it."""
    values = of_ranks(record, key)
    return None if values is None else rule(values)


def is_resumed(record: Record) -> bool:
    """Whether the last attempt, the one that was measured, continued from an earlier one's
    checkpoint."""
    return any(rank.first_step > 0 for rank in record.ranks)


def is_done(status: str) -> bool:
    """Whether the figures of a row are from runs that ended well: its status is `ok`, or
    `2 ok, 1 oom`."""
    return "ok" in status.replace(",", " ").split()


# Time and rates.


def _speed(record: Record) -> Values:
    """Rates of all ranks together, and seconds of the slowest rank.

    The duration is from a process's start to its end: start-up, steps, evaluation and saving.
    Tokens are real ones, without padding, for T5 those of both sides; padding is a share, of 1, of
    all tokens computed. The evaluation's rate is rows of the dev split / mean seconds of an
    evaluation.
    """
    duration = None
    # The whole of a resumed run was not measured.
    if not is_resumed(record):
        duration = over_ranks(record, "wall_seconds", max)

    tokens = sum(real_tokens(rank, record.task) for rank in record.ranks)
    padded_tokens = sum(rank.padded_tokens for rank in record.ranks)
    rate = record.samples_per_second
    tokens_per_second = None
    if rate is not None and tokens:
        tokens_per_second = rate * tokens / _samples(record)

    # Without rows to evaluate, there is no rate, rather than a rate of 0.
    dev_rows = record.dev_rows or None
    seconds_of_evaluation = over_ranks(record, "evaluate_seconds", _largest_mean)
    return {
        "duration_seconds": duration,
        "steps": record.steps,
        "train_seconds": record.train_seconds,
        "samples_per_second": rate,
        "tokens_per_second": tokens_per_second,
        "padding_share": 1 - tokens / padded_tokens if padded_tokens else None,
        "evaluation_samples_per_second": ratio(dev_rows, seconds_of_evaluation),
        "start_seconds": over_ranks(record, "start_seconds", max),
        "evaluate_seconds": over_ranks(record, "evaluate_seconds", _largest_total),
        "save_seconds": over_ranks(record, "save_seconds", _largest_total),
    }


def _largest_mean(ranks: Sequence[Statistics]) -> float:
    return max(statistics.mean for statistics in ranks)


def _largest_total(ranks: Sequence[Statistics]) -> float:
    return max(statistics.total for statistics in ranks)


def _samples(record: Record) -> int:
    """Number of training rows of all ranks in this attempt's steps: batch size x accumulation x
    steps, summed over ranks."""
    per_step = record.per_device_train_batch_size * record.gradient_accumulation_steps
    return sum(per_step * rank.steps for rank in record.ranks)


# Precision: the number formats that a run computed in.


def _precision(record: Record) -> Values:
    """The number format of each kind of tensors in the first step; None where it was not
    measured."""
    measured = record.measured_precision
    return {f"precision_{part}": getattr(measured, part, None) for part in PRECISION_PARTS}


# Arithmetic: how much of the hardware a run has used.


def _arithmetic(record: Record, best: tuple[float, str] | None) -> Values:
    """FLOP/s that the model needs, and peak FLOP/s of all the run's hardware at its precision, with
    their source."""
    return {
        "model_flops_per_second": _model_flops(record),
        **_peak_flops(record, best),
        "machines": machines(record),
    }


def _model_flops(record: Record) -> float | None:
    """FLOP/s that the model needs; None without a rate, a known shape or a token.

    Operations are the model's, without recomputation: FLOPs of a sample of mean real tokens x
    samples/s. Tokens are those of source and target; for a causal model, all tokens and those with
    a loss.
    """
    recorded_shape = next((rank.shape for rank in record.ranks if rank.shape), None)
    if recorded_shape is None:
        return None
    shape = shape_recorded(json.dumps(recorded_shape))
    rate = record.samples_per_second
    if shape is None or rate is None:
        return None

    rows = _samples(record)
    source_tokens = sum(rank.source_tokens for rank in record.ranks)
    target_tokens = sum(rank.target_tokens for rank in record.ranks)
    has_tokens = bool(source_tokens + target_tokens)
    if not rows or not has_tokens:
        return None
    return shape.training_flops(source_tokens / rows, target_tokens / rows) * rate


def _peak_flops(record: Record, best: tuple[float, str] | None) -> Values:
    """Peak FLOP/s of all the run's hardware, its kind, and the run that measured it.

    The peak is the published one of each rank's GPU, summed; where one is not published, or on
    CPUs, it is the best matrix multiplication measured by rank 0, or by another run, x GPUs, or x
    machines: pods of one machine share its cores.
    """
    gpus = of_ranks(record, "gpu") or []
    published = [published_flops(name, record.precision) for name in gpus]
    known = [flops for flops in published if flops is not None]
    all_are_known = len(known) == len(published)
    if known and all_are_known:
        return {
            "peak_flops_per_second": sum(known),
            "peak_flops_kind": PUBLISHED_PEAK,
            "peak_flops_run": None,
        }

    of_one_device = record.matmul_flops_per_second
    run = None
    if of_one_device is not None and best is not None:
        of_one_device, run = best
    devices = len(gpus) if gpus else machines(record)
    if of_one_device is None or devices is None:
        return dict.fromkeys(("peak_flops_per_second", "peak_flops_kind", "peak_flops_run"))
    return {
        "peak_flops_per_second": of_one_device * devices,
        "peak_flops_kind": MEASURED_PEAK,
        "peak_flops_run": run,
    }


def machines(record: Record) -> int | None:
    """Number of distinct machines that the ranks ran on; pods of one machine count once."""
    names = of_ranks(record, "machine")
    return None if names is None else len(set(names))


def matmul_key(record: Record) -> str:
    """A key that is equal for runs whose matrix multiplications are equally fast: the same device
    and precision."""
    gpu = next((rank.gpu for rank in record.ranks), None)
    hardware = record.hardware
    processor = (hardware.get("cpu"), hardware.get("instructions"), hardware.get("cores"))
    return f"{gpu or processor} {record.precision}"


# A run that was restarted.


class _CountedSteps(NamedTuple):
    """The steps of all attempts of a run: each counts in the last attempt that did it."""

    seconds: float
    """Seconds of the steps that count, as far as they were timed."""
    timed: int
    """Number of steps that count and were timed."""
    lost: int
    """Number of steps that were done again."""


def _count_steps(attempts: Sequence[Record]) -> _CountedSteps:
    """Count each step in the last attempt that did it."""
    seconds = 0.0
    timed = 0
    lost = 0
    # The step from which the following attempt continued: what an attempt did beyond it is lost.
    following = attempts[-1].steps
    for attempt in reversed(attempts):
        first = min((rank.first_step for rank in attempt.ranks), default=following)
        kept_steps = following - first
        seconds_of_ranks = [rank.seconds_of_first(kept_steps) for rank in attempt.ranks]
        seconds += max(seconds_of_ranks, default=0.0)
        timed += max(0, min(following, attempt.steps) - first)
        lost += max(0, attempt.steps - following)
        following = min(following, first)
    return _CountedSteps(seconds, timed, lost)


def _over_attempts(record: Record, earlier: Sequence[Record]) -> Values:
    """Seconds of the steps that count, and their share of the wall time, from the first attempt's
    start to the last one's end.

    A step counts once: in the last attempt that did it. Lost steps are those that were done again.
    The seconds are None where a step that counts was not timed; the other values are None for a run
    without an earlier attempt, or where an attempt or the end is not recorded.
    """
    attempts = [*earlier, record]
    counted = _count_steps(attempts)
    train_seconds = record.train_seconds
    if is_resumed(record):
        train_seconds = counted.seconds if counted.timed == record.steps else None

    ends = []
    for rank in record.ranks:
        if rank.ended_unix_seconds is not None:
            ends.append(rank.ended_unix_seconds)
    are_all_recorded = len(attempts) == record.attempt + 1
    if not earlier or not are_all_recorded or not ends:
        return {"train_seconds": train_seconds, "goodput": None, "lost_steps": None}
    began = datetime.fromisoformat(attempts[0].started_at).timestamp()
    wall_seconds = max(ends) - began
    return {
        "train_seconds": train_seconds,
        "goodput": ratio(counted.seconds, wall_seconds),
        "lost_steps": counted.lost,
    }


# Memory, in bytes: what was used of each kind, and what was planned.


def _memory(record: Record) -> Values:
    """Peaks of memory of the rank or the pod that needed most, and the states and activations of a
    model.

    Pods are compared by the first of device-used, allocated and resident that every rank has. A
    pod's device memory is that of its fullest GPU. Its resident memory is the sum of its ranks'
    peaks: no less than the peak of their sum, since the peaks need not coincide.

    States are live parameters, gradients and optimizer states before an optimizer step, wherever
    they are. Activations are those of a pod's processes at their largest batch, by the plan:
    nothing counts them on a CPU. The plan is compared with the peak of device-used memory on GPUs,
    with the states on CPUs, of the rank that needed most.
    """
    peaks = _peaks_of_ranks(record)
    largest = {kind: max(of_kind, default=None) for kind, of_kind in peaks.items()}
    kind = next((kind for kind in (DEVICE_USED, ALLOCATED, RESIDENT) if peaks[kind]), None)
    pods = None
    if kind is not None:
        pods = _of_pods(record, peaks[kind], sum if kind == RESIDENT else max)

    states = over_ranks(record, "live_bytes", lambda ranks: [live.total for live in ranks])
    plan = planned_memory(record)
    activations = None if plan is None else plan.parts()["activations"] * record.slots
    if of_ranks(record, "gpu"):
        planned_kind = DEVICE_USED
        planned_bytes = None if plan is None else plan.device_bytes
        measured_bytes = largest[DEVICE_USED]
    else:
        planned_kind = LIVE_STATES
        planned_bytes = None if plan is None else plan.state_bytes
        measured_bytes = max(states or (), default=None)
    return {
        "pod_memory_bytes": pods,
        "peak_memory_bytes": max(pods or (), default=None),
        "pod_state_bytes": None if states is None else _of_pods(record, states, sum),
        "pod_activation_bytes": activations,
        "memory_kind": kind,
        **_memory_of_processes(record, kind, largest),
        **{f"peak_{column_of(kind)}": peak for kind, peak in largest.items()},
        **_peaks_of_phases(record, peaks),
        "planned_kind": planned_kind,
        "planned_bytes": planned_bytes,
        "measured_bytes": measured_bytes,
    }


def _peaks_of_ranks(record: Record) -> dict[str, list[Any]]:
    """The peak of each rank by kind of memory; an empty list of a kind that a rank lacks.

    Allocated and reserved peaks are the allocator's own, resident ones are the kernel's (VmHWM);
    device-used is the highest sample of NVML, context and other processes included.
    """
    sampled = samples_of(record, column_of(DEVICE_USED))
    peaks: dict[str, list[Any]] = {DEVICE_USED: [statistics.peak for statistics in sampled]}
    for kind in (RESERVED, ALLOCATED, RESIDENT):
        peaks[kind] = of_ranks(record, f"peak_{column_of(kind)}") or []
    return peaks


def _of_pods(
    record: Record, values: Sequence[float], rule: Callable[[Iterable[float]], float]
) -> list[float]:
    """One value for each pod, in pod order, from the values of its ranks."""
    pods: dict[int, list[float]] = {}
    for rank, value in zip(record.ranks, values, strict=True):
        pods.setdefault(rank.rank // record.slots, []).append(value)
    return [rule(of_pod) for of_pod in pods.values()]


def _memory_of_processes(record: Record, kind: str | None, largest: Values) -> Values:
    """Peak, mean and minimum of the memory of one process.

    Mean and minimum are those of a process's samples, of the same kind: the mean of all ranks, and
    the minimum of the rank that needed least.
    """
    if kind is None:
        return dict.fromkeys(("process_peak_bytes", "process_mean_bytes", "process_minimum_bytes"))
    sampled = samples_of(record, column_of(kind))
    means = [statistics.mean for statistics in sampled]
    minima = [statistics.minimum for statistics in sampled]
    return {
        "process_peak_bytes": largest[kind],
        "process_mean_bytes": mean(means) if means else None,
        "process_minimum_bytes": min(minima, default=None),
    }


def _peaks_of_phases(record: Record, peaks: dict[str, list[Any]]) -> Values:
    """The peak within each phase of the rank that needed most; None if a rank has none.

    They are of allocated memory on GPUs and of resident memory on CPUs; their counters are reset in
    between.
    """
    kind = None
    if any(rank.phases for rank in record.ranks):
        kind = next((kind for kind in (ALLOCATED, RESIDENT) if peaks[kind]), None)
    values: Values = {"phase_kind": kind}
    for phase in PHASES:
        values[f"peak_{phase}_bytes"] = (
            None if kind is None else _peak_of_phase(record, phase, kind)
        )
    return values


def _peak_of_phase(record: Record, phase: str, kind: str) -> int | None:
    sizes = []
    for rank in record.ranks:
        size = getattr(rank.phases.get(phase), f"peak_{column_of(kind)}", None)
        if size is None:
            return None
        sizes.append(size)
    return max(sizes)


# How busy the hardware was, and what came of it.


def _use(record: Record) -> Values:
    """For each column of samples, the mean over ranks of their means and 95th percentiles, None
    unless all have it; the last losses; the energy of all GPUs."""
    values: Values = {}
    for column in BUSY_COLUMNS:
        for statistic in ("mean", "p95"):
            of_each_rank = [getattr(sampled, statistic) for sampled in samples_of(record, column)]
            is_whole = bool(of_each_rank) and None not in of_each_rank
            values[f"{column}_{statistic}"] = mean(of_each_rank) if is_whole else None
    values["train_loss"] = record.losses[-1].loss if record.losses else None
    values["eval_loss"] = record.eval_losses[-1].loss if record.eval_losses else None
    values["energy_joules"] = over_ranks(record, "energy_joules", sum)
    return values


def samples_of(record: Record, column: str) -> list[Statistics]:
    """Statistics of each rank's samples of one column; an empty list unless every rank has some."""
    by_column = of_ranks(record, "sampled") or []
    of_column = [sampled[column] for sampled in by_column if sampled.get(column) is not None]
    return of_column if len(of_column) == len(by_column) else []


def column_of(kind: str) -> str:
    """Name of the column of samples of a kind of memory."""
    return f"{kind.replace('-', '_')}_bytes"


def ratio(value: float | None, base: float | None) -> float | None:
    """`value` / `base`; None where it cannot be computed."""
    if value is None or not base:
        return None
    return value / base


# Repeats: one value from those of the runs that have it.


def of_repeats(runs: Sequence[Values]) -> Values:
    """Every figure of a group of repeats, from the `figures` of those that have it."""
    together: Values = {}
    for key, rule in RULES.items():
        values = [run[key] for run in runs if run[key] is not None]
        together[key] = rule(values) if values else None
    for kind, keys in OF_KIND.items():
        if together[kind] is None:
            together.update(dict.fromkeys(keys))
    return together


def agreed(values: Sequence[Any]) -> Any:
    """The value of all repeats, or None where they differ."""
    first = values[0]
    return first if all(value == first for value in values) else None


def _most_of_each_pod(runs: Sequence[Sequence[float]]) -> list[float]:
    """The largest value of each pod, from lists of one value for each pod."""
    return [max(of_pod) for of_pod in zip(*runs, strict=True)]


RULES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "duration_seconds": mean,
    "steps": mean,
    "train_seconds": mean,
    "samples_per_second": mean,
    "tokens_per_second": mean,
    "padding_share": mean,
    "evaluation_samples_per_second": mean,
    "start_seconds": mean,
    "evaluate_seconds": mean,
    "save_seconds": mean,
    "goodput": mean,
    "lost_steps": mean,
    "train_loss": mean,
    "eval_loss": mean,
    "model_flops_per_second": mean,
    "peak_flops_per_second": mean,
    "model_flops_utilization": mean,
    **{f"{column}_{statistic}": mean for column in BUSY_COLUMNS for statistic in ("mean", "p95")},
    "energy_joules": mean,
    "energy_kwh": mean,
    "cost": mean,
    "pod_memory_bytes": _most_of_each_pod,
    "pod_state_bytes": _most_of_each_pod,
    "peak_memory_bytes": max,
    "peak_device_used_bytes": max,
    "peak_reserved_bytes": max,
    "peak_allocated_bytes": max,
    "peak_resident_bytes": max,
    **{f"peak_{phase}_bytes": max for phase in PHASES},
    "pod_activation_bytes": max,
    "planned_bytes": max,
    "measured_bytes": max,
    "measured_to_planned": max,
    "process_peak_bytes": max,
    "process_mean_bytes": mean,
    "process_minimum_bytes": min,
    "memory_kind": agreed,
    "phase_kind": agreed,
    "planned_kind": agreed,
    "peak_flops_kind": agreed,
    "peak_flops_run": agreed,
    "machines": agreed,
    **{f"precision_{part}": agreed for part in PRECISION_PARTS},
    **dict.fromkeys(PLAN_KEYS, median),
}
"""Rule for every figure, by its name in JSON and CSV: the mean; for `PLAN_KEYS` the median; for
peaks the largest, for each pod; for words the common one."""
OF_KIND = {
    "memory_kind": (
        "pod_memory_bytes",
        "peak_memory_bytes",
        "process_peak_bytes",
        "process_mean_bytes",
        "process_minimum_bytes",
    ),
    "phase_kind": tuple(f"peak_{phase}_bytes" for phase in PHASES),
    "planned_kind": ("planned_bytes", "measured_bytes", "measured_to_planned"),
    "peak_flops_kind": ("peak_flops_per_second", "model_flops_utilization"),
}
"""Figures that are of one kind or another, by the figure that says which kind: repeats of different
kinds have none."""
