"""A bandwidth from a step that was measured: what is left of it when arithmetic is taken away is traffic."""

from __future__ import annotations

from dataclasses import dataclass

BACKWARD_OVER_FORWARD = 2
"""Arithmetic of a backward pass, of its forward pass's."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A ZeRO-1 step without overlap, as DeepSpeed's profiler reports it."""

    forward_seconds: float
    backward_seconds: float
    """Gradients are reduced in it."""
    step_seconds: float
    """The optimizer, and the all-gather of parameters after it."""


PUBLISHED_REPORT = MeasuredStep(forward_seconds=0.060, backward_seconds=0.2877, step_seconds=0.1399)
"""The published profiler report of t5-small on three pods."""


def fitted_bandwidth(step: MeasuredStep, parameters: int, pods: int, element_bytes: int = 4) -> float:
    """Bytes a second through a pod's link, each way, of a ZeRO-1 step on pods of one process.

    Two passes round the ring, gradients reduced to their owners and parameters gathered, each (pods - 1) / pods of all
    elements; the time for them is the step less a backward pass of twice the forward one. Adam's own time on a third of
    the parameters is within the rounding of such reports.
    """
    volume = 2 * (pods - 1) / pods * element_bytes * parameters
    reducing = step.backward_seconds - BACKWARD_OVER_FORWARD * step.forward_seconds
    return volume / (reducing + step.step_seconds)
