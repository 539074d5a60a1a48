"""What came out, for people (summary.md) and for programs (summary.json)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import ABLATED, ABLATED_FROM
from benchmarks.gpu.losses import compared
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import GIB, rows
from benchmarks.gpu.table import number, table
from zeropods import files

HEADS = (
    "cell",
    "status",
    "batch",
    "samples/s",
    "predicted",
    "x control [95 %]",
    "MFU (%)",
    "planned peak (GiB)",
    "measured peak (GiB)",
    "measured/planned",
    "3 epochs (s)",
    "asked",
)
Row = dict[str, Any]


def write_summary(
    out: Path, names: Sequence[str], records: Mapping[str, dict[str, Any]], machine: Machine, remarks: Iterable[str]
) -> None:
    """Both files, whole. Cells of `names` without a record are rows too: `not run`."""
    measured = {row["cell"]: row for row in rows(records, machine)}
    document = {
        "machine": asdict(machine),
        "remarks": list(remarks),
        "cells": [measured.get(name, {"cell": name, "status": "not run"}) for name in names],
        "ablation": _ablation(measured),
        "losses": compared(records),
    }
    files.write_json(out / "summary.json", document)
    files.write_text(out / "summary.md", "\n".join(_lines(document)) + "\n")


def _lines(document: dict[str, Any]) -> Iterable[str]:
    machine = document["machine"]
    yield f"# Training on {machine['gpu'] or 'a CPU, at tiny shapes'}"
    yield ""
    if machine["gpu"] is None:
        yield "No GPU: these rows show that the command works; they say nothing of a GPU's speed."
        yield ""
    plain = [row for row in document["cells"] if not row["cell"].startswith(("ablation", "losses"))]
    if plain:
        yield from table(HEADS, [_cells(row) for row in plain])
    yield from (f"\n{row['cell']}: {row['questions_per_second']:.4g} questions/s" for row in plain if _asks(row))
    if document["ablation"]:
        yield from ("", "## Each measure taken away once", "")
        heads = ("run", "samples/s", "share of the fast path's")
        lines = [(row["run"], number(row["samples_per_second"]), number(row["share"])) for row in document["ablation"]]
        yield from table(heads, lines)
    if document["losses"]:
        yield from ("", "## Final loss against FP32", "", _losses(document["losses"]))
    failed = [row for row in document["cells"] if row.get("reason")]
    if failed:
        yield from ("", "## Cells that did not end well", "")
        yield from (f"* {row['cell']}: {row['status']}: {' '.join(row['reason'].split())}" for row in failed)
    yield from (f"\n{remark}" for remark in document["remarks"])


def _asks(row: Row) -> bool:
    return row.get("questions_per_second") is not None


def _ablation(measured: Mapping[str, Row]) -> list[Row]:
    rates = {name: row["samples_per_second"] for name, row in measured.items()}
    found = []
    for name, said in ABLATED.items():
        base = rates.get(ABLATED_FROM.get(name, "ablation-fast"))
        if name in rates:
            share = rates[name] / base if base and rates[name] else None
            found.append({"run": said, "samples_per_second": rates[name], "share": share})
    return found


def _losses(found: dict[str, Any]) -> str:
    mean, low, high = found["difference"]
    verdict = "within noise" if found["within_noise"] else "more than noise"
    return (
        f"Over {found['steps']} steps, the last fifth: the fast path's loss less FP32's is {mean:+.4f} "
        f"[{low:+.4f}, {high:+.4f}] nats; two FP32 runs of other seeds differ by {found['noise']:.4f}: {verdict}."
    )


def _cells(row: Row) -> tuple[str, ...]:
    ratio = row.get("ratio_to_control")
    planned, measured = row.get("planned_peak_allocated_bytes"), row.get("peak_allocated_bytes")
    return (
        row["cell"],
        row["status"] + (" (planned to fit)" if row.get("false_fits") else ""),
        number(row.get("batch")),
        number(row.get("samples_per_second")),
        number(row.get("predicted_samples_per_second")),
        "-" if ratio is None else f"{ratio[0]:.3g} [{ratio[1]:.3g}, {ratio[2]:.3g}]",
        "-" if row.get("mfu") is None else f"{100 * row['mfu']:.3g}",
        "-" if planned is None else f"{planned / GIB:.2f}",
        "-" if measured is None else f"{measured / GIB:.2f}",
        number(row.get("measured_to_planned")),
        number(row.get("three_epochs_seconds")),
        row.get("asked") or "-",
    )
