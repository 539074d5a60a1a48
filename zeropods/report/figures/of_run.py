"""All figures by name, and what becomes of each in repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from zeropods.measure.rank import PHASES
from zeropods.report.figures import arithmetic, memory, outcome, speed
from zeropods.report.figures.ranks import Record


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
    return lambda record: record[key]


FIGURES = (
    Figure("duration_seconds", speed.duration_seconds),
    Figure("steps", _recorded("steps")),
    Figure("train_seconds", _recorded("train_seconds")),
    Figure("samples_per_second", _recorded("samples_per_second")),
    Figure("tokens_per_second", speed.tokens_per_second),
    Figure("padding_share", speed.padding_share),
    Figure("evaluation_samples_per_second", speed.evaluation_samples_per_second),
    Figure("start_seconds", speed.start_seconds),
    Figure("evaluate_seconds", speed.evaluate_seconds),
    Figure("save_seconds", speed.save_seconds),
    Figure("model_flops_per_second", arithmetic.model_flops_per_second),
    Figure("peak_flops_per_second", arithmetic.peak_flops_per_second),
    Figure("peak_flops_kind", arithmetic.peak_kind, agreed),
    Figure("machines", arithmetic.machines, agreed),
    Figure("pod_memory_bytes", memory.pod_memory_bytes, fullest),
    Figure("peak_memory_bytes", memory.peak_memory_bytes, max),
    Figure("memory_kind", memory.pod_memory_kind, agreed),
    Figure("peak_device_used_bytes", partial(memory.peak_bytes, kind=memory.DEVICE_USED), max),
    Figure("peak_reserved_bytes", partial(memory.peak_bytes, kind=memory.RESERVED), max),
    Figure("peak_allocated_bytes", partial(memory.peak_bytes, kind=memory.ALLOCATED), max),
    Figure("peak_resident_bytes", partial(memory.peak_bytes, kind=memory.RESIDENT), max),
    Figure("phase_kind", memory.phase_kind, agreed),
    *(Figure(f"peak_{phase}_bytes", partial(memory.phase_peak_bytes, phase=phase), max) for phase in PHASES),
    Figure("planned_kind", memory.planned_kind, agreed),
    Figure("planned_bytes", memory.planned_bytes, max),
    Figure("measured_bytes", memory.measured_bytes, max),
    Figure("train_loss", outcome.train_loss),
    Figure("eval_loss", outcome.eval_loss),
    Figure("energy_joules", outcome.energy_joules),
    Figure("energy_kwh", outcome.energy_kwh),
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
        "model_flops_utilization": arithmetic.model_flops_utilization(
            values["model_flops_per_second"], values["peak_flops_per_second"]
        ),
        "measured_to_planned": memory.measured_to_planned(values["measured_bytes"], values["planned_bytes"]),
        "cost": outcome.cost(record, price_per_hour),
    }


def of_repeats(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every figure of repeats, from `figures` of each of them that has it."""
    ways = {**{figure.key: figure.of_repeats for figure in FIGURES}, **DERIVED}
    known = {key: [run[key] for run in runs if run[key] is not None] for key in ways}
    together = {key: ways[key](values) if values else None for key, values in known.items()}
    mixed = [of_kind for kind, of_kind in OF_KIND.items() if together[kind] is None]
    return {**together, **dict.fromkeys(key for keys in mixed for key in keys)}
