"""Records -> the summary's rows: each figure defined once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.steady import ratio_of_rates
from zeropods.plan.facts import shape_named

Record = dict[str, Any]
GIB = 1 << 30
THREE_EPOCHS = 169_065
"""Samples: 3 x 56,355 of WikiSQL's train split."""
ASKED = {
    "t5-small-none-32": "10 x; 3 epochs under 60 s",
    "t5-large-none-32": "15 x; 3 epochs under 240 s",
    "t5-large-none-best": "MFU 25 % (40 %)",
    "t5-small-none-best": "3 epochs under 60 s",
}


def rows(records: Mapping[str, Record], machine: Machine) -> list[dict[str, Any]]:
    """A row for each record, in their order."""
    return [_row(name, record, records, machine) for name, record in records.items()]


def _row(name: str, record: Record, records: Mapping[str, Record], machine: Machine) -> dict[str, Any]:
    cell = record["cell"]
    rate, predicted = record.get("samples_per_second"), record.get("predicted_samples_per_second")
    planned, measured = record.get("planned_peak_allocated_bytes"), record.get("peak_allocated_bytes")
    return {
        "cell": name,
        "status": record["status"],
        "reason": record.get("reason"),
        "batch": record.get("batch"),
        "prompt": cell["prompt"],
        "precision": record.get("run_precision") or record.get("precision") or cell["precision"],
        "compile": cell["compile"],
        "samples_per_second": rate,
        "predicted_samples_per_second": predicted,
        "measured_to_predicted": rate / predicted if rate and predicted else None,
        "ratio_to_control": _ratio(record, records.get(f"{first_words(name)}-control")),
        "mfu": mfu(record, machine),
        "planned_peak_allocated_bytes": planned,
        "peak_allocated_bytes": measured,
        "measured_to_planned": measured / planned if measured and planned else None,
        "false_fits": false_fits(record, machine),
        "three_epochs_seconds": THREE_EPOCHS / rate if rate else None,
        "questions_per_second": record.get("questions_per_second"),
        "asked": ASKED.get(name),
    }


def mfu(record: Record, machine: Machine) -> float | None:
    """FLOPs of real tokens per second / the published dense BF16 peak; also of FP32 runs, so that all compare."""
    rate, tokens, peak = record.get("samples_per_second"), record.get("tokens_per_sample"), machine.peak("bf16")
    if not rate or not tokens or not peak:
        return None
    return shape_named(record["cell"]["model"]).training_flops(*tokens) * rate / peak


def false_fits(record: Record, machine: Machine) -> bool:
    """Whether a batch that the plan said fits ran out of memory."""
    if any(each["status"] == "oom" for each in record.get("tries", [])):
        return True
    planned = record.get("planned_device_bytes")
    return record["status"] == "oom" and planned is not None and planned <= machine.memory_bytes


def first_words(name: str) -> str:
    """The model in a cell's name; cells of the ablation are of t5-small."""
    return "t5-small" if name.startswith("ablation") else "-".join(name.split("-")[:2])


def _ratio(record: Record, control: Record | None) -> list[float] | None:
    """Samples/s over the control's, and its 95 % interval."""
    if control is None or control is record or not record.get("step_seconds") or not control.get("step_seconds"):
        return None
    ours, batch = record["step_seconds"], record["batch"]
    found = ratio_of_rates(ours, batch, control["step_seconds"], control["batch"])
    return None if found is None else list(found)
