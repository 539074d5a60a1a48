"""Figures of a summary that follow from others of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Figures = dict[str, Any]
"""By the names of `Summary`; None where there is none."""

TOLERANCE = 0.02
"""What rounding to two decimals may do to a quotient of such figures, and some more."""


def derived(figures: Mapping[str, Any]) -> Figures:
    """Those that follow, by DeepSpeed's own formulas; None where one of their parts is."""
    flops, factor = figures["forward_flops"], figures["backward_factor"]
    forward, backward = figures["forward_seconds"], figures["backward_seconds"]
    iteration = _sum(forward, backward, figures["step_seconds"])
    whole = None if factor is None else (1 + factor) * flops
    return {
        "forward_flops_per_second": _rate(flops, forward),
        "backward_flops_per_second": _rate(None if factor is None else factor * flops, backward),
        "forward_backward_flops_per_second": _rate(whole, _sum(forward, backward)),
        "iteration_seconds": iteration,
        "flops_per_second": _rate(whole, iteration),
        "samples_per_second": _rate(_product(figures["batch_size_per_gpu"], figures["world_size"]), iteration),
    }


def followed(figures: Mapping[str, Any]) -> Figures:
    """All figures, those that follow set right where they contradict the others."""
    wrong = contradictions(figures)
    return {name: wrong.get(name, value) for name, value in figures.items()}


def contradictions(figures: Mapping[str, Any]) -> Figures:
    """What would follow, of those figures that say something else than that."""
    return {
        name: computed
        for name, computed in derived(figures).items()
        if figures[name] is not None and (computed is None or abs(figures[name] - computed) > TOLERANCE * computed)
    }


def shares(figures: Mapping[str, Any]) -> dict[str, float] | None:
    """Shares of forward, backward and the optimizer's step in an iteration; None where they were not timed."""
    parts = {name: figures[f"{name}_seconds"] for name in ("forward", "backward", "step")}
    if any(seconds is None for seconds in parts.values()) or not sum(parts.values()):
        return None
    return {name: seconds / sum(parts.values()) for name, seconds in parts.items()}


def _rate(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount is not None and seconds else None


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _product(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left * right
