"""Predictions for a cell before it runs: its rate, how long it trains, its best batch; and a page of forecasts.

Launches were counted as PyTorch operations that are not views, in forward and backward passes of a T5 with one, two
and three layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cells import Cell
from benchmarks.gpu.data import Data
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.summary import first_words, rows, shown
from zeropods.plan.estimate import largest
from zeropods.plan.facts import shape_named
from zeropods.plan.gpus import workspace_bytes
from zeropods.plan.machines import ACHIEVED, Machines, step_time
from zeropods.plan.memory import CONTEXT_BYTES, PlannedMemory, plan_memory
from zeropods.plan.workload import Workload, ZeroSettings, read_zero_settings
from zeropods.tables import GIB, Table
from zeropods.techniques import technique_named
from zeropods.train.deepspeed_config import read_config

# Seconds of a step: arithmetic or the host, whichever takes longer, plus offload and the optimizer.

OUTSIDE_LAYERS, PER_LAYER = 177, 375
"""Launches of a step: for embeddings, masks, head and loss; and for an encoder and a decoder layer together."""
LAUNCH_SECONDS = 6e-6
"""Seconds that the host needs for a PyTorch operation and its part of autograd."""
LEFT = {"off": 1.0, "blocks": 0.35, "graphs": 0.02}
"""Share of the layers' launches that remains: operations between matrix products are fused, or all are replayed."""
HOST_SECONDS = 2e-3
"""Seconds of Python around a step (batch, trainer, optimizer), estimated from parts of it that were timed on a CPU."""
OPTIMIZER_LAUNCHES = 40
DEEPSPEED_LAUNCHES = 12
"""Launches per weight: hooks, copies into buckets, and the norm that DeepSpeed reads from the GPU."""
ADAM_BYTES = {"fp32": 28, "bf16": 44}
"""Bytes per parameter: weight, gradient and both moments are read, all but the gradient are written; in BF16 the
gradient is also widened and its norm taken, and the BF16 copy is written."""


def mean_shape(shapes: np.ndarray) -> tuple[int, int]:
    """Padded source and target tokens of a mean batch."""
    source, target = np.ceil(shapes.mean(axis=0))
    return int(source), int(target)


def job(cell: Cell, rows: int, source: int, target: int, precision: str) -> Workload:
    """The workload of a cell's pass.

    Args:
        source, target: padded tokens of a row. A decoder-only model has them in one text, in which every token but the
            first carries a loss.
    """
    dropout: bool | None = cell.dropout is None or cell.dropout > 0
    if cell.is_causal:
        target = max(1, source - 1)
        dropout = None
    return Workload(
        shape=shape_named(cell.model),
        batch_size=rows,
        tokens=source,
        labels=target,
        precision=precision,
        dropout=dropout,
        technique=technique_named(cell.technique),
        zero=zero_settings(cell),
        gradient_accumulation=cell.passes,
        checkpointing=cell.checkpointing,
    )


@cache
def zero_settings(cell: Cell) -> ZeroSettings:
    """The settings of ZeRO in the cell's configuration."""
    file = technique_named(cell.technique).file
    if file is None:
        return ZeroSettings()
    return read_zero_settings(read_config(Path(file)))


def predicted_seconds(cell: Cell, rows: int, shapes: np.ndarray, machine: Machine) -> float:
    """Predicted seconds of a mean step: of a T5 by its launches too, else as `zeropods plan` has it."""
    precision = cell.precision if cell.precision in ACHIEVED else "fp32"
    peak = machine.peak(precision)
    flops = machine.unknown_flops if peak is None else ACHIEVED[precision] * peak
    machines = Machines(pods=1, slots=1, gpu=machine.gpu or "", flops=flops)
    work = job(cell, rows, *mean_shape(shapes), precision)
    step = step_time(work, machines)
    if cell.is_causal:
        return step.seconds
    waits = step.offload_seconds + step.processor_seconds
    return max(step.compute_seconds, _host_seconds(cell)) + waits + _optimizer_seconds(cell, precision, machine)


def predicted_rate(cell: Cell, rows: int, shapes: np.ndarray, machine: Machine) -> float | None:
    """Samples per second; None where the device has no published peak."""
    if machine.peak("fp32") is None:
        return None
    return rows * cell.passes / predicted_seconds(cell, rows, shapes, machine)


def _host_seconds(cell: Cell) -> float:
    shape = shape_named(cell.model)
    launches = OUTSIDE_LAYERS + LEFT[cell.compile] * PER_LAYER * shape.layers[0] + OPTIMIZER_LAUNCHES
    if cell.technique != "none":
        launches += DEEPSPEED_LAUNCHES * sum(weight.is_matrix for weight in shape.weights)
    return HOST_SECONDS + LAUNCH_SECONDS * launches


def _optimizer_seconds(cell: Cell, precision: str, machine: Machine) -> float:
    if cell.technique.endswith("offload"):
        return 0.0
    return ADAM_BYTES[precision] * shape_named(cell.model).parameters / machine.bandwidth


# How long a cell trains: enough steps for a rate, after the warm-up steps.

WARM_STEPS = {"off": 20, "blocks": 40, "graphs": 400}
"""Steps before those that count: they serve allocators, compilation, and a graph for each usual pair of lengths."""
MOST_WARM_SECONDS = {"off": 60.0, "blocks": 180.0, "graphs": 420.0}
"""Most seconds that these steps may take, on a machine with few cores."""
FEWEST_STEPS = 20
"""Fewest steps that count, however slow they are predicted to be."""
PATIENCE = 2.0
"""Factor on the seconds asked for that is allowed where steps take longer than predicted."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """How long a cell trains: until `steps` or `seconds` are reached, whichever comes first."""

    steps: int
    warm: int
    """Number of first steps that do not count."""
    seconds: float
    """Seconds of training."""


def duration(
    cell: Cell, batch: int, shapes: np.ndarray, machine: Machine, *, seconds: float, warm: int | None
) -> Duration:
    """As many steps as are predicted to take `seconds`, after `warm` others; or the cell's own number, if it has one.

    Args:
        shapes: (steps, 2) padded lengths of an epoch's batches.
        warm: number of warm-up steps in place of the cell's own; None: the cell's own.
    """
    if warm is not None:
        first = warm
    elif cell.steps:
        first = 0
    else:
        first = WARM_STEPS[cell.compile]
    counted = max(FEWEST_STEPS, math.ceil(seconds / predicted_seconds(cell, batch, shapes, machine)))
    longest = MOST_WARM_SECONDS[cell.compile] + PATIENCE * seconds
    return Duration(steps=cell.steps or first + counted, warm=first, seconds=math.inf if cell.steps else longest)


# The best batch: the smallest that is predicted to be nearly as fast as the largest that the plan says fits.

UNIT = 32
NEARLY = 0.97
"""Share of the largest batch's rate that is fast enough: memory that only brings the rest is better left free."""
STEPS = 8
"""Fewest steps of an epoch: a batch that is a large part of the data trains nothing."""
Shapes = Callable[[int], np.ndarray]


def best_batch(cell: Cell, shapes: Shapes, rows: int, machine: Machine) -> tuple[int, int]:
    """Number of rows to begin with, and the most rows that fit by the plan.

    Args:
        shapes: function that returns the (steps, 2) padded lengths of an epoch's batches of a given number of rows.
        rows: number of rows of the data.

    Returns:
        Multiples of 32; powers of 2 where device or data are too small for 32 rows.
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
    """Planned memory at each of an epoch's longest batches."""
    precision = cell.precision if cell.precision in ACHIEVED else "fp32"
    context = workspace = 0
    if machine.device == "cuda":
        context = CONTEXT_BYTES
        workspace = workspace_bytes(machine.gpu or "")
    plans = list[PlannedMemory]()
    for source, target in _worst(shapes):
        plans.append(plan_memory(job(cell, batch, source, target, precision), context, workspace))
    return plans


def largest_plan(cell: Cell, batch: int, shapes: np.ndarray, machine: Machine) -> PlannedMemory:
    """The planned memory of the batch that takes most of it."""
    return max(planned(cell, batch, shapes, machine), key=lambda memory: memory.peak_allocated_bytes)


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


# A page with every cell on a GPU that is not at hand: rates, memory, time of three epochs.


FORECAST = ("cell", "batch", "samples/s", "x control", "MFU (%)", "planned peak (GiB)", "3 epochs (s)", "asked")
"""Columns of the summary that are forecast."""


def forecast(cells: Sequence[Cell], data: Data, machine: Machine) -> str:
    """The page in Markdown; the cell that predicts with a model has no forecast."""
    records = {cell.name: _record(cell, data, machine) for cell in cells if cell.kind != "predict"}
    lines = []
    for row in rows(records, machine):
        control = records.get(f"{first_words(row['cell'])}-control")
        ratio = "-"
        if control and control["cell"]["name"] != row["cell"]:
            times_as_fast = row["samples_per_second"] / control["samples_per_second"]
            ratio = f"{times_as_fast:.3g}"
        texts = {**shown(row), "x control": ratio}
        lines.append({name: texts[name] for name in FORECAST})
    memory = f"{machine.memory_bytes / GIB:.4g} GiB"
    return (
        f"# Forecast for {machine.gpu} with {memory}\n\nNothing here was measured.\n\n{Table.of(lines).to_markdown()}"
    )


def _record(cell: Cell, data: Data, machine: Machine) -> dict[str, Any]:
    batch = cell.batch
    if batch is None:
        count = len(data.shapes(cell.prompt, 1, 1))
        batch, _ = best_batch(cell, lambda count: data.padded(cell, count), count, machine)
    shapes = data.padded(cell, batch)
    peak = max(one.peak_allocated_bytes for one in planned(cell, batch, shapes, machine))
    return {
        "cell": asdict(cell),
        "status": "not run",
        "batch": batch,
        "samples_per_second": predicted_rate(cell, batch, shapes, machine),
        "tokens_per_sample": data.mean_tokens(cell.prompt),
        # The plan describes our own step; the control keeps other tensors.
        "planned_peak_allocated_bytes": None if cell.kind == "control" else peak,
    }
