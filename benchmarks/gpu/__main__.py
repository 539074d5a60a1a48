"""Measure training and prediction on one NVIDIA GPU, without a network: `make bench-gpu OUT=DIR DATA=DIR`.

    python -m benchmarks.gpu --out build/gpu --data data
    python -m benchmarks.gpu --out build/gpu --data data --max-seconds 500   # call again until all are measured
    python -m benchmarks.gpu --out build/tiny --data data --device cpu       # tiny shapes: does it work?
    python -m benchmarks.gpu --collect DIR     # results/gpu from what the two calls of a pack brought back

A cell that has a record is not measured again. docs/gpu.md explains each figure.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import Cell, ablation, comparison, for_cpu, matrix, recompiled
from benchmarks.gpu.machine import Machine, machine_here, runnable, sets_to_prepare
from zeropods import files
from zeropods.errors import UserError, guarded
from zeropods.files import folder_locked
from zeropods.programs import prepare_compiling, wait_passively
from zeropods.tables import GIB, number, whole

COLLECT = "--collect"
"""The flag that makes results of what two calls of a pack brought back (`benchmarks.gpu.collect`)."""
LOCK = "bench.lock"
SIGNS = (LOCK, "machine.json", "cells")
ENDED_WELL = ("ok", "oom")


def main() -> int:
    """Measure the cells that have no record, then write the summary and the archive."""
    began = time.monotonic()
    if COLLECT in sys.argv[1:]:
        from benchmarks.gpu.collect import main as collect

        return collect()
    asked = _parser().parse_args()
    wait_passively()
    prepare_compiling()
    _check(asked)
    cells = _cells(asked)
    if asked.forecast is not None:
        return _forecast(cells, asked)
    with folder_locked(asked.out, LOCK, signs=SIGNS, kind="benchmark", flag="--out"):
        waiting = [cell for cell in cells if not _is_done(asked.out, cell, asked.retry)]
        ready, remarks = runnable(waiting, prepares=bool(sets_to_prepare(asked.data, asked.out)))
        given = None if asked.gpu_memory is None else int(asked.gpu_memory * GIB)
        machine = machine_here(asked.device, given)
        _refuse_another_machine(asked.out, machine)
        if ready:
            _measure_all(ready, asked, machine, began)
        _conclude(asked.out, cells, machine, remarks)
        remarks += _failed(asked.out, cells)
    for remark in remarks:
        print(remark, file=sys.stderr)
    return 1 if remarks else 0


def _forecast(cells: Sequence[Cell], asked: argparse.Namespace) -> int:
    from benchmarks.gpu.data import find_data
    from benchmarks.gpu.predicted import forecast

    if asked.gpu_memory is None:
        raise UserError(f"--forecast {asked.forecast!r}: give its --gpu-memory, in GiB")
    machine = Machine(device="cuda", gpu=asked.forecast, memory_bytes=int(asked.gpu_memory * GIB))
    if machine.peak("bf16") is None:
        raise UserError(f"--forecast {asked.forecast!r}: its published peak is not known; such as 'NVIDIA H200'")
    page = forecast(cells, find_data(asked.data, asked.out, asked.tokenizer), machine)
    files.write_text(asked.out / "forecast.md", page)
    print(page)
    return 0


def _failed(out: Path, cells: Sequence[Cell]) -> list[str]:
    """Remarks about cells that failed; running out of memory is a result like any other."""
    records = _records(out)
    failed = [cell.name for cell in cells if records.get(cell.name, {}).get("status", "ok") not in ENDED_WELL]
    return [f"failed: {', '.join(failed)}; summary.md says why, --retry measures them again"] if failed else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of records, summary and archive")
    parser.add_argument("--data", type=Path, required=True, help="prepared sets question/ and schema/, or raw WikiSQL")
    parser.add_argument("--tokenizer", help="for raw data; spiece.model in --data if not given, t5-tiny on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: every model is t5-tiny")
    parser.add_argument("--seconds", type=number, default=30.0, help="of steady steps a cell")
    parser.add_argument("--warm-steps", type=int, help="optimizer steps before them; 20, compiled 40, as graphs 400")
    parser.add_argument("--steps", type=whole, help="optimizer steps a cell, in place of --seconds")
    parser.add_argument("--max-seconds", type=number, help="begin no further cell after so much time")
    parser.add_argument("--gpu-memory", type=number, help="GiB that the plan may use; the GPU's own if not given")
    parser.add_argument("--forecast", metavar="GPU", help="measure nothing: what is predicted of, say, 'NVIDIA H200'")
    parser.add_argument("--compile", choices=["off", "blocks", "graphs"], help="in place of each cell's own way")
    parser.add_argument("--only", help="cells whose name matches, such as 't5-small-*'")
    parser.add_argument("--ablation", action="store_true", help="also take each measure away once")
    parser.add_argument("--compare-losses", action="store_true", help="also compare final losses with FP32's")
    parser.add_argument("--loss-steps", type=whole, default=500, help="of --compare-losses")
    parser.add_argument("--retry", action="store_true", help="measure cells again that did not end well")
    return parser


def _check(asked: argparse.Namespace) -> None:
    if asked.warm_steps is not None and asked.warm_steps < 0:
        raise UserError(f"--warm-steps {asked.warm_steps}; expected 0 or more")
    if not asked.data.is_dir():
        raise UserError(f"--data {asked.data}: no such folder; name one with question/ and schema/, or raw WikiSQL")


def _cells(asked: argparse.Namespace) -> list[Cell]:
    cells = matrix() + (ablation() if asked.ablation else [])
    cells += comparison(asked.loss_steps) if asked.compare_losses else []
    chosen = [cell for cell in cells if asked.only is None or fnmatch.fnmatchcase(cell.name, asked.only)]
    if not chosen:
        raise UserError(f"--only {asked.only!r}: no such cell; there are {', '.join(cell.name for cell in cells)}")
    if asked.steps is not None:
        chosen = [cell if cell.steps else replace(cell, steps=asked.steps) for cell in chosen]
    if asked.device == "cpu":
        return [for_cpu(cell) for cell in chosen]
    return [recompiled(cell, asked.compile) for cell in chosen]


def _measure_all(cells: Sequence[Cell], asked: argparse.Namespace, machine: Machine, began: float) -> None:
    from benchmarks.gpu.data import find_data
    from benchmarks.gpu.measuring import Bench
    from zeropods.data.tokenizers import TINY
    from zeropods.pods.processes import ending_in_order

    with ending_in_order():
        # The model of a CPU's cells has too few embeddings for another vocabulary.
        data = find_data(asked.data, asked.out, asked.tokenizer or (TINY if asked.device == "cpu" else None))
        bench = Bench(out=asked.out, data=data, machine=machine, seconds=asked.seconds, warm=asked.warm_steps)
        for number, cell in enumerate(cells):
            # Each call measures at least one cell: otherwise repeated calls might never get to the end.
            if number and asked.max_seconds is not None and time.monotonic() - began > asked.max_seconds:
                print(f"--max-seconds {asked.max_seconds:g}: {len(cells) - number} cells are left; call again")
                return
            print(f"{cell.name} ...", flush=True)
            files.write_json(_record_path(asked.out, cell), _measured(bench, cell))


def _measured(bench: Any, cell: Cell) -> dict[str, Any]:
    began = time.monotonic()
    try:
        record = bench.measure(cell)
    except UserError as error:
        record = {"cell": asdict(cell), "gpu": bench.machine.gpu, "status": "failed", "reason": str(error)}
    rate = record.get("samples_per_second") or record.get("questions_per_second")
    said = "" if rate is None else f", {rate:.4g} a second"
    print(f"{cell.name}: {record['status']}{said}, {time.monotonic() - began:.0f} s", flush=True)
    return record


def _conclude(out: Path, cells: Sequence[Cell], machine: Machine, remarks: Sequence[str]) -> None:
    from benchmarks.gpu.summary import ARCHIVE, PREFIX, write_archive, write_summary

    records = _records(out)
    known = {*records, *(cell.name for cell in cells)}
    ordered = [cell.name for cell in (*matrix(), *ablation(), *comparison(1)) if cell.name in known]
    files.write_json(out / "machine.json", asdict(machine))
    write_summary(out, ordered, {name: records[name] for name in ordered if name in records}, machine, remarks)
    print((out / "summary.md").read_text(encoding="utf-8"))
    archive = write_archive(out, out / ARCHIVE, PREFIX)
    print(f"written to {archive}")


def _records(out: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: _read(path) for path in sorted((out / "cells").glob("[!.]*.json"))}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); delete it, and its cell is measured again") from None
    if not isinstance(record, dict) or not {"cell", "gpu", "status"} <= record.keys():
        raise UserError(f"{path}: no record of a cell; delete it, and its cell is measured again")
    return record


def _record_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def _is_done(out: Path, cell: Cell, retry: bool) -> bool:
    path = _record_path(out, cell)
    return path.is_file() and not (retry and _read(path)["status"] != "ok")


def _refuse_another_machine(out: Path, machine: Machine) -> None:
    for name, record in _records(out).items():
        if record["gpu"] != machine.gpu:
            was, now = record["gpu"] or "a CPU", machine.gpu or "a CPU"
            raise UserError(f"--out {out}: {name} was measured on {was}, this is {now}; choose another folder")


if __name__ == "__main__":
    sys.exit(guarded(main))
