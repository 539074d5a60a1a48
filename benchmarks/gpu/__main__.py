"""Measure training and prediction on one NVIDIA GPU, without a network: `make bench-gpu OUT=DIR
DATA=DIR`.

    python -m benchmarks.gpu --out build/gpu --data data
    python -m benchmarks.gpu --out build/gpu --data data --max-seconds 500
    python -m benchmarks.gpu --out build/tiny --data data --device cpu
    python -m benchmarks.gpu --collect DIR

The second is called again until all is measured; the third tries at tiny shapes whether it works;
the last makes results/gpu from what the two calls of a pack brought back. A cell that has a record
is not measured again. docs/gpu.md explains each figure.
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
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.cells import Cell, ablation, comparison, for_cpu, matrix, recompiled
from benchmarks.gpu.machine import Machine, machine_here, runnable, sets_to_prepare
from zeropods import files
from zeropods.errors import UserError, guarded
from zeropods.files import folder_locked
from zeropods.programs import prepare_compiling, wait_passively
from zeropods.tables import GIB, number, whole

if TYPE_CHECKING:
    from benchmarks.gpu.measuring import Bench

COLLECT = "--collect"
"""The flag that makes results of what two calls of a pack brought back
(`benchmarks.gpu.collect`)."""
LOCK = "bench.lock"
SIGNS = (LOCK, "machine.json", "cells")
ENDED_WELL = ("ok", "oom")
"""Statuses that are results: that the memory did not do is one."""


def main() -> int:
    """Measure the cells that have no record, then write the summary and the archive."""
    began = time.monotonic()
    if COLLECT in sys.argv[1:]:
        from benchmarks.gpu.collect import main as collect

        return collect()
    flags = _parser().parse_args()
    wait_passively()
    prepare_compiling()
    _check(flags)
    cells = _cells(flags)
    if flags.forecast is not None:
        return _forecast(cells, flags)
    with folder_locked(flags.out, LOCK, signs=SIGNS, kind="benchmark", flag="--out"):
        remarks = _bring_up_to_date(cells, flags, began)
    for remark in remarks:
        print(remark, file=sys.stderr)
    return 1 if remarks else 0


def _bring_up_to_date(cells: Sequence[Cell], flags: argparse.Namespace, began: float) -> list[str]:
    """Measure the cells that have no record, and write the summary; returns what is to be said of
    the others."""
    waiting = [cell for cell in cells if not _is_done(flags.out, cell, flags.retry)]
    unprepared = sets_to_prepare(flags.data, flags.out)
    ready, remarks = runnable(waiting, prepares=bool(unprepared))
    machine = machine_here(flags.device, _memory_bytes(flags))
    _refuse_another_machine(flags.out, machine)
    if ready:
        _measure_all(ready, flags, machine, began)
    _conclude(flags.out, cells, machine, remarks)
    return remarks + _failed(flags.out, cells)


def _memory_bytes(flags: argparse.Namespace) -> int | None:
    """Bytes that the plan may use by `--gpu-memory`; None where it is not given."""
    if flags.gpu_memory is None:
        return None
    return int(flags.gpu_memory * GIB)


def _forecast(cells: Sequence[Cell], flags: argparse.Namespace) -> int:
    from benchmarks.gpu.data import find_data
    from benchmarks.gpu.predicted import forecast

    memory_bytes = _memory_bytes(flags)
    if memory_bytes is None:
        raise UserError(f"--forecast {flags.forecast!r}: give its --gpu-memory, in GiB")
    machine = Machine(device="cuda", gpu=flags.forecast, memory_bytes=memory_bytes)
    if machine.peak("bf16") is None:
        raise UserError(
            f"--forecast {flags.forecast!r}: its published peak is not known; such as 'NVIDIA H200'"
        )
    data = find_data(flags.data, flags.out, flags.tokenizer)
    page = forecast(cells, data, machine)
    files.write_text(flags.out / "forecast.md", page)
    print(page)
    return 0


def _failed(out: Path, cells: Sequence[Cell]) -> list[str]:
    """Remarks about cells that failed; running out of memory is a result like any other."""
    records = _records(out)
    failed = []
    for cell in cells:
        record = records.get(cell.name)
        if record is not None and record["status"] not in ENDED_WELL:
            failed.append(cell.name)
    if not failed:
        return []
    return [f"failed: {', '.join(failed)}; summary.md says why, --retry measures them again"]


def _parser() -> argparse.ArgumentParser:
    description, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=description, allow_abbrev=False
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of records, summary and archive",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="prepared sets question/ and schema/, or raw WikiSQL",
    )
    parser.add_argument(
        "--tokenizer",
        help="for raw data; spiece.model in --data if not given, t5-tiny on a CPU",
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: every model is t5-tiny",
    )
    _add_durations(parser)
    parser.add_argument(
        "--gpu-memory",
        type=number,
        help="GiB that the plan may use; the GPU's own if not given",
    )
    parser.add_argument(
        "--forecast",
        metavar="GPU",
        help="measure nothing: what is predicted of, say, 'NVIDIA H200'",
    )
    parser.add_argument(
        "--compile",
        choices=["off", "blocks", "graphs"],
        help="in place of each cell's own way",
    )
    _add_choice_of_cells(parser)
    return parser


def _add_durations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=number, default=30.0, help="of steady steps a cell")
    parser.add_argument(
        "--warm-steps",
        type=int,
        help="optimizer steps before them; 20, compiled 40, as graphs 400",
    )
    parser.add_argument("--steps", type=whole, help="optimizer steps a cell, in place of --seconds")
    parser.add_argument(
        "--max-seconds", type=number, help="begin no further cell after so much time"
    )


def _add_choice_of_cells(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="cells whose name matches, such as 't5-small-*'")
    parser.add_argument("--ablation", action="store_true", help="also take each measure away once")
    parser.add_argument(
        "--compare-losses",
        action="store_true",
        help="also compare final losses with FP32's",
    )
    parser.add_argument("--loss-steps", type=whole, default=500, help="of --compare-losses")
    parser.add_argument(
        "--retry",
        action="store_true",
        help="measure cells again that did not end well",
    )


def _check(flags: argparse.Namespace) -> None:
    if flags.warm_steps is not None and flags.warm_steps < 0:
        raise UserError(f"--warm-steps {flags.warm_steps}; expected 0 or more")
    if not flags.data.is_dir():
        raise UserError(
            f"--data {flags.data}: no such folder; "
            "name one with question/ and schema/, or raw WikiSQL"
        )


def _cells(flags: argparse.Namespace) -> list[Cell]:
    """The cells that a call asks for, as its flags change them."""
    cells = matrix()
    if flags.ablation:
        cells += ablation()
    if flags.compare_losses:
        cells += comparison(flags.loss_steps)
    chosen = cells
    if flags.only is not None:
        chosen = [cell for cell in cells if fnmatch.fnmatchcase(cell.name, flags.only)]
    if not chosen:
        names = ", ".join(cell.name for cell in cells)
        raise UserError(f"--only {flags.only!r}: no such cell; there are {names}")
    return [_changed(cell, flags) for cell in chosen]


def _changed(cell: Cell, flags: argparse.Namespace) -> Cell:
    """A cell with the steps and the compilation that a call asks for."""
    if flags.steps is not None and not cell.steps:
        cell = replace(cell, steps=flags.steps)
    if flags.device == "cpu":
        return for_cpu(cell)
    return recompiled(cell, flags.compile)


def _measure_all(
    cells: Sequence[Cell], flags: argparse.Namespace, machine: Machine, began: float
) -> None:
    from benchmarks.gpu.data import find_data
    from benchmarks.gpu.measuring import Bench
    from zeropods.data.tokenizers import TINY
    from zeropods.pods.processes import ending_in_order

    tokenizer = flags.tokenizer
    if not tokenizer and flags.device == "cpu":
        # The model of a CPU's cells has too few embeddings for another vocabulary.
        tokenizer = TINY
    with ending_in_order():
        bench = Bench(
            out=flags.out,
            data=find_data(flags.data, flags.out, tokenizer),
            machine=machine,
            seconds=flags.seconds,
            warm=flags.warm_steps,
        )
        for number, cell in enumerate(cells):
            # Each call measures at least one cell: otherwise repeated calls might never get to the
            # end.
            may_stop = number > 0 and flags.max_seconds is not None
            if may_stop and time.monotonic() - began > flags.max_seconds:
                left = len(cells) - number
                print(f"--max-seconds {flags.max_seconds:g}: {left} cells are left; call again")
                return
            print(f"{cell.name} ...", flush=True)
            files.write_json(_record_path(flags.out, cell), _measured(bench, cell))


def _measured(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Measure a cell and print how that ended; returns its record."""
    began = time.monotonic()
    try:
        record = bench.measure(cell)
    except UserError as error:
        record = {
            "cell": asdict(cell),
            "gpu": bench.machine.gpu,
            "status": "failed",
            "reason": str(error),
        }
    speed = ""
    rate = record.get("samples_per_second") or record.get("questions_per_second")
    if rate is not None:
        speed = f", {rate:.4g} a second"
    seconds = time.monotonic() - began
    print(f"{cell.name}: {record['status']}{speed}, {seconds:.0f} s", flush=True)
    return record


def _conclude(out: Path, cells: Sequence[Cell], machine: Machine, remarks: Sequence[str]) -> None:
    """Write the summary and the archive of all records, with a row for each cell of this call too,
    and print them."""
    from benchmarks.gpu.summary import ARCHIVE, PREFIX, write_archive, write_summary

    records = _records(out)
    wanted_or_measured = {*records, *(cell.name for cell in cells)}
    names = []
    # The number of steps is no part of a name.
    for cell in (*matrix(), *ablation(), *comparison(steps=1)):
        if cell.name in wanted_or_measured:
            names.append(cell.name)
    measured = {name: records[name] for name in names if name in records}
    files.write_json(out / "machine.json", asdict(machine))
    write_summary(out, names, measured, machine, remarks)
    print((out / "summary.md").read_text(encoding="utf-8"))
    archive = write_archive(out, out / ARCHIVE, PREFIX)
    print(f"written to {archive}")


def _records(out: Path) -> dict[str, dict[str, Any]]:
    """The records of cells by their names, in the order of these."""
    paths = sorted((out / "cells").glob("[!.]*.json"))
    return {path.stem: _read(path) for path in paths}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path}: not JSON ({error}); delete it, and its cell is measured again"
        ) from None
    if not isinstance(record, dict) or not {"cell", "gpu", "status"} <= record.keys():
        raise UserError(f"{path}: no record of a cell; delete it, and its cell is measured again")
    return record


def _record_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def _is_done(out: Path, cell: Cell, retry: bool) -> bool:
    """Whether a cell has a record, and with `retry` one that says `ok`."""
    path = _record_path(out, cell)
    if not path.is_file():
        return False
    is_tried_again = retry and _read(path)["status"] != "ok"
    return not is_tried_again


def _refuse_another_machine(out: Path, machine: Machine) -> None:
    for name, record in _records(out).items():
        if record["gpu"] != machine.gpu:
            before = record["gpu"] or "a CPU"
            now = machine.gpu or "a CPU"
            raise UserError(
                f"--out {out}: {name} was measured on {before}, this is {now}; "
                "choose another folder"
            )


if __name__ == "__main__":
    sys.exit(guarded(main))
