"""Two reports side by side, with ratios where they measured the same thing."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.measure.profile.derived import Figures

COMPARED = (
    "parameters_per_gpu", "forward_macs", "forward_flops", "forward_seconds", "forward_flops_per_second",
    "backward_seconds", "step_seconds", "iteration_seconds", "flops_per_second", "samples_per_second",
)  # fmt: skip
SETTING = ("world_size", "batch_size_per_gpu", "model_parallel_size")
"""What must be equal for a ratio to mean something."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure of two reports."""

    name: str
    first: float | None
    second: float | None
    ratio: float | None
    """second / first; None where one is missing, or the reports measured different things."""


def differences(first: Figures, second: Figures) -> list[str]:
    """What keeps two reports from being compared: `world_size 3, 2`; empty where nothing does."""
    return [f"{name} {first[name]}, {second[name]}" for name in SETTING if first[name] != second[name]]


def compare(first: Figures, second: Figures) -> list[Compared]:
    """The figures of two summaries; no ratios where `differences` finds any."""
    alike = not differences(first, second)
    return [
        Compared(
            name=name,
            first=first[name],
            second=second[name],
            ratio=_ratio(first[name], second[name]) if alike else None,
        )
        for name in COMPARED
    ]


def _ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second is not None else None
