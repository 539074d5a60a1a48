"""The best batch: the smallest that is predicted to be nearly as fast as the largest that the plan says fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.gpu.cells import Cell
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.predicted import job, predicted_seconds
from zeropods.plan.estimate import largest
from zeropods.plan.memory import CONTEXT_BYTES, PlannedMemory, plan_memory

UNIT = 32
NEARLY = 0.97
"""Share of the rate of the largest: memory that brings less than this is better left free."""
STEPS = 8
"""An epoch has at least so many: a batch that is a large part of the data trains nothing."""
Shapes = Callable[[int], np.ndarray]


def best_batch(cell: Cell, shapes: Shapes, rows: int, machine: Machine) -> tuple[int, int]:
    """Rows to begin with, and the most that the plan says fit.

    Args:
        shapes: (steps, 2) padded lengths of an epoch's batches, of so many rows.
        rows: of the data.

    Returns:
        Multiples of 32; of a device or data too small for 32 rows, powers of 2.
    """
    unit = UNIT
    while unit > 1 and not _fits(cell, unit, shapes, rows, machine):
        unit //= 2
    most = unit * (largest(lambda count: _fits(cell, unit * count, shapes, rows, machine)) or 1)
    best = _rate(cell, most, shapes, machine)
    batch = unit
    while 2 * batch <= most and _rate(cell, batch, shapes, machine) < NEARLY * best:
        batch *= 2
    return batch, most


def planned(cell: Cell, batch: int, shapes: np.ndarray, machine: Machine) -> list[PlannedMemory]:
    """Memory at each of an epoch's longest batches."""
    precision = cell.precision if cell.precision in ("fp32", "bf16") else "fp32"
    context = CONTEXT_BYTES if machine.device == "cuda" else 0
    return [plan_memory(job(cell, batch, source, target, precision), context) for source, target in _worst(shapes)]


def _fits(cell: Cell, batch: int, shapes: Shapes, rows: int, machine: Machine) -> bool:
    if STEPS * batch > rows:
        return False
    return max(one.device_bytes for one in planned(cell, batch, shapes(batch), machine)) <= machine.memory_bytes


def _rate(cell: Cell, batch: int, shapes: Shapes, machine: Machine) -> float:
    return batch / predicted_seconds(cell, batch, shapes(batch), machine)


def _worst(shapes: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of lengths that no other pair exceeds in both."""
    pairs = {(int(source), int(target)) for source, target in shapes}
    return [p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs)]
