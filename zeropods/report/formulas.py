"""Every figure of a summary, by topic, from a record alone, with its unit, its formula and its rule
for repeats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar

from zeropods.measure.calibration import PLAN_KEYS, plan_figures
from zeropods.measure.planned_runs import planned_memory
from zeropods.measure.record import (
    PRECISION_PARTS,
    MeasuredPrecision,
    RankMeasurement,
    Record,
    Statistics,
    real_tokens,
)
from zeropods.plan.facts import shape_recorded
from zeropods.plan.gpus import published_flops
from zeropods.plan.memory import PlannedMemory
from zeropods.report.row import Figures
from zeropods.tables import SECONDS_PER_HOUR

DEVICE_USED, ALLOCATED, RESERVED, RESIDENT = "device-used", "allocated", "reserved", "resident"
"""Kinds of memory. They are four different things and are never mixed."""
COLUMN_OF_KIND = {
    DEVICE_USED: "device_used_bytes",
    ALLOCATED: "allocated_bytes",
    RESIDENT: "resident_bytes",
}
"""The column of `memory/N.csv` with the samples of a kind of memory."""
LIVE_STATES = "live states"
PUBLISHED_PEAK = "published"
MEASURED_PEAK = "measured matmul"
JOULES_PER_KWH = 3.6e6

Value = TypeVar("Value")


def figures(
    record: Record | None,
    price_per_hour: float | None = None,
    *,
    earlier: Sequence[Record] = (),
    peak: tuple[float, str] | None = None,
) -> Figures:
    """Every figure of a run; all None where there is no record.

    Args:
        price_per_hour: price of one pod, in any currency.
        earlier: records of the run's earlier attempts, in their order.
        peak: the best FLOP/s of a matrix multiplication measured on one device of the run's kind,
            and the name of the run that measured it; the run's own FLOP/s if not given.
    """
    if record is None:
        return Figures()
    # Each step adds its figures to those that are known so far.
    known = _speed(record)
    known = _with_precision(known, record)
    known = _with_arithmetic(known, record, peak)
    known = _with_memory(known, record)
    known = _with_use(known, record)
    known = _with_plan(known, record)
    known = _with_attempts(known, record, earlier)
    return replace(
        known,
        model_flops_utilization=ratio(known.model_flops_per_second, known.peak_flops_per_second),
        measured_to_planned=ratio(known.measured_bytes, known.planned_bytes),
        energy_kwh=ratio(known.energy_joules, JOULES_PER_KWH),
        cost=_cost(record.pods, known.duration_seconds, price_per_hour),
    )


def _cost(pods: int, seconds: float | None, price_per_hour: float | None) -> float | None:
    """The price of all pods from start to end; None without a duration or a price."""
    if seconds is None or price_per_hour is None:
        return None
    return pods * seconds / SECONDS_PER_HOUR * price_per_hour


def of_ranks(
    record: Record, measured: Callable[[RankMeasurement], Value | None]
) -> list[Value] | None:
    """A value that each rank measured, in rank order; None unless every rank of the run measured
    it.

    Args:
        measured: takes the value from what a rank measured.
    """
    values = []
    for rank in record.ranks:
        value = measured(rank)
        if value is not None:
            values.append(value)
    is_whole = len(values) == len(record.ranks) == record.world_size
    return values if is_whole else None


def slowest(record: Record, seconds: Callable[[RankMeasurement], float | None]) -> float | None:
    """Seconds of the rank that took longest; None if a rank did not measure them."""
    return max(of_ranks(record, seconds) or (), default=None)


def is_resumed(record: Record) -> bool:
    """Whether the last attempt, the one that was measured, continued from an earlier one's
    checkpoint."""
    return any(rank.first_step > 0 for rank in record.ranks)


# Time and rates.


def _speed(record: Record) -> Figures:
    """Rates of all ranks together, and seconds of the slowest rank.

    The duration is from a process's start to its end: start-up, steps, evaluation and saving.
    Tokens are real ones, without padding, for T5 those of both sides; padding is a share, of 1, of
    all tokens computed. The evaluation's rate is rows of the dev split / mean seconds of an
    evaluation.
    """
    duration = None
    # The clocks of a resumed run have measured its last attempt alone.
    if not is_resumed(record):
        duration = slowest(record, lambda rank: rank.wall_seconds)

    tokens = sum(real_tokens(rank, record.task) for rank in record.ranks)
    padded_tokens = sum(rank.padded_tokens for rank in record.ranks)
    rate = record.samples_per_second
    tokens_per_second = None
    if rate is not None and tokens:
        tokens_per_second = rate * tokens / _trained_rows(record)

    # Without rows to evaluate, there is no rate, rather than a rate of 0.
    dev_rows = record.dev_rows or None
    evaluations = of_ranks(record, lambda rank: rank.evaluate_seconds) or ()
    seconds_of_evaluations = [evaluations_of_rank.mean for evaluations_of_rank in evaluations]
    slowest_evaluation = max(seconds_of_evaluations, default=None)
    return Figures(
        duration_seconds=duration,
        steps=record.steps,
        train_seconds=record.train_seconds,
        samples_per_second=rate,
        tokens_per_second=tokens_per_second,
        padding_share=1 - tokens / padded_tokens if padded_tokens else None,
        evaluation_samples_per_second=ratio(dev_rows, slowest_evaluation),
        start_seconds=slowest(record, lambda rank: rank.start_seconds),
        evaluate_seconds=slowest(record, lambda rank: _total(rank.evaluate_seconds)),
        save_seconds=slowest(record, lambda rank: _total(rank.save_seconds)),
    )


def _total(durations: Statistics | None) -> float | None:
    """Seconds of durations together; None where they were not measured."""
    return None if durations is None else durations.total


def _trained_rows(record: Record) -> int:
    """Number of training rows of all ranks in the last attempt's steps: batch size x accumulation x
    steps, summed over ranks."""
    rows_per_step = record.per_device_train_batch_size * record.gradient_accumulation_steps
    return sum(rows_per_step * rank.steps for rank in record.ranks)


# Precision: the number formats that a run computed in.


def _with_precision(known: Figures, record: Record) -> Figures:
    """Add the number format of each kind of tensors in the first step."""
    measured = record.measured_precision
    if measured is None:
        return known
    return replace(
        known,
        precision_weights=measured.weights,
        precision_master_weights=measured.master_weights,
        precision_optimizer_states=measured.optimizer_states,
        precision_gradients_sent=measured.gradients_sent,
        precision_linear_output=measured.linear_output,
    )


def measured_precision(known: Figures) -> MeasuredPrecision:
    """The number formats of a row as a run measures them, as far as all repeats agree on them."""
    return MeasuredPrecision(
        weights=known.precision_weights,
        master_weights=known.precision_master_weights,
        optimizer_states=known.precision_optimizer_states,
        gradients_sent=known.precision_gradients_sent,
        linear_output=known.precision_linear_output,
    )


# Arithmetic: how much of the hardware a run has used.


def _with_arithmetic(known: Figures, record: Record, best: tuple[float, str] | None) -> Figures:
    """Add FLOP/s that the model needs, peak FLOP/s of all the run's hardware at its precision with
    their source, and the number of machines.

    Args:
        best: the `peak` of `figures`.
    """
    peak = _peak_flops(record, best)
    return replace(
        known,
        model_flops_per_second=_model_flops(record),
        peak_flops_per_second=peak.flops_per_second,
        peak_flops_kind=peak.kind,
        peak_flops_run=peak.run,
        machines=machines(record),
    )


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

    rows = _trained_rows(record)
    source_tokens = sum(rank.source_tokens for rank in record.ranks)
    target_tokens = sum(rank.target_tokens for rank in record.ranks)
    has_tokens = bool(source_tokens + target_tokens)
    if not rows or not has_tokens:
        return None
    return shape.training_flops(source_tokens / rows, target_tokens / rows) * rate


class _Peak(NamedTuple):
    """Peak FLOP/s of all the hardware of a run."""

    flops_per_second: float | None = None
    kind: str | None = None
    run: str | None = None
    """Name of the run whose matrix multiplication it is, maybe the run itself; None where the peak
    is published, or no run was named."""


def _peak_flops(record: Record, best: tuple[float, str] | None) -> _Peak:
    """Peak FLOP/s of all the run's hardware, its kind, and the run that measured it.

    The peak is the published one of each rank's GPU, summed; where one is not published, or on
    CPUs, it is the best matrix multiplication measured by rank 0, or by the best run, x GPUs, or x
    machines: pods of one machine share its cores. All fields are None where nothing was measured.

    Args:
        best: the `peak` of `figures`.
    """
    gpus = of_ranks(record, lambda rank: rank.gpu) or []
    flops_of_gpus = [published_flops(name, record.precision) for name in gpus]
    published = [flops for flops in flops_of_gpus if flops is not None]
    all_are_published = len(published) == len(gpus)
    if published and all_are_published:
        return _Peak(sum(published), PUBLISHED_PEAK)

    flops_of_one_device = record.matmul_flops_per_second
    best_run = None
    if flops_of_one_device is not None and best is not None:
        flops_of_one_device, best_run = best
    devices = len(gpus) if gpus else machines(record)
    if flops_of_one_device is None or devices is None:
        return _Peak()
    return _Peak(flops_of_one_device * devices, MEASURED_PEAK, best_run)


def machines(record: Record) -> int | None:
    """Number of distinct machines that the ranks ran on; pods of one machine count once. None where
    a rank has not recorded its machine."""
    names = of_ranks(record, lambda rank: rank.machine)
    return None if names is None else len(set(names))


def matmul_key(record: Record) -> str:
    """A key that is equal for runs whose matrix multiplications are equally fast: the same device
    and precision."""
    # Of the first rank, which is the one that multiplies.
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
    """Count each step in the last attempt that did it.

    Args:
        attempts: the records of a run's attempts, in their order, one or more. Their `steps` are
            numbers of steps since the beginning of the run, earlier attempts included.
    """
    seconds = 0.0
    timed = 0
    lost = 0
    # The step from which the following attempt continued: what an attempt did beyond it is lost.
    # The last attempt has none, and loses nothing.
    continued_at = attempts[-1].steps
    for attempt in reversed(attempts):
        # An attempt without ranks has measured nothing, so none of its steps counts.
        first_steps = [rank.first_step for rank in attempt.ranks]
        first_step = min(first_steps, default=continued_at)
        kept_steps = continued_at - first_step
        seconds_of_ranks = [rank.seconds_of_first(kept_steps) for rank in attempt.ranks]
        seconds += max(seconds_of_ranks, default=0.0)
        last_kept = min(continued_at, attempt.steps)
        timed += max(0, last_kept - first_step)
        lost += max(0, attempt.steps - continued_at)
        # This attempt may have begun after the step from which a later one continued: then that
        # step stays the limit for the attempts before it.
        continued_at = min(continued_at, first_step)
    return _CountedSteps(seconds, timed, lost)


def _with_attempts(known: Figures, record: Record, earlier: Sequence[Record]) -> Figures:
    """Replace the seconds of a resumed run by those of the steps that count in all attempts; add
    the goodput, which is their share of the wall time from the first attempt's start to the last
    one's end, and the lost steps.

    A step counts once: in the last attempt that did it. Lost steps are those that were done again.
    The seconds are None where a step that counts was not timed; goodput and lost steps are None for
    a run without an earlier attempt, or where an attempt or the end is not recorded.
    """
    attempts = [*earlier, record]
    counted = _count_steps(attempts)
    train_seconds = record.train_seconds
    if is_resumed(record):
        train_seconds = counted.seconds if counted.timed == record.steps else None
    known = replace(known, train_seconds=train_seconds)

    ends = []
    for rank in record.ranks:
        if rank.ended_unix_seconds is not None:
            ends.append(rank.ended_unix_seconds)
    # `record.attempt` is the number of earlier attempts, some of which may have left no record.
    are_all_recorded = len(attempts) == record.attempt + 1
    if not earlier or not are_all_recorded or not ends:
        return known
    began = datetime.fromisoformat(attempts[0].started_at).timestamp()
    wall_seconds = max(ends) - began
    return replace(known, goodput=ratio(counted.seconds, wall_seconds), lost_steps=counted.lost)


# Memory, in bytes: what was used of each kind, and what was planned.


def _with_memory(known: Figures, record: Record) -> Figures:
    """Add peaks of memory of the rank or the pod that needed most, and the states and activations
    of a model.

    Pods are compared by the first of device-used, allocated and resident that every rank has. A
    pod's device memory is that of its fullest GPU. Its resident memory is the sum of its ranks'
    peaks: no less than the peak of their sum, since the peaks need not coincide.

    States are live parameters, gradients and optimizer states before an optimizer step, wherever
    they are. Activations are those of a pod's processes at their largest batch, by the plan:
    nothing counts them on a CPU. The plan is compared with the peak of device-used memory on GPUs,
    with the states on CPUs, of the rank that needed most.
    """
    peaks = _peaks_of_ranks(record)
    largest = {kind: max(peaks_of_kind, default=None) for kind, peaks_of_kind in peaks.items()}
    kind = _first_measured(peaks, (DEVICE_USED, ALLOCATED, RESIDENT))
    peaks_of_pods = None
    if kind == RESIDENT:
        peaks_of_pods = _of_pods(record, peaks[kind], sum)
    elif kind is not None:
        peaks_of_pods = _of_pods(record, peaks[kind], max)

    states = of_ranks(record, _live_bytes)
    plan = planned_memory(record)
    activations = None if plan is None else plan.parts()["activations"] * record.slots
    beside_plan = _beside_plan(record, plan, largest[DEVICE_USED], states)
    known = replace(
        known,
        pod_memory_bytes=peaks_of_pods,
        peak_memory_bytes=max(peaks_of_pods or (), default=None),
        pod_state_bytes=None if states is None else _of_pods(record, states, sum),
        pod_activation_bytes=activations,
        memory_kind=kind,
        process_peak_bytes=None if kind is None else largest[kind],
        peak_device_used_bytes=largest[DEVICE_USED],
        peak_reserved_bytes=largest[RESERVED],
        peak_allocated_bytes=largest[ALLOCATED],
        peak_resident_bytes=largest[RESIDENT],
        planned_kind=beside_plan.kind,
        planned_bytes=beside_plan.planned_bytes,
        measured_bytes=beside_plan.measured_bytes,
    )
    if kind is not None:
        known = _with_samples(known, samples_of(record, COLUMN_OF_KIND[kind]))
    return _with_phases(known, record, peaks)


class _BesidePlan(NamedTuple):
    """What is planned of a run's memory, and what was measured of the same kind."""

    kind: str
    planned_bytes: float | None
    measured_bytes: float | None
    """Measured bytes of the rank that needed most."""


def _beside_plan(
    record: Record,
    plan: PlannedMemory | None,
    most_device_used: float | None,
    states: Sequence[int] | None,
) -> _BesidePlan:
    """All memory in use where every rank has a GPU; elsewhere the states alone, the only memory
    that a plan knows on a CPU.

    Args:
        plan: what is planned of one process; None where it cannot be planned.
        most_device_used: peak of the device-used memory of the fullest rank.
        states: bytes of the states of each rank; None where they were not measured.
    """
    if of_ranks(record, lambda rank: rank.gpu):
        device_bytes = None if plan is None else plan.device_bytes
        return _BesidePlan(DEVICE_USED, device_bytes, most_device_used)
    state_bytes = None if plan is None else plan.state_bytes
    return _BesidePlan(LIVE_STATES, state_bytes, max(states or (), default=None))


def _first_measured(peaks: Mapping[str, Sequence[float]], kinds: Iterable[str]) -> str | None:
    """The first of some kinds of memory of which every rank has a peak; None if there is none."""
    for kind in kinds:
        if peaks[kind]:
            return kind
    return None


def _live_bytes(rank: RankMeasurement) -> int | None:
    """The states of a rank in bytes; None where they were not measured."""
    return None if rank.live_bytes is None else rank.live_bytes.total


def _peaks_of_ranks(record: Record) -> dict[str, list[float]]:
    """The peak of each rank by kind of memory; an empty list of a kind that a rank lacks.

    Allocated and reserved peaks are the allocator's own, resident ones are the kernel's (VmHWM);
    device-used is the highest sample of NVML, context and other processes included.
    """
    sampled = samples_of(record, COLUMN_OF_KIND[DEVICE_USED])
    return {
        DEVICE_USED: [statistics.peak for statistics in sampled],
        RESERVED: list(of_ranks(record, lambda rank: rank.peak_reserved_bytes) or ()),
        ALLOCATED: list(of_ranks(record, lambda rank: rank.peak_allocated_bytes) or ()),
        RESIDENT: list(of_ranks(record, lambda rank: rank.peak_resident_bytes) or ()),
    }


def _of_pods(
    record: Record, values: Sequence[float], rule: Callable[[Iterable[float]], float]
) -> list[float]:
    """One value for each pod, in pod order, from the values of its ranks.

    Args:
        values: one for each rank, in rank order.
        rule: makes one value of those of a pod's ranks, such as `max`.
    """
    values_by_pod: dict[int, list[float]] = {}
    for rank, value in zip(record.ranks, values, strict=True):
        pod = rank.rank // record.slots
        values_by_pod.setdefault(pod, []).append(value)
    return [rule(values_of_pod) for values_of_pod in values_by_pod.values()]


def _with_samples(known: Figures, sampled: Sequence[Statistics]) -> Figures:
    """Add mean and minimum of the memory of one process, from the samples of each rank: the mean of
    all ranks, and the minimum of the rank that needed least."""
    if not sampled:
        return known
    return replace(
        known,
        process_mean_bytes=mean(statistics.mean for statistics in sampled),
        process_minimum_bytes=min(statistics.minimum for statistics in sampled),
    )


def _with_phases(known: Figures, record: Record, peaks: Mapping[str, Sequence[float]]) -> Figures:
    """Add the peak within each phase, which is that of the rank that needed most.

    The peak is None for a phase that a rank has not measured. Peaks are of allocated memory on GPUs
    and of resident memory on CPUs; a rank's counter of its peak begins anew with each phase.
    """
    kind = None
    if any(rank.phases for rank in record.ranks):
        kind = _first_measured(peaks, (ALLOCATED, RESIDENT))
    if kind is None:
        return known
    return replace(
        known,
        phase_kind=kind,
        peak_load_bytes=_peak_of_phase(record, "load", kind),
        peak_first_step_bytes=_peak_of_phase(record, "first_step", kind),
        peak_steady_bytes=_peak_of_phase(record, "steady", kind),
        peak_evaluate_bytes=_peak_of_phase(record, "evaluate", kind),
        peak_save_bytes=_peak_of_phase(record, "save", kind),
    )


def _peak_of_phase(record: Record, phase: str, kind: str) -> int | None:
    """The largest peak of memory that a rank had in a phase, in bytes; None where it is not known
    of every rank.

    Args:
        kind: `ALLOCATED` or `RESIDENT`.
    """
    peaks = []
    for rank in record.ranks:
        measured = rank.phases.get(phase)
        if measured is None:
            return None
        peak = measured.peak_resident_bytes
        if kind == ALLOCATED:
            peak = measured.peak_allocated_bytes
        if peak is None:
            return None
        peaks.append(peak)
    return max(peaks)


# How busy the hardware was, and what came of it.


def _with_use(known: Figures, record: Record) -> Figures:
    """Add the use of GPUs and cores, the last losses, and the energy of all GPUs.

    Of each column of samples there are the mean over ranks of their means, and that of their 95th
    percentiles; None unless all ranks have samples.
    """
    gpu = samples_of(record, "utilization_percent")
    gpu_memory = samples_of(record, "memory_utilization_percent")
    power = samples_of(record, "power_watts")
    cores = samples_of(record, "cpu_percent")
    io_wait = samples_of(record, "io_wait_percent")
    joules = of_ranks(record, lambda rank: rank.energy_joules)
    return replace(
        known,
        utilization_percent_mean=_mean_of_means(gpu),
        utilization_percent_p95=_mean_p95(gpu),
        memory_utilization_percent_mean=_mean_of_means(gpu_memory),
        memory_utilization_percent_p95=_mean_p95(gpu_memory),
        power_watts_mean=_mean_of_means(power),
        power_watts_p95=_mean_p95(power),
        cpu_percent_mean=_mean_of_means(cores),
        cpu_percent_p95=_mean_p95(cores),
        io_wait_percent_mean=_mean_of_means(io_wait),
        io_wait_percent_p95=_mean_p95(io_wait),
        train_loss=record.losses[-1].loss if record.losses else None,
        eval_loss=record.eval_losses[-1].loss if record.eval_losses else None,
        energy_joules=None if joules is None else sum(joules),
    )


def _mean_of_means(sampled: Sequence[Statistics]) -> float | None:
    """Mean over ranks of the means of their samples; None without ranks."""
    return mean(statistics.mean for statistics in sampled) if sampled else None


def _mean_p95(sampled: Sequence[Statistics]) -> float | None:
    """Mean over ranks of the 95th percentiles of their samples; None without ranks."""
    return mean(statistics.p95 for statistics in sampled) if sampled else None


def samples_of(record: Record, column: str) -> list[Statistics]:
    """Statistics of each rank's samples of one column; an empty list unless every rank has some."""
    return of_ranks(record, lambda rank: rank.sampled.get(column)) or []


def ratio(value: float | None, base: float | None) -> float | None:
    """`value` / `base`; None where one is not known, or the base is 0."""
    if value is None or not base:
        return None
    return value / base


# The plan of `zeropods plan` beside what it is about.


def _with_plan(known: Figures, record: Record) -> Figures:
    """Add the planned peak of memory and seconds of a step, with their intervals, and the measured
    ones."""
    plan = plan_figures(record)
    return replace(
        known,
        plan_peak_planned_bytes=plan["plan_peak_planned_bytes"],
        plan_peak_low_bytes=plan["plan_peak_low_bytes"],
        plan_peak_high_bytes=plan["plan_peak_high_bytes"],
        plan_peak_measured_bytes=plan["plan_peak_measured_bytes"],
        plan_step_planned_seconds=plan["plan_step_planned_seconds"],
        plan_step_low_seconds=plan["plan_step_low_seconds"],
        plan_step_high_seconds=plan["plan_step_high_seconds"],
        plan_step_measured_seconds=plan["plan_step_measured_seconds"],
    )


# Repeats: one value from those of the runs that have it.


def of_repeats(runs: Sequence[Figures]) -> Figures:
    """Every figure of a group of repeats by its rule in `RULES`, from those of the repeats that
    have it; None where none has.

    Args:
        runs: the figures of each repeat.
    """
    figures_of_row: dict[str, Any] = {}
    for key, rule in RULES.items():
        values = []
        for run in runs:
            value = vars(run)[key]
            if value is not None:
                values.append(value)
        figures_of_row[key] = rule(values) if values else None
    # Sizes of different kinds must not be taken together.
    for kind, keys in OF_KIND.items():
        if figures_of_row[kind] is None:
            for key in keys:
                figures_of_row[key] = None
    return Figures(**figures_of_row)


def by_key(figures: Figures) -> dict[str, object]:
    """The figures of a row by their keys, in the order in which `summary.json` has them: that of
    `RULES`."""
    values = vars(figures)
    return {key: values[key] for key in RULES}


def agreed(values: Sequence[Any]) -> Any:
    """The value of all repeats, or None where they differ.

    Args:
        values: one or more.
    """
    first = values[0]
    return first if all(value == first for value in values) else None


def _most_of_each_pod(runs: Sequence[Sequence[float]]) -> list[float]:
    """The largest value of each pod, from lists of one value for each pod."""
    return [max(values_of_pod) for values_of_pod in zip(*runs, strict=True)]


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
    "utilization_percent_mean": mean,
    "utilization_percent_p95": mean,
    "memory_utilization_percent_mean": mean,
    "memory_utilization_percent_p95": mean,
    "power_watts_mean": mean,
    "power_watts_p95": mean,
    "cpu_percent_mean": mean,
    "cpu_percent_p95": mean,
    "io_wait_percent_mean": mean,
    "io_wait_percent_p95": mean,
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
    "peak_load_bytes": max,
    "peak_first_step_bytes": max,
    "peak_steady_bytes": max,
    "peak_evaluate_bytes": max,
    "peak_save_bytes": max,
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
"""Rule for every figure, by its field of `Figures`, in the order in which a row is written: the
mean; for `PLAN_KEYS` the median; for peaks the largest, for each pod; for words the common one."""
OF_KIND = {
    "memory_kind": (
        "pod_memory_bytes",
        "peak_memory_bytes",
        "process_peak_bytes",
        "process_mean_bytes",
        "process_minimum_bytes",
    ),
    "phase_kind": (
        "peak_load_bytes",
        "peak_first_step_bytes",
        "peak_steady_bytes",
        "peak_evaluate_bytes",
        "peak_save_bytes",
    ),
    "planned_kind": ("planned_bytes", "measured_bytes", "measured_to_planned"),
    "peak_flops_kind": ("peak_flops_per_second", "model_flops_utilization"),
}
"""Figures that are of one kind or another, by the figure that says which kind: repeats of different
kinds have none."""
