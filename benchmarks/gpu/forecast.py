"""What is predicted of every cell on a GPU that is not at hand: rates, memory, time of three epochs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.best_batch import best_batch, planned
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.data import Data
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.predicted import predicted_rate
from benchmarks.gpu.rows import ASKED, GIB, THREE_EPOCHS, first_words, mfu
from benchmarks.gpu.table import number, table

HEADS = ("cell", "batch", "samples/s", "x control", "MFU (%)", "planned peak (GiB)", "3 epochs (s)", "asked")


def forecast(cells: Sequence[Cell], data: Data, machine: Machine) -> str:
    """A page in Markdown; prediction by a model has no forecast."""
    records = {cell.name: _record(cell, data, machine) for cell in cells if cell.kind != "predict"}
    lines = [_cells(name, record, records, machine) for name, record in records.items()]
    said = f"# Forecast for {machine.gpu} with {machine.memory_bytes / GIB:.4g} GiB\n\nNothing here was measured.\n"
    return "\n".join([said, *table(HEADS, lines)]) + "\n"


def _record(cell: Cell, data: Data, machine: Machine) -> dict[str, Any]:
    batch = cell.batch
    if batch is None:
        rows = len(data.shapes(cell.prompt, 1, 1))
        batch, _ = best_batch(cell, lambda count: data.padded(cell, count), rows, machine)
    shapes = data.padded(cell, batch)
    return {
        "cell": cell.to_json(),
        "batch": batch,
        "samples_per_second": predicted_rate(cell, batch, shapes, machine),
        "tokens_per_sample": data.mean_tokens(cell.prompt),
        "peak": max(one.peak_allocated_bytes for one in planned(cell, batch, shapes, machine)),
    }


def _cells(name: str, record: dict[str, Any], records: dict[str, dict[str, Any]], machine: Machine) -> Iterable[str]:
    rate, share, is_control = record["samples_per_second"], mfu(record, machine), record["cell"]["kind"] == "control"
    control = records.get(f"{first_words(name)}-control", {}).get("samples_per_second")
    return (
        name,
        number(record["batch"]),
        number(rate),
        f"{rate / control:.3g}" if rate and control and not is_control else "-",
        "-" if share is None else f"{100 * share:.3g}",
        # The plan is of our own step; the control keeps other tensors.
        "-" if is_control else f"{record['peak'] / GIB:.2f}",
        number(THREE_EPOCHS / rate if rate else None),
        ASKED.get(name, "-"),
    )
