"""The two tables of the causal workshop, filled from records, and how runs scale over slots and pods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from zeropods.report import columns
from zeropods.report.columns import MIB, NOT_MEASURED, Column
from zeropods.report.figures.memory import DEVICE_USED, RESIDENT
from zeropods.report.figures.outcome import train_loss
from zeropods.report.figures.ranks import Record, of_ranks
from zeropods.report.figures.speed import evaluation_samples_per_second
from zeropods.report.run import Run
from zeropods.report.summary import read_runs
from zeropods.report.table import Table

SCALING = (
    Column("pods", "pods"),
    Column("slots", "slots of a pod"),
    Column("world_size", "processes"),
    *(column for column in columns.SPEED if column.key in ("samples_per_second", "tokens_per_second")),
    *(column for column in columns.SCALING if column.key in ("speed_up", "scaling_efficiency", "base", "sharing")),
)


def training_table(runs: Sequence[Run]) -> Table:
    """Losses and speed: a line for each run, with its evaluation loss after each epoch.

    Losses are nats a label token; samples/s are of all processes. `before` is the evaluation before the first step,
    where there was one.
    """
    records = [run.record for run in runs]
    by_epoch = [eval_losses_by_epoch(record) for record in records]
    epochs = sorted({epoch for losses in by_epoch for epoch in losses})
    return Table.of(
        [
            {
                "run": run.folder.name,
                "technique": record["technique"],
                "final train loss": _shown(train_loss(record), "{:.4f}"),
                **{_heading(epoch): _shown(losses.get(epoch), "{:.4f}") for epoch in epochs},
                "training (samples/s)": _shown(record["samples_per_second"], "{:,.2f}"),
                "evaluation (samples/s)": _shown(evaluation_samples_per_second(record), "{:,.2f}"),
                "steps an epoch": f"{steps_per_epoch(record):,}",
                "status": record["status"],
            }
            for run, record, losses in zip(runs, records, by_epoch, strict=True)
        ]
    )


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory over a whole run as a log of `nvidia-smi` would give it: peak, mean and minimum of its samples, in MiB.

    Of GPUs device-used memory, context and other processes included; elsewhere the process's resident memory. The peak
    is of the rank that needed most, the minimum of the one that needed least, the mean of all.
    """
    lines = []
    for run in runs:
        record = run.record
        kind, sampled = _sampled(record)
        lines.append(
            {
                "run": run.folder.name,
                "technique": record["technique"],
                "kind of memory": kind or NOT_MEASURED,
                "peak (MiB)": _mib(max, sampled, "peak"),
                "mean (MiB)": _mib(mean, sampled, "mean"),
                "minimum (MiB)": _mib(min, sampled, "minimum"),
            }
        )
    return Table.of(lines)


def scaling_table(runs: Sequence[Run], *, allow_differences: bool = False) -> Table:
    """Speed-up and efficiency over slots and pods, against the run with the fewest processes; repeats are one line.

    Args:
        allow_differences: as in `summary.read_runs`.
    """
    summary = read_runs([run.folder for run in runs], allow_differences=allow_differences)
    lines = [{**line, "slots": _slots(line)} for line in summary.lines]
    return columns.table("", SCALING, lines)


def steps_per_epoch(record: Record) -> int:
    """Optimizer steps of an epoch: rows of the train split / effective batch size, rounded up."""
    return math.ceil(record["train_rows"] / record["effective_batch_size"])


def eval_losses_by_epoch(record: Record) -> dict[int, float]:
    """The last evaluation loss within each epoch, from 1; under 0 that before the first step."""
    length = steps_per_epoch(record)
    return {math.ceil(point["step"] / length): point["loss"] for point in record["eval_losses"]}


def _heading(epoch: int) -> str:
    return f"eval loss, epoch {epoch}" if epoch else "eval loss, before"


def _sampled(record: Record) -> tuple[str | None, list[dict[str, Any]]]:
    """The first kind that every rank has samples of, and their statistics in bytes."""
    of_all = of_ranks(record, "sampled") or []
    for kind, column in ((DEVICE_USED, "device_used_bytes"), (RESIDENT, "resident_bytes")):
        found = [of_rank[column] for of_rank in of_all if column in of_rank]
        if found and len(found) == len(of_all):
            return kind, found
    return None, []


def _mib(of_all: Any, sampled: Sequence[dict[str, Any]], key: str) -> str:
    return f"{of_all([one[key] for one in sampled]) / MIB:,.1f}" if sampled else NOT_MEASURED


def _shown(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else form.format(value)


def _slots(line: dict[str, Any]) -> int | None:
    return line["world_size"] // line["pods"] if line["world_size"] and line["pods"] else None
