"""Summary of the records of cells: figures, each defined once, for people (summary.md) and for
programs (summary.json), and an archive of everything in one file."""

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
"""What cells were to reach, by name: a multiple of the control's rate, a time, a share of the peak;
in brackets what was hoped for."""
UNKNOWN = "-"


def rows(records: Mapping[str, Record], machine: Machine) -> list[dict[str, Any]]:
    """A row for each record, in the same order."""
    return [_row(name, record, records, machine) for name, record in records.items()]


def _row(
    name: str, record: Record, records: Mapping[str, Record], machine: Machine
) -> dict[str, Any]:
    cell = record["cell"]
    samples_per_second = record.get("samples_per_second")
    predicted = record.get("predicted_samples_per_second")
    peak = record.get("peak_allocated_bytes")
    planned = record.get("planned_peak_allocated_bytes")
    planned_device = record.get("planned_device_bytes")
    plan_for_its_batch = record.get("planned_for_its_batch")
    if plan_for_its_batch is not None:
        # The batches that a short run met are not the largest of an epoch.
        planned = plan_for_its_batch["peak_allocated_bytes"]
        planned_device = plan_for_its_batch["device_bytes"]
    # The one that was measured, the one that was chosen for the machine, or the one of the cell.
    precision = record.get("run_precision") or record.get("precision") or cell["precision"]
    control = records.get(f"{first_words(name)}-control")
    three_epochs = None
    if cell["prompt"] in PROMPTS:
        three_epochs = _quotient(THREE_EPOCHS, samples_per_second)
    return {
        "cell": name,
        "status": record["status"],
        "reason": record.get("reason"),
        "batch": record.get("batch"),
        "prompt": cell["prompt"],
        "precision": precision,
        "compile": cell["compile"],
        "samples_per_second": samples_per_second,
        "predicted_samples_per_second": predicted,
        "measured_to_predicted": _quotient(samples_per_second, predicted),
        "ratio_to_control": _ratio(record, control),
        "mfu": mfu(record, machine),
        "planned_peak_allocated_bytes": planned,
        "peak_allocated_bytes": peak,
        "measured_to_planned": _quotient(peak, planned),
        "planned_device_bytes": planned_device,
        "device_used_bytes": record.get("device_used_bytes"),
        "peak_reserved_bytes": record.get("peak_reserved_bytes"),
        "peak_resident_bytes": record.get("peak_resident_bytes"),
        "median_step_seconds": _median(record.get("step_seconds")),
        "predicted_step_seconds": _predicted_step_seconds(record, predicted),
        "profiled_flops": record.get("profiled_flops"),
        "false_fits": false_fits(record, machine),
        "three_epochs_seconds": three_epochs,
        "questions_per_second": record.get("questions_per_second"),
        "asked": ASKED.get(name),
    }


def _quotient(value: float | None, by: float | None) -> float | None:
    """One figure by another; None where either is missing or 0."""
    if not value or not by:
        return None
    return value / by


def _median(seconds: Sequence[float] | None) -> float | None:
    return float(np.median(seconds)) if seconds else None


def _predicted_step_seconds(record: Record, samples_per_second: float | None) -> float | None:
    """Predicted seconds of an optimizer step; None where no rate is predicted."""
    if not samples_per_second:
        return None
    samples: int = record["batch"] * record["cell"].get("passes", 1)
    return samples / samples_per_second


def mfu(record: Record, machine: Machine) -> float | None:
    """FLOPs of real tokens per second / the published dense BF16 peak; also for FP32 runs, to make
    them comparable."""
    samples_per_second = record.get("samples_per_second")
    tokens = record.get("tokens_per_sample")
    peak = machine.peak("bf16")
    if not samples_per_second or not tokens or not peak:
        return None
    source, target = tokens
    flops = shape_named(record["cell"]["model"]).training_flops(source, target)
    return flops * samples_per_second / peak


def false_fits(record: Record, machine: Machine) -> bool:
    """Whether a batch that the plan said fits ran out of memory."""
    if any(other["status"] == "oom" for other in record.get("tries", [])):
        return True
    planned = record.get("planned_device_bytes")
    was_to_fit = planned is not None and planned <= machine.memory_bytes
    return record["status"] == "oom" and was_to_fit


def first_words(name: str) -> str:
    """The model in a cell's name; cells of the ablation use t5-small."""
    if name.startswith("ablation"):
        return "t5-small"
    return "-".join(name.split("-")[:2])


def _ratio(record: Record, control: Record | None) -> list[float] | None:
    """Ratio of samples/s to the control's, and its 95 % interval; None where either has no
    steps."""
    if control is None or control is record:
        return None
    ours = record.get("step_seconds")
    theirs = control.get("step_seconds")
    if not ours or not theirs:
        return None
    ratio = ratio_of_rates(ours, record["batch"], theirs, control["batch"])
    return None if ratio is None else list(ratio)


# Steady steps: which of a run's steps count, their rate, and how certain a ratio of two rates is.

DRAWS = 1_000
FEWEST = 3


def steady_steps(seconds: Sequence[float], warm: int) -> list[float]:
    """Steps after the first `warm`, and never the first; the later half where fewer than three
    would be left."""
    late = list(seconds[max(1, warm) :])
    if len(late) >= FEWEST:
        return late
    half = len(seconds) // 2
    return list(seconds[max(1, half) :])


def rate(seconds: Sequence[float], batch: int) -> float | None:
    """Samples per second; None without steps."""
    total = sum(seconds)
    if total <= 0:
        return None
    return batch * len(seconds) / total


def ratio_of_rates(
    ours: Sequence[float], batch: int, control: Sequence[float], control_batch: int
) -> tuple[float, float, float] | None:
    """Our samples/s over the control's, and the 95 % interval by bootstrap over steps; None unless
    both have steps."""
    if not ours or not control:
        return None
    generator = np.random.default_rng(0)
    our_rates = batch / _means(ours, generator)
    control_rates = control_batch / _means(control, generator)
    low, high = np.percentile(our_rates / control_rates, [2.5, 97.5])
    our_rate = batch / float(np.mean(ours))
    control_rate = control_batch / float(np.mean(control))
    return our_rate / control_rate, float(low), float(high)


def _means(seconds: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """(draws,) means of as many steps, drawn with replacement."""
    values = np.asarray(seconds)
    means = []
    for _ in range(DRAWS):
        drawn = generator.integers(0, len(values), len(values))
        means.append(values[drawn].mean())
    return np.array(means)


# Whether the fast path learns as the FP32 run does: their losses over the same rows, beside
# differences by chance.

LAST_SHARE = 0.2
"""Share of a run's losses, counted from the end, whose mean is its final loss."""
EXACT, FAST, OTHER = "losses-fp32", "losses-fast", "losses-fp32-other-seed"


def compared(records: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Final losses of the three runs and their differences; None until all three have ended well.

    The first two saw the same rows in the same order, so their difference is taken step by step:
    its mean and 95 % interval. The third began with other weights and saw other rows: it shows how
    far two FP32 runs differ by chance.
    """
    last = {}
    for name in (EXACT, FAST, OTHER):
        record = records.get(name)
        if record is None or record["status"] != "ok":
            return None
        last[name] = _last_losses(record)
    final = {name: float(losses.mean()) for name, losses in last.items()}
    difference = last[FAST] - last[EXACT]
    mean = float(difference.mean())
    half = _half_interval(difference)
    noise = abs(float(last[OTHER].mean() - last[EXACT].mean()))
    is_within_noise = abs(mean) <= noise or mean - half <= 0.0 <= mean + half
    return {
        "steps": records[EXACT]["cell"]["steps"],
        "final_loss": final,
        "difference": [mean, mean - half, mean + half],
        "noise": noise,
        "within_noise": bool(is_within_noise),
    }


def _last_losses(record: dict[str, Any]) -> np.ndarray:
    values = [entry["loss"] for entry in record["losses"]]
    count = max(1, round(LAST_SHARE * len(values)))
    return np.array(values[-count:])


def _half_interval(values: np.ndarray) -> float:
    """Half the width of the 95 % interval of a mean, by the normal distribution."""
    if len(values) < 2:
        return 0.0
    return 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5


# The summary of all cells.


def number(value: float | None) -> str:
    """Three digits, whole from 1,000 on; `-` for None."""
    if value is None:
        return UNKNOWN
    is_whole = isinstance(value, int) or abs(value) >= 1_000
    return f"{value:,.0f}" if is_whole else f"{value:.3g}"


def write_summary(
    out: Path,
    names: Sequence[str],
    records: Mapping[str, dict[str, Any]],
    machine: Machine,
    remarks: Iterable[str],
) -> None:
    """Write both files, each as a whole. Cells of `names` without a record have a row too: `not
    run`."""
    measured = {row["cell"]: row for row in rows(records, machine)}
    cells = []
    for name in names:
        not_run = {"cell": name, "status": "not run"}
        cells.append(measured.get(name, not_run))
    document = {
        "machine": asdict(machine),
        "remarks": list(remarks),
        "cells": cells,
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
    yield from _lines_of_cells(document["cells"])
    if document["ablation"]:
        yield "\n" + _ablation_table(document["ablation"]).to_markdown()
    if document["losses"]:
        yield ""
        yield "## Final loss against FP32"
        yield ""
        yield _losses(document["losses"])
    yield from _lines_of_failures(document["cells"])
    for remark in document["remarks"]:
        yield f"\n{remark}"


def _lines_of_cells(cells: Iterable[Record]) -> Iterable[str]:
    """The table of the cells that are no part of a comparison, and the speed of predictions."""
    plain = [row for row in cells if not row["cell"].startswith(("ablation", "losses"))]
    if plain:
        yield Table.of(map(shown, plain)).to_markdown()
    for row in plain:
        questions_per_second = row.get("questions_per_second")
        if questions_per_second is not None:
            yield f"\n{row['cell']}: {questions_per_second:.4g} questions/s"


def _lines_of_failures(cells: Iterable[Record]) -> Iterable[str]:
    failed = [row for row in cells if row.get("reason")]
    if not failed:
        return
    yield ""
    yield "## Cells that did not end well"
    yield ""
    for row in failed:
        reason = " ".join(row["reason"].split())
        yield f"* {row['cell']}: {row['status']}: {reason}"


def _ablation(measured: Mapping[str, Record]) -> list[Record]:
    """The rate of each run of the ablation, and its share of the one that it is compared with."""
    rates = {name: row["samples_per_second"] for name, row in measured.items()}
    runs = []
    for name, (_, what) in ABLATION.items():
        if name in rates:
            base = rates.get(ABLATED_FROM.get(name, "ablation-fast"))
            share = _quotient(rates[name], base)
            runs.append({"run": what, "samples_per_second": rates[name], "share": share})
    return runs


def _ablation_table(runs: Iterable[Record]) -> Table:
    lines = []
    for run in runs:
        lines.append((run["run"], number(run["samples_per_second"]), number(run["share"])))
    headings = ("run", "samples/s", "share of the fast path's")
    return Table(headings, tuple(lines), "Each measure taken away once")


def _losses(comparison: dict[str, Any]) -> str:
    mean, low, high = comparison["difference"]
    verdict = "within noise" if comparison["within_noise"] else "more than noise"
    return (
        f"Over {comparison['steps']} steps, the last fifth: "
        f"the fast path's loss less FP32's is {mean:+.4f} [{low:+.4f}, {high:+.4f}] nats; "
        f"two FP32 runs of other seeds differ by {comparison['noise']:.4f}: {verdict}."
    )


def shown(row: Record) -> dict[str, str]:
    """The texts of a row for people."""
    status = row["status"]
    if row.get("false_fits"):
        status += " (planned to fit)"
    return {
        "cell": row["cell"],
        "status": status,
        "batch": number(row.get("batch")),
        "samples/s": number(row.get("samples_per_second")),
        "predicted": number(row.get("predicted_samples_per_second")),
        "x control [95 %]": ratio_text(row.get("ratio_to_control")),
        "MFU (%)": _percent(row.get("mfu")),
        "planned peak (GiB)": _gibibytes(row.get("planned_peak_allocated_bytes")),
        "measured peak (GiB)": _gibibytes(row.get("peak_allocated_bytes")),
        "measured/planned": number(row.get("measured_to_planned")),
        "3 epochs (s)": number(row.get("three_epochs_seconds")),
        "asked": row.get("asked") or UNKNOWN,
    }


def ratio_text(ratio: Sequence[float] | None) -> str:
    """A ratio with its interval; `-` for None."""
    if ratio is None:
        return UNKNOWN
    value, low, high = ratio
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.3g}"


def _gibibytes(count: float | None) -> str:
    return UNKNOWN if count is None else f"{count / GIB:.2f}"


# All records and the summary as one file, which appears whole.

ARCHIVE = "bench-gpu.tar.gz"
KEPT = (
    "*.json",
    "cells/*.json",
    "commands/*.log",
    "summary.*",
    "runs/*/record.json",
    "runs/*/config.json",
    "runs/*/control.json",
    "runs/*/steps/*.npy",
    "runs/*/profile.txt",
    "runs/*/memory/*.csv",
    "runs/summary/summary.*",
    "runs/demo/summary/summary.*",
    "runs/*/launch.log",
    "runs/*/train.log",
)
"""What a reader needs of a call's folder."""
PREFIX = "bench-gpu"


def write_archive(out: Path, archive: Path, prefix: str) -> Path:
    """Pack what a reader needs, without weights and data; files lie in a folder of the name
    `prefix`."""
    kept = set[Path]()
    for pattern in KEPT:
        kept |= set(out.glob(pattern))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for file in sorted(kept):
            packed.add(file, arcname=f"{prefix}/{file.relative_to(out)}")
    files.write_bytes(archive, content.getvalue())
    return archive
