"""Every figure of a summary: one pure function of a record, with its unit and its formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from zeropods.measure.record import PHASES, Record, real_tokens
from zeropods.plan.machines import published_flops
from zeropods.plan.shapes import shape_from

# What all ranks of a record have measured: a figure of a run needs each of them.


def of_ranks(record: Record, key: str) -> list[Any] | None:
    """A field of each rank, in their order; None unless every rank of the run has measured it."""
    values = [value for rank in record.ranks if (value := getattr(rank, key)) is not None]
    return values if len(values) == len(record.ranks) == record.world_size else None


def largest(record: Record, key: str) -> Any:
    """The largest of a field over all ranks, or None."""
    values = of_ranks(record, key)
    return None if values is None else max(values)


def longest(record: Record, key: str) -> float | None:
    """The largest sum, over ranks, of a list of seconds, or None where some rank has an empty one."""
    values = of_ranks(record, key)
    return max(map(sum, values)) if values and all(values) else None


# Time and rates of a run. A rate is of all ranks together.


def duration_seconds(record: Record) -> float | None:
    """Seconds from a process's start to its end, of the slowest rank: start-up, steps, evaluation and saving.

    None for a run that was resumed: nobody has measured all of it.
    """
    return None if is_resumed(record) else largest(record, "wall_seconds")


def start_seconds(record: Record) -> float | None:
    """Seconds from a process's start to its first step, of the slowest rank."""
    return largest(record, "start_seconds")


def evaluate_seconds(record: Record) -> float | None:
    """Seconds of all evaluations, of the slowest rank."""
    return longest(record, "evaluate_seconds")


def save_seconds(record: Record) -> float | None:
    """Seconds of all saving, of the slowest rank."""
    return longest(record, "save_seconds")


def is_resumed(record: Record) -> bool:
    """Whether the last attempt, the one that was measured, went on from an earlier one's checkpoint."""
    return any(rank.first_step > 0 for rank in record.ranks)


def samples(record: Record) -> int:
    """Training rows of all ranks in the steps of this attempt: rows x passes x steps, summed over ranks."""
    a_step = record.per_device_train_batch_size * record.gradient_accumulation_steps
    return sum(a_step * len(rank.step_seconds) for rank in record.ranks)


def tokens_per_sample(record: Record) -> tuple[float, float] | None:
    """Mean real tokens of a training row: tokens of all ranks / `samples`; None without a count.

    Source and target; of a causal model all tokens, and those with a loss, which are among them.
    """
    rows = samples(record)
    source = sum(rank.source_tokens for rank in record.ranks)
    target = sum(rank.target_tokens for rank in record.ranks)
    return (source / rows, target / rows) if rows and source + target else None


def tokens_per_second(record: Record) -> float | None:
    """Real tokens a second, no padding: samples/s x mean real tokens a sample, of T5 both sides."""
    rate, rows = record.samples_per_second, samples(record)
    tokens = sum(real_tokens(rank, record.task) for rank in record.ranks)
    return None if rate is None or not tokens else rate * tokens / rows


def padding_share(record: Record) -> float | None:
    """Share of 1 of what was computed that was padding: 1 - real tokens / tokens with padding, of all ranks."""
    padded = sum(rank.padded_tokens for rank in record.ranks)
    real = sum(real_tokens(rank, record.task) for rank in record.ranks)
    return 1 - real / padded if padded else None


def evaluation_samples_per_second(record: Record) -> float | None:
    """Rows of the dev split / mean seconds of an evaluation, of the slowest rank."""
    seconds, rows = of_ranks(record, "evaluate_seconds"), record.dev_rows
    if not rows or not seconds or not all(seconds):
        return None
    slowest = max(map(mean, seconds))
    return rows / slowest if slowest else None


# How much of the hardware's arithmetic a run has used. Operations are of the model: real tokens, no recomputation.

PUBLISHED, MEASURED = "published", "measured matmul"


def model_flops_per_second(record: Record) -> float | None:
    """FLOP/s that the model needs: FLOPs of a sample of mean real tokens x samples/s.

    `plan.shapes` has them; of a causal model half the square of attention is included.
    """
    rate, tokens = record.samples_per_second, tokens_per_sample(record)
    shape = next((rank.shape for rank in record.ranks if rank.shape), None)
    if rate is None or tokens is None or shape is None:
        return None
    return shape_from(shape).training_flops(*tokens) * rate


def peak_flops_per_second(record: Record) -> float | None:
    """FLOP/s of all that the run ran on, at its precision.

    The published peak of each rank's GPU, summed; where one is not published, or on CPUs, the best matrix
    multiplication that rank 0 measured x GPUs, or x machines: pods of one machine share its cores.
    """
    published, measured = _published(record), _measured(record)
    return measured if published is None else published


def peak_kind(record: Record) -> str | None:
    """`published` or `measured matmul`: where the peak is from; None where there is none."""
    if _published(record) is not None:
        return PUBLISHED
    return None if _measured(record) is None else MEASURED


def model_flops_utilization(used: float | None, peak: float | None) -> float | None:
    """MFU, share of 1: model FLOP/s / peak FLOP/s."""
    return None if used is None or not peak else used / peak


def machines(record: Record) -> int | None:
    """Distinct machines that the ranks ran on; pods of one machine are one."""
    found = of_ranks(record, "machine")
    return None if found is None else len(set(found))


def _published(record: Record) -> float | None:
    names = of_ranks(record, "gpu")
    peaks = [published_flops(name, record.precision) for name in names or ()]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def _measured(record: Record) -> float | None:
    one = next((rank.matmul_flops_per_second for rank in record.ranks if rank.rank == 0), None)
    devices = len(record.ranks) if of_ranks(record, "gpu") else machines(record)
    return None if one is None or devices is None else one * devices


# Memory of a run, in bytes. Allocated, reserved, device-used and resident memory are four kinds, never mixed.

DEVICE_USED, ALLOCATED, RESERVED, RESIDENT = "device-used", "allocated", "reserved", "resident"
LIVE_STATES = "live states"


def peak_bytes(record: Record, kind: str) -> float | None:
    """Peak of one kind of memory, of the rank that needed most.

    Allocated and reserved are the allocator's own peaks, resident is the kernel's (VmHWM); device-used is the
    highest sample of NVML, context and other processes included.
    """
    if kind != DEVICE_USED:
        return largest(record, f"peak_{kind}_bytes")
    used = _device_used(record)
    return None if used is None else max(used)


def pod_memory_kind(record: Record) -> str | None:
    """The kind in which pods are compared: the first of device-used, allocated and resident that every rank has."""
    kinds = (DEVICE_USED, ALLOCATED, RESIDENT)
    return next((kind for kind in kinds if peak_bytes(record, kind) is not None), None)


def pod_memory_bytes(record: Record) -> list[float] | None:
    """Peak memory of each pod, in the order of the pods, in the kind of `pod_memory_kind`.

    A pod's device memory is that of its fullest GPU. Its resident memory is the sum of its ranks' peaks: no less
    than the peak of their sum, since they need not come at one time.
    """
    kind = pod_memory_kind(record)
    if kind is None:
        return None
    values = _device_used(record) if kind == DEVICE_USED else of_ranks(record, f"peak_{kind}_bytes")
    pods: dict[int, list[float]] = {}
    for rank, value in zip(record.ranks, values or (), strict=True):
        pods.setdefault(rank.rank // record.slots, []).append(value)
    return [sum(of_pod) if kind == RESIDENT else max(of_pod) for of_pod in pods.values()]


def peak_memory_bytes(record: Record) -> float | None:
    """Memory of the pod that needed most."""
    pods = pod_memory_bytes(record)
    return None if pods is None else max(pods)


def phase_kind(record: Record) -> str | None:
    """Allocated on GPUs, resident on CPUs: whose own counters are reset between phases; None without phases."""
    kinds = (ALLOCATED, RESIDENT) if any(rank.phases for rank in record.ranks) else ()
    return next((kind for kind in kinds if peak_bytes(record, kind) is not None), None)


def phase_peak_bytes(record: Record, phase: str) -> float | None:
    """Peak within a phase, of the rank that needed most, in the kind of `phase_kind`; None if a rank has none."""
    kind = phase_kind(record)
    phases = of_ranks(record, "phases")
    if kind is None or phases is None:
        return None
    peaks: list[Any] = [getattr(of_rank.get(phase), f"peak_{kind}_bytes", None) for of_rank in phases]
    return None if None in peaks else max(peaks)


def planned_bytes(record: Record) -> float | None:
    """What the plan says of `measured_bytes`, for a run of this shape, batch and technique."""
    plan = _planned(record)
    if plan is None:
        return None
    return plan.device_bytes if of_ranks(record, "gpu") else plan.state_bytes


def measured_bytes(record: Record) -> float | None:
    """What is compared with the plan, of the rank that needed most.

    On GPUs the peak of device-used memory; on CPUs live parameters, gradients and optimizer states before a step.
    """
    if of_ranks(record, "gpu"):
        return peak_bytes(record, DEVICE_USED)
    live = of_ranks(record, "live_bytes")
    return None if live is None else max(parts.parameters + parts.gradients + parts.optimizer for parts in live)


def planned_kind(record: Record) -> str:
    """What `planned_bytes` and `measured_bytes` are of: `device-used` on GPUs, `live states` on CPUs."""
    return DEVICE_USED if of_ranks(record, "gpu") else LIVE_STATES


def measured_to_planned(measured: float | None, planned: float | None) -> float | None:
    """Ratio: measured bytes / planned bytes."""
    return None if measured is None or not planned else measured / planned


def _device_used(record: Record) -> list[float] | None:
    sampled = of_ranks(record, "sampled") or []
    used = [columns["device_used_bytes"].peak for columns in sampled if "device_used_bytes" in columns]
    return used if used and len(used) == len(sampled) else None


def _planned(record: Record) -> Any:
    from zeropods.plan.memory import planned

    return planned(record)


# What came of a run: losses, accuracy, energy, cost.

JOULES_A_KWH = 3.6e6
SECONDS_AN_HOUR = 3_600
Score = dict[str, Any]


def train_loss(record: Record) -> float | None:
    """The last training loss, nats a label token."""
    return record.losses[-1].loss if record.losses else None


def eval_loss(record: Record) -> float | None:
    """The last evaluation loss, nats a label token."""
    return record.eval_losses[-1].loss if record.eval_losses else None


def energy_joules(record: Record) -> float | None:
    """Joules of all ranks' GPUs from start to end, by NVML's own counters, summed."""
    joules = of_ranks(record, "energy_joules")
    return None if joules is None else sum(joules)


def energy_kwh(record: Record) -> float | None:
    """Kilowatt-hours: joules / 3.6 million."""
    joules = energy_joules(record)
    return None if joules is None else joules / JOULES_A_KWH


def cost(record: Record, price_per_hour: float | None) -> float | None:
    """Price of the run: pods x hours from start to end x price of a pod and hour; None without a price."""
    seconds = duration_seconds(record)
    if seconds is None or price_per_hour is None:
        return None
    return record.pods * seconds / SECONDS_AN_HOUR * price_per_hour


def inference_result(score: Score | None) -> tuple[str, float] | None:
    """What a run is judged by, and its name: of SQuAD F1, of text perplexity, of text-to-SQL execution accuracy; where
    no query could be run, logical form."""
    if score is None:
        return None
    if score.get("task") == "squad":
        return "F1", score["f1"]
    if score.get("task") == "lm":
        return "perplexity", score["perplexity"]
    if score["execution_accuracy"] is not None:
        return "execution", score["execution_accuracy"]
    return "logical form", score["logical_form_accuracy"]


# All figures by name, and what becomes of each in repeats.


def agreed(values: Sequence[Any]) -> Any:
    """The value of all repeats, or None where they differ."""
    return values[0] if all(value == values[0] for value in values) else None


def fullest(values: Sequence[list[float]]) -> list[float]:
    """For each pod the most that it needed in any repeat."""
    return [max(pods) for pods in zip(*values, strict=True)]


@dataclass(frozen=True)
class Figure:
    """One figure of a run."""

    key: str
    """Its name in JSON and CSV, with the unit of the raw value."""
    of: Callable[[Record], Any]
    """Its value, or None where it was not measured; the docstring has the formula."""
    of_repeats: Callable[[Sequence[Any]], Any] = mean
    """One value from those of the repeats that have it: their mean; of peaks the largest; of words the common one."""


def _recorded(key: str) -> Callable[[Record], Any]:
    return lambda record: getattr(record, key)


FIGURES = (
    Figure("duration_seconds", duration_seconds),
    Figure("steps", _recorded("steps")),
    Figure("train_seconds", _recorded("train_seconds")),
    Figure("samples_per_second", _recorded("samples_per_second")),
    Figure("tokens_per_second", tokens_per_second),
    Figure("padding_share", padding_share),
    Figure("evaluation_samples_per_second", evaluation_samples_per_second),
    Figure("start_seconds", start_seconds),
    Figure("evaluate_seconds", evaluate_seconds),
    Figure("save_seconds", save_seconds),
    Figure("model_flops_per_second", model_flops_per_second),
    Figure("peak_flops_per_second", peak_flops_per_second),
    Figure("peak_flops_kind", peak_kind, agreed),
    Figure("machines", machines, agreed),
    Figure("pod_memory_bytes", pod_memory_bytes, fullest),
    Figure("peak_memory_bytes", peak_memory_bytes, max),
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
    Figure("train_loss", train_loss),
    Figure("eval_loss", eval_loss),
    Figure("energy_joules", energy_joules),
    Figure("energy_kwh", energy_kwh),
)

DERIVED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "model_flops_utilization": mean,
    "measured_to_planned": max,
    "cost": mean,
}
"""Figures from other figures, and what becomes of them in repeats."""
OF_KIND = {
    "memory_kind": ("pod_memory_bytes", "peak_memory_bytes"),
    "phase_kind": tuple(f"peak_{phase}_bytes" for phase in PHASES),
    "planned_kind": ("planned_bytes", "measured_bytes", "measured_to_planned"),
    "peak_flops_kind": ("peak_flops_per_second", "model_flops_utilization"),
}
"""Figures that are of one kind or another, by the figure that says which: repeats of two kinds have none."""


def figures(record: Record | None, price_per_hour: float | None = None) -> dict[str, Any]:
    """Every figure of a run by name; all None where there is no record."""
    if record is None:
        return dict.fromkeys([*(figure.key for figure in FIGURES), *DERIVED])
    values = {figure.key: figure.of(record) for figure in FIGURES}
    return {
        **values,
        "model_flops_utilization": model_flops_utilization(
            values["model_flops_per_second"], values["peak_flops_per_second"]
        ),
        "measured_to_planned": measured_to_planned(values["measured_bytes"], values["planned_bytes"]),
        "cost": cost(record, price_per_hour),
    }


def of_repeats(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every figure of repeats, from `figures` of each of them that has it."""
    ways = {**{figure.key: figure.of_repeats for figure in FIGURES}, **DERIVED}
    known = {key: [run[key] for run in runs if run[key] is not None] for key in ways}
    together = {key: ways[key](values) if values else None for key, values in known.items()}
    mixed = [of_kind for kind, of_kind in OF_KIND.items() if together[kind] is None]
    return {**together, **dict.fromkeys(key for keys in mixed for key in keys)}
