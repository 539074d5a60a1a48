"""What a cell's rate should be, before it runs: arithmetic or the host, whichever takes longer, and the optimizer.

docs/gpu.md has the formula in words. Launches were counted as PyTorch's operations that are no views, of a T5 of one,
two and three layers, forward and backward.
"""

from __future__ import annotations

import numpy as np

from benchmarks.gpu.cells import Cell
from benchmarks.gpu.machine import Machine
from zeropods.plan.facts import shape_named
from zeropods.plan.machines import ACHIEVED, Machines, step_time
from zeropods.plan.workload import Workload
from zeropods.techniques import technique_named

OUTSIDE_LAYERS, PER_LAYER = 177, 375
"""Launches of a step: embeddings, masks, head and loss; an encoder layer and a decoder layer together."""
LAUNCH_SECONDS = 6e-6
"""Of the host, for an operation of PyTorch and its part of autograd."""
LEFT = {"off": 1.0, "blocks": 0.35, "graphs": 0.02}
"""Share of the layers' launches that is left: what lies between products is fused, or all of it replayed."""
HOST_SECONDS = 2e-3
"""Of Python around a step: the batch, the trainer, the optimizer: an estimate, from parts of it timed on a CPU."""
OPTIMIZER_LAUNCHES = 40
DEEPSPEED_LAUNCHES = 12
"""Of a weight: hooks, copies into buckets, the norm that DeepSpeed reads from the GPU."""
ADAM_BYTES = {"fp32": 28, "bf16": 44}
"""A parameter: weight, gradient and both moments read, all but the gradient written; in BF16 also the gradient widened
and its norm, and the copy written."""


def mean_shape(shapes: np.ndarray) -> tuple[int, int]:
    """Padded source and target tokens of a mean batch."""
    source, target = np.ceil(shapes.mean(axis=0))
    return int(source), int(target)


def job(cell: Cell, rows: int, source: int, target: int, precision: str) -> Workload:
    """A pass of a cell."""
    dropout = cell.dropout is None or cell.dropout > 0
    return Workload(
        shape=shape_named(cell.model),
        rows=rows,
        tokens=source,
        labels=target,
        precision=precision,
        dropout=dropout,
        technique=technique_named(cell.technique),
    )


def predicted_seconds(cell: Cell, rows: int, shapes: np.ndarray, machine: Machine) -> float:
    """Seconds of a mean step."""
    precision = cell.precision if cell.precision in ACHIEVED else "fp32"
    peak = machine.peak(precision)
    flops = machine.unknown_flops if peak is None else ACHIEVED[precision] * peak
    machines = Machines(pods=1, slots=1, gpu=machine.gpu or "", flops=flops)
    work = job(cell, rows, *mean_shape(shapes), precision)
    step = step_time(work, machines)
    waits = step.offload_seconds + step.processor_seconds
    return max(step.compute_seconds, _host_seconds(cell)) + waits + _optimizer_seconds(cell, precision, machine)


def predicted_rate(cell: Cell, rows: int, shapes: np.ndarray, machine: Machine) -> float | None:
    """Samples per second; None where the device has no published peak."""
    if machine.peak("fp32") is None:
        return None
    return rows / predicted_seconds(cell, rows, shapes, machine)


def _host_seconds(cell: Cell) -> float:
    shape = shape_named(cell.model)
    launches = OUTSIDE_LAYERS + LEFT[cell.compile] * PER_LAYER * shape.layers[0] + OPTIMIZER_LAUNCHES
    if cell.technique != "none":
        launches += DEEPSPEED_LAUNCHES * shape.matrices
    return HOST_SECONDS + LAUNCH_SECONDS * launches


def _optimizer_seconds(cell: Cell, precision: str, machine: Machine) -> float:
    if cell.technique.endswith("offload"):
        return 0.0
    return ADAM_BYTES[precision] * shape_named(cell.model).parameters / machine.bandwidth
