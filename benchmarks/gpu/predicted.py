"""Predictions for a cell before it runs: its rate, how long it trains, its best batch; and a page
of forecasts.

Launches were counted as PyTorch operations that are not views, in forward and backward passes of a
T5 with one, two and three layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cells import Cell
from benchmarks.gpu.data import Data
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.summary import UNKNOWN, first_words, rows, shown
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

OUTSIDE_LAYERS = 177
"""Launches of a step for embeddings, masks, head and loss."""
PER_LAYER = 375
"""Launches of a step for an encoder and a decoder layer together."""
LEFT = {"off": 1.0, "blocks": 0.35, "graphs": 0.02}
"""Share of the layers' launches that remains: operations between matrix products are fused, or all
are replayed."""
HOST_SECONDS = 2e-3
"""Seconds of Python around a step (batch, trainer, optimizer), estimated from parts of it that were
timed on a CPU."""
OPTIMIZER_LAUNCHES = 40
DEEPSPEED_LAUNCHES = 12
"""Launches per weight: hooks, copies into buckets, and the norm that DeepSpeed reads from the
GPU."""
ADAM_BYTES = {"fp32": 28, "bf16": 44}
"""Bytes per parameter: weight, gradient and both moments are read, all but the gradient are
written; in BF16 the gradient is also widened and its norm taken, and the BF16 copy is written."""


def mean_shape(shapes: np.ndarray) -> tuple[int, int]:
    """Padded source and target tokens of a mean batch."""
    source, target = np.ceil(shapes.mean(axis=0))
    return int(source), int(target)


def job(cell: Cell, rows: int, source: int, target: int, precision: str) -> Workload:
    """The workload of a cell's pass.

    Args:
        source, target: padded tokens of a row. A decoder-only model has them in one text, in which
            every token but the first carries a loss.
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
    """Predicted seconds of a mean step: of a T5 by its launches too, else as `zeropods plan` has
    it."""
    precision = _precision(cell)
    machines = Machines(
        pods=1,
        slots=1,
        gpu=machine.gpu or "",
        flops=machine.training_flops(precision),
        pcie_bandwidth=machine.host_link,
        launch_seconds=machine.launch_seconds,
    )
    source, target = mean_shape(shapes)
    step = step_time(job(cell, rows, source, target, precision), machines)
    if cell.is_causal:
        return step.seconds
    pass_seconds = max(step.compute_seconds, _host_seconds(cell, machine))
    waiting_seconds = step.offload_seconds + step.processor_seconds
    return pass_seconds + waiting_seconds + _optimizer_seconds(cell, precision, machine)


def predicted_rate(cell: Cell, rows: int, shapes: np.ndarray, machine: Machine) -> float | None:
    """Samples per second; None where the device has no published peak."""
    if machine.peak("fp32") is None:
        return None
    return rows * cell.passes / predicted_seconds(cell, rows, shapes, machine)


def _precision(cell: Cell) -> str:
    """The precision that is planned with: FP32 where no rate is known of the cell's own."""
    return cell.precision if cell.precision in ACHIEVED else "fp32"


def _host_seconds(cell: Cell, machine: Machine) -> float:
    """Seconds that the host needs for a step: for Python, and to launch its operations."""
    shape = shape_named(cell.model)
    launches_of_layers = LEFT[cell.compile] * PER_LAYER * shape.layers[0]
    launches = OUTSIDE_LAYERS + launches_of_layers + OPTIMIZER_LAUNCHES
    if cell.needs_deepspeed:
        matrices = sum(weight.is_matrix for weight in shape.weights)
        launches += DEEPSPEED_LAUNCHES * matrices
    return HOST_SECONDS + machine.launch_seconds * launches


def _optimizer_seconds(cell: Cell, precision: str, machine: Machine) -> float:
    """Seconds in which a GPU moves what the optimizer reads and writes; 0 where the host steps
    it."""
    if cell.technique.endswith("offload"):
        return 0.0
    parameters = shape_named(cell.model).parameters
    return ADAM_BYTES[precision] * parameters / machine.bandwidth


# How long a cell trains: enough steps for a rate, after the warm-up steps.

WARM_STEPS = {"off": 20, "blocks": 40, "graphs": 400}
"""Steps before those that count: they serve allocators, compilation, and a graph for each usual
pair of lengths."""
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
    cell: Cell,
    batch: int,
    shapes: np.ndarray,
    machine: Machine,
    *,
    seconds: float,
    warm: int | None,
) -> Duration:
    """As many steps as are predicted to take `seconds`, after `warm` others; or the cell's own
    number, if it has one.

    Args:
        shapes: (steps, 2) padded lengths of an epoch's batches.
        warm: number of warm-up steps in place of the cell's own; None: the cell's own.
    """
    if cell.steps:
        return Duration(steps=cell.steps, warm=warm or 0, seconds=math.inf)
    if warm is None:
        warm = WARM_STEPS[cell.compile]
    step_seconds = predicted_seconds(cell, batch, shapes, machine)
    counted = max(FEWEST_STEPS, math.ceil(seconds / step_seconds))
    return Duration(
        steps=warm + counted,
        warm=warm,
        seconds=MOST_WARM_SECONDS[cell.compile] + PATIENCE * seconds,
    )


# The best batch: the smallest that is predicted to be nearly as fast as the largest that the plan
# says fits.

UNIT = 32
NEARLY = 0.97
"""Share of the largest batch's rate that is fast enough: memory that only brings the rest is better
left free."""
STEPS = 8
"""Fewest steps of an epoch: a batch that is a large part of the data trains nothing."""
Shapes = Callable[[int], np.ndarray]


def best_batch(cell: Cell, shapes: Shapes, rows: int, machine: Machine) -> tuple[int, int]:
    """Number of rows to begin with, and the most rows that fit by the plan.

    Args:
        shapes: function that returns the (steps, 2) padded lengths of an epoch's batches of a given
            number of rows.
        rows: number of rows of the data.

    Returns:
        Multiples of 32; powers of 2 where device or data are too small for 32 rows.
    """
    unit = UNIT
    while unit > 1 and not _fits(cell, unit, shapes, rows, machine):
        unit //= 2
    units = largest(lambda count: _fits(cell, unit * count, shapes, rows, machine)) or 1
    most = unit * units
    best = _rate(cell, most, shapes, machine)
    batch = unit
    while 2 * batch <= most and _rate(cell, batch, shapes, machine) < NEARLY * best:
        batch *= 2
    return batch, most


def planned(cell: Cell, batch: int, shapes: np.ndarray, machine: Machine) -> list[PlannedMemory]:
    """Planned memory at each of an epoch's longest batches."""
    context = 0
    workspace = 0
    if machine.device == "cuda":
        context = CONTEXT_BYTES
        workspace = workspace_bytes(machine.gpu or "")
    plans = list[PlannedMemory]()
    for source, target in _worst(shapes):
        work = job(cell, batch, source, target, _precision(cell))
        plans.append(plan_memory(work, context, workspace))
    return plans


def largest_plan(cell: Cell, batch: int, shapes: np.ndarray, machine: Machine) -> PlannedMemory:
    """The planned memory of the batch that takes most of it."""
    plans = planned(cell, batch, shapes, machine)
    return max(plans, key=lambda memory: memory.peak_allocated_bytes)


def _fits(cell: Cell, batch: int, shapes: Shapes, rows: int, machine: Machine) -> bool:
    """Whether a batch is small enough for the data, and the plan says that it fits."""
    if STEPS * batch > rows:
        return False
    plans = planned(cell, batch, shapes(batch), machine)
    return max(memory.device_bytes for memory in plans) <= machine.memory_bytes


def _rate(cell: Cell, batch: int, shapes: Shapes, machine: Machine) -> float:
    return batch / predicted_seconds(cell, batch, shapes(batch), machine)


def _worst(shapes: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of lengths that no other pair exceeds in both."""
    pairs = {(int(source), int(target)) for source, target in shapes}
    return [pair for pair in pairs if not _is_exceeded(pair, pairs)]


def _is_exceeded(pair: tuple[int, int], pairs: Iterable[tuple[int, int]]) -> bool:
    """Whether another pair is as long in both, or longer."""
    source, target = pair
    return any(other != pair and other[0] >= source and other[1] >= target for other in pairs)


# A page with every cell on a GPU that is not at hand: rates, memory, time of three epochs.


FORECAST = (
    "cell",
    "batch",
    "samples/s",
    "x control",
    "MFU (%)",
    "planned peak (GiB)",
    "3 epochs (s)",
    "asked",
)
"""Columns of the summary that are forecast."""


def forecast(cells: Sequence[Cell], data: Data, machine: Machine) -> str:
    """The page in Markdown; the cell that predicts with a model has no forecast."""
    records = {}
    for cell in cells:
        if cell.kind != "predict":
            records[cell.name] = _record(cell, data, machine)
    lines = []
    for row in rows(records, machine):
        control = records.get(f"{first_words(row['cell'])}-control")
        texts = {**shown(row), "x control": _times_as_fast(row, control)}
        lines.append({name: texts[name] for name in FORECAST})
    gibibytes = machine.memory_bytes / GIB
    return (
        f"# Forecast for {machine.gpu} with {gibibytes:.4g} GiB\n\n"
        "Nothing here was measured.\n\n"
        f"{Table.of(lines).to_markdown()}"
    )


def _times_as_fast(row: dict[str, Any], control: dict[str, Any] | None) -> str:
    """A forecast rate over the control's; `-` where there is none, and of the control itself."""
    if control is None or control["cell"]["name"] == row["cell"]:
        return UNKNOWN
    times = row["samples_per_second"] / control["samples_per_second"]
    return f"{times:.3g}"


def _record(cell: Cell, data: Data, machine: Machine) -> dict[str, Any]:
    """What a record would have of a cell that was measured, as far as it is forecast."""
    batch = cell.batch
    if batch is None:
        rows_of_data = len(data.shapes(cell.prompt, 1, 1))
        batch, _ = best_batch(cell, partial(data.padded, cell), rows_of_data, machine)
    shapes = data.padded(cell, batch)
    peak = None
    # The plan describes our own step; the control keeps other tensors.
    if cell.kind != "control":
        peak = largest_plan(cell, batch, shapes, machine).peak_allocated_bytes
    return {
        "cell": asdict(cell),
        "status": "not run",
        "batch": batch,
        "samples_per_second": predicted_rate(cell, batch, shapes, machine),
        "tokens_per_sample": data.mean_tokens(cell.prompt),
        "planned_peak_allocated_bytes": peak,
    }
