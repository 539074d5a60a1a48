"""Every figure of a summary, by topic, from a record alone, with its unit, its formula and its rule for repeats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from statistics import mean, median
from typing import Any

from zeropods.measure.calibration import PLAN_KEYS, plan_figures, planned
from zeropods.measure.record import PHASES, PRECISION_PARTS, Record, Statistics, real_tokens
from zeropods.plan.facts import shape_recorded
from zeropods.plan.gpus import published_flops

DEVICE_USED, ALLOCATED, RESERVED, RESIDENT = "device-used", "allocated", "reserved", "resident"
"""Kinds of memory. They are four different things and are never mixed."""
LIVE_STATES = "live states"
PUBLISHED, MEASURED = "published", "measured matmul"
USED = ("utilization_percent", "memory_utilization_percent", "power_watts", "cpu_percent", "io_wait_percent")
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
        peak: the best FLOP/s measured on one such device, and the name of the run that did; the run's own if not given.
    """
    if record is None:
        return dict.fromkeys(RULES)
    values = {**_speed(record), **_precision(record), **_arithmetic(record, peak), **_memory(record), **_use(record)}
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


def of_ranks(record: Record, key: str) -> list[Any] | None:
    """A field of each rank, in rank order; None unless every rank of the run has measured it."""
    values = [value for rank in record.ranks if (value := getattr(rank, key)) is not None]
    return values if len(values) == len(record.ranks) == record.world_size else None


def over_ranks(record: Record, key: str, rule: Callable[[list[Any]], Any]) -> Any:
    """One value from a field of all ranks, such as the slowest's seconds or the sum of joules; None if one lacks it."""
    values = of_ranks(record, key)
    return None if values is None else rule(values)


def is_resumed(record: Record) -> bool:
    """Whether the last attempt, the one that was measured, continued from an earlier one's checkpoint."""
    return any(rank.first_step > 0 for rank in record.ranks)


def is_done(status: str) -> bool:
    """Whether the figures of a row with this status are from runs that ended well: `ok`, or `2 ok, 1 oom`."""
    return "ok" in status.replace(",", " ").split()


# Time and rates.


def _speed(record: Record) -> Values:
    """Rates of all ranks together, and seconds of the slowest rank.

    The duration is from a process's start to its end: start-up, steps, evaluation and saving. Tokens are real ones,
    without padding, for T5 those of both sides; padding is a share, of 1, of all tokens computed. The evaluation's rate
    is rows of the dev split / mean seconds of an evaluation.
    """
    rate, tokens = record.samples_per_second, sum(real_tokens(rank, record.task) for rank in record.ranks)
    padded = sum(rank.padded_tokens for rank in record.ranks)
    evaluation = over_ranks(record, "evaluate_seconds", lambda ranks: max(each.mean for each in ranks))
    return {
        # The whole of a resumed run was not measured.
        "duration_seconds": None if is_resumed(record) else over_ranks(record, "wall_seconds", max),
        "steps": record.steps,
        "train_seconds": record.train_seconds,
        "samples_per_second": rate,
        "tokens_per_second": None if rate is None or not tokens else rate * tokens / _samples(record),
        "padding_share": 1 - tokens / padded if padded else None,
        "evaluation_samples_per_second": ratio(record.dev_rows or None, evaluation),
        "start_seconds": over_ranks(record, "start_seconds", max),
        **{
            key: over_ranks(record, key, lambda ranks: max(each.total for each in ranks))
            for key in ("evaluate_seconds", "save_seconds")
        },
    }


def _samples(record: Record) -> int:
    """Number of training rows of all ranks in this attempt's steps: rows x passes x steps, summed over ranks."""
    per_step = record.per_device_train_batch_size * record.gradient_accumulation_steps
    return sum(per_step * rank.steps for rank in record.ranks)


# Precision: the number formats that a run computed in.


def _precision(record: Record) -> Values:
    """The number format of each kind of tensors in the first step; None where it was not measured."""
    return {f"precision_{part}": getattr(record.measured_precision, part, None) for part in PRECISION_PARTS}


# Arithmetic: how much of the hardware a run has used.


def _arithmetic(record: Record, best: tuple[float, str] | None) -> Values:
    """FLOP/s that the model needs, and peak FLOP/s of all the run's hardware at its precision, with their source.

    Operations are the model's, without recomputation: FLOPs of a sample of mean real tokens x samples/s. Tokens are
    those of source and target; for a causal model, all tokens and those with a loss. The peak is the published one of
    each rank's GPU, summed; where one is not published, or on CPUs, it is the best matrix multiplication measured by
    rank 0, or by another run, x GPUs, or x machines: pods of one machine share its cores.
    """
    rate, rows = record.samples_per_second, _samples(record)
    recorded = next((rank.shape for rank in record.ranks if rank.shape), None)
    shape = None if recorded is None else shape_recorded(json.dumps(recorded))
    source = sum(rank.source_tokens for rank in record.ranks)
    target = sum(rank.target_tokens for rank in record.ranks)
    needed = None
    if rate is not None and shape is not None and rows and source + target:
        needed = shape.training_flops(source / rows, target / rows) * rate
    one, run, kind = record.matmul_flops_per_second, None, MEASURED
    if one is not None and best is not None:
        one, run = best
    devices = len(record.ranks) if of_ranks(record, "gpu") else machines(record)
    peak = None if one is None or devices is None else one * devices
    of_gpus = [published_flops(name, record.precision) for name in of_ranks(record, "gpu") or ()]
    known = [each for each in of_gpus if each is not None]
    if known and len(known) == len(of_gpus):
        peak, run, kind = sum(known), None, PUBLISHED
    return {
        "model_flops_per_second": needed,
        "peak_flops_per_second": peak,
        "peak_flops_kind": None if peak is None else kind,
        "peak_flops_run": None if peak is None else run,
        "machines": machines(record),
    }


def machines(record: Record) -> int | None:
    """Number of distinct machines that the ranks ran on; pods of one machine count once."""
    found: int | None = over_ranks(record, "machine", lambda names: len(set(names)))
    return found


def matmul_key(record: Record) -> str:
    """A key that is equal for runs whose matrix multiplications are equally fast: the same device and precision."""
    gpu, hardware = next((rank.gpu for rank in record.ranks), None), record.hardware
    return f"{gpu or (hardware.get('cpu'), hardware.get('instructions'), hardware.get('cores'))} {record.precision}"


# A run that was restarted.


def _over_attempts(record: Record, earlier: Sequence[Record]) -> Values:
    """Seconds of the steps that count, and their share of the wall time, from the first attempt's start to the last
    one's end.

    A step counts once: in the last attempt that did it. Lost steps are those that were done again. The seconds are None
    where a step that counts was not timed; the other values are None for a run without an earlier attempt, or where an
    attempt or the end is not recorded.
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


# Memory, in bytes: what was used of each kind, and what was planned.


def _memory(record: Record) -> Values:
    """Peaks of memory of the rank or the pod that needed most, and the states and activations of a model.

    Allocated and reserved peaks are the allocator's own, resident ones are the kernel's (VmHWM); device-used is the
    highest sample of NVML, context and other processes included. Pods are compared by the first of device-used,
    allocated and resident that every rank has. A pod's device memory is that of its fullest GPU. Its resident memory
    is the sum of its ranks' peaks: no less than the peak of their sum, since the peaks need not coincide.

    Mean and minimum are those of a process's samples, of the same kind: the mean of all ranks, and the minimum of the
    rank that needed least.

    Peaks of phases are of allocated memory on GPUs and of resident memory on CPUs; their counters are reset in between.

    States are live parameters, gradients and optimizer states before an optimizer step, wherever they are. Activations
    are those of a pod's processes at their largest batch, by the plan: nothing counts them on a CPU. The plan is
    compared with the peak of device-used memory on GPUs, with the states on CPUs, of the rank that needed most.
    """
    peaks = {kind: of_ranks(record, f"peak_{column_of(kind)}") or [] for kind in (RESERVED, ALLOCATED, RESIDENT)}
    peaks = {DEVICE_USED: [one.peak for one in samples_of(record, column_of(DEVICE_USED))], **peaks}
    most = {kind: max(of_kind, default=None) for kind, of_kind in peaks.items()}
    kind = next((kind for kind in (DEVICE_USED, ALLOCATED, RESIDENT) if peaks[kind]), None)
    sampled = [] if kind is None else samples_of(record, column_of(kind))
    pods = None if kind is None else _of_pods(record, peaks[kind], sum if kind == RESIDENT else max)
    states = over_ranks(record, "live_bytes", lambda ranks: [live.total for live in ranks])
    has_phases = any(rank.phases for rank in record.ranks)
    phase_kind = next((kind for kind in (ALLOCATED, RESIDENT) if peaks[kind] and has_phases), None)
    phases: dict[str, list[Any]] = {
        phase: [getattr(rank.phases.get(phase), f"peak_{phase_kind}_bytes", None) for rank in record.ranks]
        for phase in PHASES
    }
    plan, is_gpu = planned(record), bool(of_ranks(record, "gpu"))
    return {
        "pod_memory_bytes": pods,
        "peak_memory_bytes": max(pods or (), default=None),
        "pod_state_bytes": None if states is None else _of_pods(record, states, sum),
        "pod_activation_bytes": None if plan is None else plan.parts()["activations"] * record.slots,
        "memory_kind": kind,
        "process_peak_bytes": None if kind is None else most[kind],
        "process_mean_bytes": mean(one.mean for one in sampled) if sampled else None,
        "process_minimum_bytes": min(one.minimum for one in sampled) if sampled else None,
        **{f"peak_{column_of(kind)}": peak for kind, peak in most.items()},
        "phase_kind": phase_kind,
        # None if a rank has none.
        **{f"peak_{phase}_bytes": None if None in of else max(of, default=None) for phase, of in phases.items()},
        "planned_kind": DEVICE_USED if is_gpu else LIVE_STATES,
        "planned_bytes": None if plan is None else plan.device_bytes if is_gpu else plan.state_bytes,
        "measured_bytes": most[DEVICE_USED] if is_gpu else max(states or (), default=None),
    }


def _of_pods(record: Record, values: Sequence[float], rule: Callable[[Iterable[float]], float]) -> list[float]:
    """One value for each pod, in pod order, from the values of its ranks."""
    pods: dict[int, list[float]] = {}
    for rank, value in zip(record.ranks, values, strict=True):
        pods.setdefault(rank.rank // record.slots, []).append(value)
    return [rule(of_pod) for of_pod in pods.values()]


# How busy the hardware was, and what came of it.


def _use(record: Record) -> Values:
    """For each column of samples, the mean over ranks of their means and 95th percentiles, None unless all have it;
    the last losses; the energy of all GPUs."""
    values: Values = {}
    for column in USED:
        for statistic in ("mean", "p95"):
            found = [getattr(each, statistic) for each in samples_of(record, column)]
            values[f"{column}_{statistic}"] = mean(found) if found and None not in found else None
    return {
        **values,
        "train_loss": record.losses[-1].loss if record.losses else None,
        "eval_loss": record.eval_losses[-1].loss if record.eval_losses else None,
        "energy_joules": over_ranks(record, "energy_joules", sum),
    }


def samples_of(record: Record, column: str) -> list[Statistics]:
    """Statistics of each rank's samples of one column; an empty list unless every rank has some."""
    found = [sampled.get(column) for sampled in of_ranks(record, "sampled") or ()]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else []


def column_of(kind: str) -> str:
    """Name of the column of samples of a kind of memory."""
    return f"{kind.replace('-', '_')}_bytes"


def ratio(value: float | None, base: float | None) -> float | None:
    """`value` / `base`; None where it cannot be computed."""
    return None if value is None or not base else value / base


# Repeats: one value from those of the runs that have it.


def of_repeats(runs: Sequence[Values]) -> Values:
    """Every figure of a group of repeats, from the `figures` of those that have it."""
    known = {key: [run[key] for run in runs if run[key] is not None] for key in RULES}
    together = {key: RULES[key](values) if values else None for key, values in known.items()}
    mixed = [keys for kind, keys in OF_KIND.items() if together[kind] is None]
    return {**together, **dict.fromkeys(key for keys in mixed for key in keys)}


def agreed(values: Sequence[Any]) -> Any:
    """The value of all repeats, or None where they differ."""
    return values[0] if all(value == values[0] for value in values) else None


RULES: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("duration_seconds", "steps", "train_seconds", "samples_per_second", "tokens_per_second"), mean),
    **dict.fromkeys(("padding_share", "evaluation_samples_per_second", "start_seconds", "evaluate_seconds"), mean),
    **dict.fromkeys(("save_seconds", "goodput", "lost_steps", "train_loss", "eval_loss"), mean),
    **dict.fromkeys(("model_flops_per_second", "peak_flops_per_second", "model_flops_utilization"), mean),
    **{f"{column}_{statistic}": mean for column in USED for statistic in ("mean", "p95")},
    **dict.fromkeys(("energy_joules", "energy_kwh", "cost"), mean),
    **dict.fromkeys(("pod_memory_bytes", "pod_state_bytes"), lambda runs: list(map(max, zip(*runs, strict=True)))),
    **{f"peak_{kind}_bytes": max for kind in ("memory", "device_used", "reserved", "allocated", "resident", *PHASES)},
    **dict.fromkeys(("pod_activation_bytes", "planned_bytes", "measured_bytes", "measured_to_planned"), max),
    "process_peak_bytes": max,
    "process_mean_bytes": mean,
    "process_minimum_bytes": min,
    **dict.fromkeys(("memory_kind", "phase_kind", "planned_kind", "peak_flops_kind"), agreed),
    **dict.fromkeys(("peak_flops_run", "machines"), agreed),
    **{f"precision_{part}": agreed for part in PRECISION_PARTS},
    **dict.fromkeys(PLAN_KEYS, median),
}
"""Rule for every figure, by its name in JSON and CSV: the mean; for `PLAN_KEYS` the median; for peaks the largest, for
each pod; for words the common one."""
OF_KIND = {
    "memory_kind": (
        *("pod_memory_bytes", "peak_memory_bytes"),
        *("process_peak_bytes", "process_mean_bytes", "process_minimum_bytes"),
    ),
    "phase_kind": tuple(f"peak_{phase}_bytes" for phase in PHASES),
    "planned_kind": ("planned_bytes", "measured_bytes", "measured_to_planned"),
    "peak_flops_kind": ("peak_flops_per_second", "model_flops_utilization"),
}
"""Figures that are of one kind or another, by the figure that says which kind: repeats of different kinds have none."""
