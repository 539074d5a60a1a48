"""Results of what the two calls of a pack brought back: `python -m benchmarks.gpu --collect DIR`
writes `results/gpu/`.

DIR holds `part-a.tar.gz`, `part-b.tar.gz` and so on, or some of them: a call that was cut off left
what it had measured, and the page says what is missing.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.commands import ended_in_words
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Step, parts
from benchmarks.gpu.summary import UNKNOWN, Record, ratio_text, rows
from zeropods import files
from zeropods.errors import UserError
from zeropods.outputs import new_folder, out_folder
from zeropods.tables import GIB, MIB, Table
from zeropods.train.flags import PROJECT

RESULTS = PROJECT / "results" / "gpu"
PAGE = "README.md"
FIGURES = "summary.json"
NEAR = 0.10
"""Difference of measured from planned memory above which a cell is named."""
CELLS = "cells/"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one call brought back."""

    name: str
    steps: tuple[Step, ...]
    """What it was to measure."""
    documents: Mapping[str, Any]
    """Its JSON files by their paths, without `.json`: `machine`, `facts`, `planned`, `steps`,
    `commands`, `cells/NAME`."""

    @property
    def machine(self) -> Machine:
        """The machine that it ran on."""
        return Machine(**self.documents["machine"])

    @property
    def records(self) -> dict[str, Record]:
        """The records of its cells: those that it was to measure first, then others."""
        known = {}
        for name in self.wanted:
            record = self.documents.get(f"{CELLS}{name}")
            if record is not None:
                known[name] = record
        for path, record in self.documents.items():
            if path.startswith(CELLS):
                known.setdefault(path.removeprefix(CELLS), record)
        return known

    @property
    def commands(self) -> list[Record]:
        """The commands that were typed, in their order."""
        commands: list[Record] = self.documents.get("commands", {"commands": []})["commands"]
        return commands

    @property
    def wanted(self) -> list[str]:
        """The cells that it was to measure, in order."""
        names = []
        for step in self.steps:
            names += [cell.name for cell in step.cells]
        return names

    @property
    def missing(self) -> list[str]:
        """What it was to measure and has not: cells, or the facts of the machine."""
        names = [name for name in self.wanted if name not in self.records]
        typed = {ended["name"] for ended in self.commands}
        for step in self.steps:
            names += [command.name for command in step.commands if command.name not in typed]
        has_facts_step = any(not step.cells and not step.commands for step in self.steps)
        if has_facts_step and "facts" not in self.documents:
            names.append("facts")
        return names


def main() -> int:
    """Write the results; what is missing is said on the page, and is no failure."""
    description, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=description, allow_abbrev=False
    )
    parser.add_argument(
        "--collect",
        type=Path,
        required=True,
        help="folder with part-a.tar.gz, part-b.tar.gz ...",
    )
    parser.add_argument(
        "--out",
        type=out_folder,
        default=RESULTS,
        help="folder of the results (default: results/gpu)",
    )
    arguments = parser.parse_args()
    collected = read_parts(arguments.collect)
    with new_folder(arguments.out) as place:
        page = write_results(collected, place)
    print(page)
    print(f"written to {arguments.out}")
    return 0


def read_parts(folder: Path) -> list[Part]:
    """The parts of which there is an archive; besides the two of a pack, any other that somebody
    made of more cells.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    collected = []
    for archive in sorted(folder.glob("part-*.tar.gz")):
        prefix = archive.name.removesuffix(".tar.gz")
        name = prefix.removeprefix("part-")
        steps = parts().get(name, ())
        collected.append(Part(name=name, steps=steps, documents=_documents(archive, prefix)))
    if not collected:
        raise UserError(
            f"--collect {folder}: has no part-a.tar.gz or part-b.tar.gz; "
            "name the folder that holds them"
        )
    return collected


def _documents(archive: Path, prefix: str) -> dict[str, Any]:
    """The JSON files of an archive that lie below `prefix`, as `Part.documents` has them."""
    documents = {}
    remedy = "fetch it again, or run that part again"
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                path = Path(member.name)
                if not member.isfile() or path.suffix != ".json":
                    continue
                name = str(path.relative_to(prefix).with_suffix(""))
                # Below `runs/` lie the records of training, from which those of the cells are made.
                is_document = "/" not in name or name.startswith(CELLS)
                content = packed.extractfile(member)
                if content is not None and is_document:
                    documents[name] = json.loads(content.read())
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:
        raise UserError(f"{archive}: cannot be read ({error}); {remedy}") from None
    if "machine" not in documents:
        raise UserError(f"{archive}: does not say which machine it is of; {remedy}")
    return documents


def write_results(collected: Iterable[Part], folder: Path) -> str:
    """Write the page, all figures, and what each cell measured; returns the page."""
    all_parts = list(collected)
    figures = {}
    for part in all_parts:
        for name, document in part.documents.items():
            # The figures below, made anew from the records, take the place of a call's summary.
            if name != "summary":
                path = folder / f"part-{part.name}" / f"{name}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_json(path, document)
        figures[part.name] = {
            "machine": part.documents["machine"],
            "facts": part.documents.get("facts"),
            "cells": rows(part.records, part.machine),
            "commands": part.commands,
            "missing": part.missing,
        }
    files.write_json(folder / FIGURES, figures)
    page = "\n".join(_page(all_parts)) + "\n"
    files.write_text(folder / PAGE, page)
    return page


# The page.


def _page(collected: list[Part]) -> Iterable[str]:
    names = sorted({part.machine.gpu or "a CPU, at tiny shapes" for part in collected})
    yield f"# Measured on {' and '.join(names)}"
    if any(part.machine.gpu is None for part in collected):
        yield "\nNo GPU: these rows show that the command works; they say nothing of a GPU's speed."
    for part in collected:
        facts = part.documents.get("facts")
        if facts is not None:
            yield "\n## The machine\n"
            yield _facts(facts).to_markdown()
        yield f"\n## Part {part.name}\n"
        measured = rows(part.records, part.machine)
        if measured:
            yield _speeds(measured).to_markdown()
            yield "\nMemory, planned for the largest batch that the cell met, beside measured:\n"
            yield _memory(measured).to_markdown()
        if part.commands:
            yield _commands(part.commands).to_markdown()
            left = part.documents.get("left_over")
            if left is not None:
                yield f"\nProcesses of commands left running: {len(left['processes'])}."
        yield from _profiles(measured)
        yield from _remarks(part, measured)


def _facts(facts: Mapping[str, Any]) -> Table:
    hardware = facts["hardware"]
    installed = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    lines = [
        ("processor", f"{hardware['cores']} cores of {hardware['cpu']}"),
        ("versions", ", ".join(installed)),
    ]
    for precision, by_side in facts["matmul_flops_per_second"].items():
        most = max(by_side.values())
        lines.append((f"{precision} products (TFLOP/s)", f"{most / 1e12:.1f}"))
    microseconds = facts["operation_seconds"] * 1e6
    lines.append(("small operation with its gradient (µs)", f"{microseconds:.1f}"))
    if facts["gpu"]:
        lines += _facts_of_gpu(facts["gpu"])
    return Table(("fact", "value"), tuple(lines), "")


def _facts_of_gpu(gpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory = gpu["memory_bytes"] / GIB
    cache = gpu["l2_bytes"] / MIB
    to_gpu = _in(gpu["to_gpu_bytes_per_second"], 1e9)
    to_host = _in(gpu["to_host_bytes_per_second"], 1e9)
    return [
        ("GPU", f"{gpu['name']}, {memory:.2f} GiB, L2 {cache:.0f} MiB"),
        ("CUDA, cuDNN", f"{gpu['cuda']}, {gpu['cudnn']}"),
        ("context by NVML (MiB)", _in(gpu["context_bytes"], MIB)),
        ("host to GPU, GPU to host (GB/s)", f"{to_gpu}, {to_host}"),
        ("GPU memory (GB/s, read and written)", _in(gpu["memory_bytes_per_second"], 1e9)),
    ]


def _speeds(measured: Iterable[Record]) -> Table:
    lines = []
    for row in measured:
        rate = row["samples_per_second"] or row["questions_per_second"]
        lines.append(
            {
                "cell": row["cell"],
                "status": row["status"],
                "precision": row["precision"],
                "batch": _in(row["batch"]),
                "samples/s": _in(rate),
                "step (ms)": _in(row["median_step_seconds"], 1e-3),
                "planned step (ms)": _in(row["predicted_step_seconds"], 1e-3),
                "x recipe [95 %]": ratio_text(row["ratio_to_control"]),
                "MFU (%)": _in(row["mfu"], 0.01),
                "3 epochs of WikiSQL (s)": _in(row["three_epochs_seconds"]),
            }
        )
    return Table.of(lines)


def _memory(measured: Iterable[Record]) -> Table:
    lines = []
    for row in measured:
        lines.append(
            {
                "cell": row["cell"],
                "planned peak allocated (GiB)": _in(row["planned_peak_allocated_bytes"], GIB),
                "measured": _in(row["peak_allocated_bytes"], GIB),
                "measured / planned": _in(row["measured_to_planned"]),
                "reserved": _in(row["peak_reserved_bytes"], GIB),
                "planned on the GPU (GiB)": _in(row["planned_device_bytes"], GIB),
                "used by NVML": _in(row["device_used_bytes"], GIB),
                "resident (GiB)": _in(row["peak_resident_bytes"], GIB),
            }
        )
    return Table.of(lines)


def _commands(commands: Iterable[Record]) -> Table:
    """How each command that was typed ended."""
    lines = []
    for ended in commands:
        _, _, outcome = ended_in_words(ended).partition(f"{ended['name']} ")
        if ended["killed_at_step"] is not None:
            outcome = f"{outcome}; rank 0 was killed at step {ended['killed_at_step']}"
        lines.append(
            {
                "command": ended["name"],
                "ended": outcome,
                "seconds": _in(ended["seconds"]),
            }
        )
    return Table.of(lines)


def _profiles(measured: Iterable[Record]) -> Iterable[str]:
    for row in measured:
        flops = row["profiled_flops"]
        if flops and flops["profiler"] and flops["shape"]:
            ratio = flops["profiler"] / flops["shape"]
            yield (
                f"\n{row['cell']}: DeepSpeed's profiler, corrected, "
                f"has {flops['profiler']:.4g} FLOPs of a forward pass, "
                f"the model's shape {flops['shape']:.4g}: {ratio:.4f} times."
            )


def _remarks(part: Part, measured: Iterable[Record]) -> Iterable[str]:
    far_from_plan = []
    for row in measured:
        ratio = row["measured_to_planned"]
        # A run that never came to a second step has not met its largest batch.
        has_met_it = bool(row["median_step_seconds"])
        if has_met_it and ratio is not None and abs(ratio - 1) > NEAR:
            far_from_plan.append(f"{row['cell']} {ratio:.2f}")
    if far_from_plan:
        yield f"\nOutside {NEAR:.0%} of the planned peak: {', '.join(far_from_plan)}."
    for row in measured:
        if row["reason"]:
            reason = " ".join(row["reason"].split())
            yield f"\n{row['cell']}: {row['status']}: {reason}"
    if part.missing:
        yield f"\nNot measured: {', '.join(part.missing)}."


def _in(value: float | None, unit: float = 1.0) -> str:
    """A figure in a unit, with three digits; `-` where it was not measured."""
    if value is None:
        return UNKNOWN
    figure = value / unit
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"
