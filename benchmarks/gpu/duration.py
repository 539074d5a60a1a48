"""How long a cell trains: enough steps for a rate, after those that warm up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.cells import Cell
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.predicted import predicted_seconds

WARM_STEPS = {"off": 20, "blocks": 40, "graphs": 400}
"""Before those that count: allocators, compilation, and a graph of each usual pair of lengths."""
MOST_WARM_SECONDS = {"off": 60.0, "blocks": 180.0, "graphs": 420.0}
"""What these may take, on a machine of few cores."""
FEWEST_STEPS = 20
"""That count, however slow they are thought to be."""
PATIENCE = 2.0
"""Times the seconds asked for, where steps take longer than predicted."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Whichever of both ends is reached first."""

    steps: int
    warm: int
    """Of these, the first ones that do not count."""
    seconds: float
    """Of training."""


def duration(
    cell: Cell, batch: int, shapes: np.ndarray, machine: Machine, *, seconds: float, warm: int | None
) -> Duration:
    """So many steps as are predicted to take `seconds`, after `warm` others; as many as the cell has, where it says.

    Args:
        shapes: (steps, 2) padded lengths of an epoch's batches.
        warm: in place of the cell's own.
    """
    first = (0 if cell.steps else WARM_STEPS[cell.compile]) if warm is None else warm
    counted = max(FEWEST_STEPS, math.ceil(seconds / predicted_seconds(cell, batch, shapes, machine)))
    longest = MOST_WARM_SECONDS[cell.compile] + PATIENCE * seconds
    return Duration(steps=cell.steps or first + counted, warm=first, seconds=math.inf if cell.steps else longest)
