"""Summary of the records of cells: figures, each defined once, for people (summary.md) and for programs (summary.json),
and an archive of everything in one file."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cells import ABLATED_FROM, ABLATION, PROMPTS
from benchmarks.gpu.machine import Machine
from zeropods import files
from zeropods.plan.facts import shape_named
from zeropods.tables import GIB, Table

Record = dict[str, Any]
THREE_EPOCHS = 169_065
"""Number of samples: 3 x the 56,355 of WikiSQL's train split."""
ASKED = {
    "t5-small-none-32": "10 x; 3 epochs under 60 s",
    "t5-large-none-32": "15 x; 3 epochs under 240 s",
    "t5-large-none-best": "MFU 25 % (40 %)",
    "t5-small-none-best": "3 epochs under 60 s",
}


def rows(records: Mapping[str, Record], machine: Machine) -> list[dict[str, Any]]:
    """A row for each record, in the same order."""
    return [_row(name, record, records, machine) for name, record in records.items()]


def _row(name: str, record: Record, records: Mapping[str, Record], machine: Machine) -> dict[str, Any]:
    cell = record["cell"]
    rate, predicted = record.get("samples_per_second"), record.get("predicted_samples_per_second")
    measured = record.get("peak_allocated_bytes")
    steps = record.get("step_seconds")
    for_its_batch = record.get("planned_for_its_batch")
    planned = record.get("planned_peak_allocated_bytes")
    planned_device = record.get("planned_device_bytes")
    if for_its_batch is not None:
        # The batches that a short run met are not the largest of an epoch.
        planned = for_its_batch["peak_allocated_bytes"]
        planned_device = for_its_batch["device_bytes"]
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
        "planned_device_bytes": planned_device,
        "device_used_bytes": record.get("device_used_bytes"),
        "peak_reserved_bytes": record.get("peak_reserved_bytes"),
        "peak_resident_bytes": record.get("peak_resident_bytes"),
        "median_step_seconds": float(np.median(steps)) if steps else None,
        "predicted_step_seconds": _samples_of_step(record) / predicted if predicted else None,
        "profiled_flops": record.get("profiled_flops"),
        "false_fits": false_fits(record, machine),
        "three_epochs_seconds": THREE_EPOCHS / rate if rate and cell["prompt"] in PROMPTS else None,
        "questions_per_second": record.get("questions_per_second"),
        "asked": ASKED.get(name),
    }


def _samples_of_step(record: Record) -> int:
    """Number of samples of an optimizer step."""
    samples: int = record["batch"] * record["cell"].get("passes", 1)
    return samples


def mfu(record: Record, machine: Machine) -> float | None:
    """FLOPs of real tokens per second / the published dense BF16 peak; also for FP32 runs, to make them comparable."""
    rate, tokens, peak = record.get("samples_per_second"), record.get("tokens_per_sample"), machine.peak("bf16")
    if not rate or not tokens or not peak:
        return None
    source, target = tokens
    return shape_named(record["cell"]["model"]).training_flops(source, target) * rate / peak


def false_fits(record: Record, machine: Machine) -> bool:
    """Whether a batch that the plan said fits ran out of memory."""
    if any(each["status"] == "oom" for each in record.get("tries", [])):
        return True
    planned = record.get("planned_device_bytes")
    return record["status"] == "oom" and planned is not None and planned <= machine.memory_bytes


def first_words(name: str) -> str:
    """The model in a cell's name; cells of the ablation use t5-small."""
    return "t5-small" if name.startswith("ablation") else "-".join(name.split("-")[:2])


def _ratio(record: Record, control: Record | None) -> list[float] | None:
    """Ratio of samples/s to the control's, and its 95 % interval; None where either has no steps."""
    if control is None or control is record or not record.get("step_seconds") or not control.get("step_seconds"):
        return None
    ours, batch = record["step_seconds"], record["batch"]
    found = ratio_of_rates(ours, batch, control["step_seconds"], control["batch"])
    return None if found is None else list(found)


# Steady steps: which of a run's steps count, their rate, and how certain a ratio of two rates is.

DRAWS = 1_000
FEWEST = 3


def steady_steps(seconds: Sequence[float], warm: int) -> list[float]:
    """Steps after the first `warm`, and never the first; the later half where fewer than three would be left."""
    late = list(seconds[max(1, warm) :])
    return late if len(late) >= FEWEST else list(seconds[max(1, len(seconds) // 2) :])


def rate(seconds: Sequence[float], batch: int) -> float | None:
    """Samples per second; None without steps."""
    return batch * len(seconds) / sum(seconds) if seconds and sum(seconds) > 0 else None


def ratio_of_rates(
    ours: Sequence[float], batch: int, control: Sequence[float], control_batch: int
) -> tuple[float, float, float] | None:
    """Our samples/s over the control's, and the 95 % interval by bootstrap over steps; None unless both have steps."""
    if not ours or not control:
        return None
    generator = np.random.default_rng(0)
    drawn = [batch / _means(ours, generator), control_batch / _means(control, generator)]
    low, high = np.percentile(drawn[0] / drawn[1], [2.5, 97.5])
    value = (batch / float(np.mean(ours))) / (control_batch / float(np.mean(control)))
    return value, float(low), float(high)


def _means(seconds: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    values = np.asarray(seconds)
    return np.array([values[generator.integers(0, len(values), len(values))].mean() for _ in range(DRAWS)])


# Whether the fast path learns as the FP32 run does: their losses over the same rows, beside differences by chance.

LAST_SHARE = 0.2
"""Share of a run's losses, counted from the end, whose mean is its final loss."""
EXACT, FAST, OTHER = "losses-fp32", "losses-fast", "losses-fp32-other-seed"


def compared(records: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Final losses of the three runs and their differences; None until all three have ended well.

    The first two saw the same rows in the same order, so their difference is taken step by step: its mean and 95 %
    interval. The third began with other weights and saw other rows: it shows how far two FP32 runs differ by chance.
    """
    found = [records.get(name) for name in (EXACT, FAST, OTHER)]
    if any(record is None or record["status"] != "ok" for record in found):
        return None
    exact, fast, other = (_last(record) for record in found if record)
    difference = fast - exact
    half = 1.96 * float(difference.std(ddof=1)) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
    mean, noise = float(difference.mean()), abs(float(other.mean() - exact.mean()))
    return {
        "steps": records[EXACT]["cell"]["steps"],
        "final_loss": {EXACT: float(exact.mean()), FAST: float(fast.mean()), OTHER: float(other.mean())},
        "difference": [mean, mean - half, mean + half],
        "noise": noise,
        "within_noise": bool(abs(mean) <= noise or mean - half <= 0.0 <= mean + half),
    }


def _last(record: dict[str, Any]) -> np.ndarray:
    values = [entry["loss"] for entry in record["losses"]]
    return np.array(values[-max(1, round(LAST_SHARE * len(values))) :])


# The summary of all cells.


def number(value: float | None) -> str:
    """Three digits, whole from 1,000 on; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 or isinstance(value, int) else f"{value:.3g}"


def write_summary(
    out: Path, names: Sequence[str], records: Mapping[str, dict[str, Any]], machine: Machine, remarks: Iterable[str]
) -> None:
    """Write both files, each as a whole. Cells of `names` without a record have a row too: `not run`."""
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
        yield Table.of(map(shown, plain)).to_markdown()
    yield from (f"\n{row['cell']}: {row['questions_per_second']:.4g} questions/s" for row in plain if _asks(row))
    if document["ablation"]:
        rates = ((row["run"], number(row["samples_per_second"]), number(row["share"])) for row in document["ablation"])
        heads = ("run", "samples/s", "share of the fast path's")
        yield f"\n{Table(heads, tuple(rates), 'Each measure taken away once').to_markdown()}"
    if document["losses"]:
        yield from ("", "## Final loss against FP32", "", _losses(document["losses"]))
    failed = [row for row in document["cells"] if row.get("reason")]
    if failed:
        yield from ("", "## Cells that did not end well", "")
        yield from (f"* {row['cell']}: {row['status']}: {' '.join(row['reason'].split())}" for row in failed)
    yield from (f"\n{remark}" for remark in document["remarks"])


def _asks(row: Record) -> bool:
    return row.get("questions_per_second") is not None


def _ablation(measured: Mapping[str, Record]) -> list[Record]:
    rates = {name: row["samples_per_second"] for name, row in measured.items()}
    found = []
    for name, (_, said) in ABLATION.items():
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


def shown(row: Record) -> dict[str, str]:
    """The texts of a row for people."""
    ratio = row.get("ratio_to_control")
    planned, measured = row.get("planned_peak_allocated_bytes"), row.get("peak_allocated_bytes")
    return {
        "cell": row["cell"],
        "status": row["status"] + (" (planned to fit)" if row.get("false_fits") else ""),
        "batch": number(row.get("batch")),
        "samples/s": number(row.get("samples_per_second")),
        "predicted": number(row.get("predicted_samples_per_second")),
        "x control [95 %]": "-" if ratio is None else f"{ratio[0]:.3g} [{ratio[1]:.3g}, {ratio[2]:.3g}]",
        "MFU (%)": "-" if row.get("mfu") is None else f"{100 * row['mfu']:.3g}",
        "planned peak (GiB)": "-" if planned is None else f"{planned / GIB:.2f}",
        "measured peak (GiB)": "-" if measured is None else f"{measured / GIB:.2f}",
        "measured/planned": number(row.get("measured_to_planned")),
        "3 epochs (s)": number(row.get("three_epochs_seconds")),
        "asked": row.get("asked") or "-",
    }


# All records and the summary as one file, which appears whole.

ARCHIVE = "bench-gpu.tar.gz"
KEPT = (
    "*.json", "cells/*.json", "summary.*", "runs/*/record.json", "runs/*/config.json", "runs/*/control.json",
    "runs/*/steps/*.npy", "runs/*/profile.txt",
)  # fmt: skip
KEPT_LOGS = ("runs/*/memory/*.csv", "runs/*/launch.log", "runs/*/train.log")
PREFIX = "bench-gpu"


def write_archive(out: Path, archive: Path, prefix: str) -> Path:
    """Pack what a reader needs, without weights and data; files lie in a folder of the name `prefix`."""
    kept = set[Path]()
    for pattern in (*KEPT, *KEPT_LOGS):
        kept |= set(out.glob(pattern))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for file in sorted(kept):
            packed.add(file, arcname=f"{prefix}/{file.relative_to(out)}")
    files.write_bytes(archive, content.getvalue())
    return archive
