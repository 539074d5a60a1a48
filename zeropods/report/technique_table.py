"""Techniques against a baseline: memory, speed, and whether the losses are the same."""

from __future__ import annotations

from collections.abc import Sequence

from zeropods.report.columns import MIB, NOT_MEASURED
from zeropods.report.figures.memory import measured_bytes, peak_memory_bytes, pod_memory_kind
from zeropods.report.figures.outcome import eval_loss, train_loss
from zeropods.report.figures.ranks import Record
from zeropods.report.run import Run
from zeropods.report.table import Table


def technique_table(runs: Sequence[Run]) -> Table:
    """A line for each run; the first is what the others are compared with.

    `states` are parameters, gradients and optimizer states in memory before an optimizer step, measured where there
    is no GPU. `loss difference` is the largest of a training step, as a share of the baseline's loss at that step.
    """
    records = [run.record for run in runs]
    return Table.of(_line(record, records[0]) for record in records)


def loss_difference(record: Record, baseline: Record) -> float | None:
    """The largest |loss - loss of the baseline| / loss of the baseline, over the steps that both have; None if none."""
    before = {point["step"]: point["loss"] for point in baseline["losses"]}
    pairs = [(point["loss"], before[point["step"]]) for point in record["losses"] if point["step"] in before]
    return max((abs(loss - base) / base for loss, base in pairs), default=None)


def speed_up(record: Record, baseline: Record) -> float | None:
    """samples/s of a run / of the baseline; None where one of them has none."""
    rate, base = record["samples_per_second"], baseline["samples_per_second"]
    return rate / base if rate and base else None


def _line(record: Record, baseline: Record) -> dict[str, str]:
    kind = pod_memory_kind(record)
    states = measured_bytes(record) if kind == "resident" else None
    return {
        "technique": record["technique"],
        "training (samples/s)": _shown(record["samples_per_second"], "{:,.1f}"),
        "against the first": _shown(speed_up(record, baseline), "{:.2f} x"),
        "peak memory (MiB)": _mib(peak_memory_bytes(record)),
        "kind of memory": kind or NOT_MEASURED,
        "states (MiB)": _mib(states),
        "final train loss": _shown(train_loss(record), "{:.4f}"),
        "final eval loss": _shown(eval_loss(record), "{:.4f}"),
        "loss difference": _shown(loss_difference(record, baseline), "{:.1e}"),
        "status": record["status"],
    }


def _mib(value: float | None) -> str:
    return _shown(None if value is None else value / MIB, "{:,.1f}")


def _shown(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else form.format(value)
