"""One of the calls on a GPU that is lent for minutes: measure what its part lists, within so many
seconds.

    bash PACK/run.sh a 230                  # which calls, with what the pack brings on PYTHONPATH:
    python -m benchmarks.gpu.session a --seconds 230 --data DIR --out DIR [--device cpu]

Every step has a limit, and is skipped when too little time is left. What was measured is packed
after each step, so that a call that is cut off loses one step. docs/gpu.md tells what comes back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import Cell, for_cpu
from benchmarks.gpu.commands import Desk, ended_as_expected, ended_in_words, left_over, typed
from benchmarks.gpu.data import Data, find_data
from benchmarks.gpu.jobs import call, prefetching
from benchmarks.gpu.machine import Machine, machine_here, runnable
from benchmarks.gpu.measuring import Bench, plans
from benchmarks.gpu.pack import TINY, check_pack
from benchmarks.gpu.parts import STEADY_SECONDS, Step, parts
from benchmarks.gpu.predicted import best_batch
from benchmarks.gpu.summary import write_archive, write_summary
from zeropods import files
from zeropods.errors import UserError, guarded
from zeropods.files import HOME
from zeropods.measure.machine_probe import kept_probe
from zeropods.pods.processes import ending_in_order, start_bound
from zeropods.programs import prepare_compiling, wait_passively
from zeropods.tables import number
from zeropods.train.flags import PROJECT

CLOSING_SECONDS = 4.0
"""Seconds that are kept for the summary and the archive."""
ENDING_SECONDS = 35.0
"""Most seconds that a program takes to end after its limit: its grace, and what it writes."""
FACTS = "facts.json"
PLANNED = "planned.json"
STEPS = "steps.json"
STEPS_ON_CPU = 3
LAST_LINE = 200
MEMORY_ON_CPU = 100 << 20
"""Bytes for which the best batch is chosen where there is no GPU."""


@dataclass
class Clock:
    """What is left of a call's seconds."""

    ends: float
    """When the call has to be over, by `time.monotonic`."""

    def left(self) -> float:
        """Seconds that are left for steps."""
        return self.ends - CLOSING_SECONDS - time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Session:
    """A call: its folder, its machine, its cells, and what is left of its time."""

    part: str
    out: Path
    """Folder of its records and runs."""
    archive: Path
    """What the caller takes home."""
    bench: Bench
    clock: Clock
    desk: Desk
    """Where its commands are typed."""
    compiling: subprocess.Popen[bytes]
    """The process that compiles DeepSpeed's operation for offload, or finds that it is compiled."""

    def run(self, steps: Sequence[Step]) -> None:
        """Run the steps in order, as far as the time goes; one line says how each ended."""
        ended: list[dict[str, Any]] = []
        for step in steps:
            began = time.monotonic()
            outcome = self._outcome(step)
            seconds = round(time.monotonic() - began, 1)
            ended.append({"step": step.name, "outcome": outcome, "seconds": seconds})
            files.write_json(self.out / STEPS, ended)
            print(
                f"== {step.name}: {outcome}, {seconds:g} s; {self.clock.left():.0f} s left",
                flush=True,
            )
            self._pack()
        if any(step.commands for step in steps):
            for process in left_over(self.out):
                print(f"left running: {process}", flush=True)
            self._pack()

    def _outcome(self, step: Step) -> str:
        """Run a step within its limit and what is left of the call; returns in words how it
        ended."""
        if any(cell.offloads for cell in step.cells):
            # A run would wait for the compiled operation within its own limit.
            spare_seconds = max(0.0, self.clock.left() - step.least_seconds)
            with suppress(subprocess.TimeoutExpired):
                self.compiling.wait(spare_seconds)
        left = self.clock.left()
        if left < step.least_seconds:
            return f"skipped, it needs {step.least_seconds:g} s and {max(0.0, left):.0f} are left"
        step_ends = time.monotonic() + min(left, step.most_seconds)
        if step.commands:
            return self._type(step, step_ends)
        if not step.cells:
            return self._facts(step_ends - time.monotonic())
        least_seconds_of_cell = step.least_seconds / len(step.cells)
        outcomes = []
        for cell in step.cells:
            seconds = step_ends - time.monotonic()
            if seconds < least_seconds_of_cell:
                outcomes.append(f"{cell.name} skipped")
                continue
            outcomes.append(self._measure(cell, seconds))
        return ", ".join(outcomes)

    def _type(self, step: Step, step_ends: float) -> str:
        """Type a step's commands; returns in words how each ended."""
        outcomes = []
        for command in step.commands:
            ended = self.desk.type(command, max(1.0, step_ends - time.monotonic()))
            outcomes.append(ended_in_words(ended))
        return ", ".join(outcomes)

    def _measure(self, cell: Cell, seconds: float) -> str:
        """Measure a cell within so many seconds, and write its record; returns in words what came
        of it."""
        # A program that is ended at its limit takes some seconds more to write what it measured.
        limit = max(seconds - min(ENDING_SECONDS, seconds / 4), 1.0)
        bench = replace(self.bench, limit_seconds=limit)
        try:
            record = bench.measure(cell)
        except UserError as error:
            record = {
                "cell": asdict(cell),
                "gpu": bench.machine.gpu,
                "status": "failed",
                "reason": str(error),
            }
        files.write_json(self.out / "cells" / f"{cell.name}.json", record)
        if record["status"] == "failed":
            return f"{cell.name} failed: {record['reason']}"
        outcome = f"{cell.name} {record['status']}"
        rate = record.get("samples_per_second") or record.get("questions_per_second")
        if rate is None:
            return outcome
        return f"{outcome} {rate:.4g}/s"

    def _facts(self, seconds: float) -> str:
        """Write the facts of the machine, in a process of their own; returns how that ended."""
        path = self.out / FACTS
        status, answer = call("benchmarks.gpu.facts", [str(path)], seconds)
        if status != 0:
            return f"failed: status {status}: {answer[-LAST_LINE:]}"
        return "ok"

    def _pack(self) -> None:
        """Write the summary and the archive of all that was measured so far, earlier calls of this
        part included."""
        records = {}
        for path in sorted((self.out / "cells").glob("[!.]*.json")):
            records[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        names = [cell.name for step in parts()[self.part] for cell in step.cells]
        measured = {name: records[name] for name in names if name in records}
        write_summary(self.out, names, measured, self.bench.machine, [])
        write_archive(self.out, self.archive, f"part-{self.part}")


def write_plans(out: Path, cells: Sequence[Cell], data: Data, machine: Machine) -> None:
    """Write down what is planned of each cell before any of them runs, so that no plan knows a
    result."""
    planned = {}
    for cell in cells:
        if cell.kind == "predict":
            continue
        batch = cell.batch
        if batch is None:
            rows = len(data.shapes(cell.prompt, 1, 1))
            batch, _ = best_batch(cell, partial(data.padded, cell), rows, machine)
        planned[cell.name] = {
            "batch": batch,
            **plans(cell, batch, data.padded(cell, batch), machine),
        }
    files.write_json(out / PLANNED, planned)


def with_ready_cells(steps: Sequence[Step], ready: Sequence[Cell]) -> list[Step]:
    """The steps with those of their cells that can run here; a step of which none can is left
    out."""
    kept = []
    for step in steps:
        cells = tuple(cell for cell in step.cells if cell in ready)
        # The facts of the machine and commands have no cells.
        if cells or not step.cells:
            kept.append(replace(step, cells=cells))
    return kept


def main() -> int:
    """Run a part; the status is 0 when all that was begun ended well."""
    flags = _parser().parse_args()
    # What has passed since the call began counts too.
    clock = Clock(ends=time.monotonic() + flags.seconds - (time.time() - flags.began))
    wait_passively()
    prepare_compiling()
    if flags.pack is not None:
        check_pack(flags.pack)
    out = (flags.work or flags.out) / flags.part
    out.mkdir(parents=True, exist_ok=True)
    flags.out.mkdir(parents=True, exist_ok=True)
    # What is learned of this machine, by a probe say, is kept beside the parts, for all of them.
    os.environ.setdefault(HOME, str(out.parent.resolve() / "home"))
    steps = _steps(flags.part, flags.device)
    cells = [cell for step in steps for cell in step.cells]
    ready, remarks = runnable(cells, prepares=False)
    steps = with_ready_cells(steps, ready)
    with ending_in_order(), prefetching(), _compiling() as compiling:
        session = Session(
            part=flags.part,
            out=out,
            archive=flags.out / f"part-{flags.part}.tar.gz",
            bench=_bench(flags, out, ready),
            clock=clock,
            desk=_desk(flags, out),
            compiling=compiling,
        )
        session.run(steps)
    remarks += _failures(out)
    print((out / "summary.md").read_text(encoding="utf-8"))
    for remark in remarks:
        print(remark, file=sys.stderr)
    return 1 if remarks else 0


@contextmanager
def _compiling() -> Iterator[subprocess.Popen[bytes]]:
    """Compile DeepSpeed's operation for offload within this block, beside what else goes on."""
    compiling = start_bound(
        [sys.executable, str(PROJECT / "tools" / "compile_ops.py")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield compiling
    finally:
        # The compilers that it has started are of its group.
        with suppress(ProcessLookupError):
            os.killpg(compiling.pid, signal.SIGKILL)
        compiling.wait()


def _desk(flags: argparse.Namespace, out: Path) -> Desk:
    """Where the commands of a part are typed; on a CPU, with tiny data and a tiny model."""
    data = flags.data
    model = "t5-small"
    if flags.device == "cpu":
        data = data / TINY
        model = "t5-tiny"
    runs = out.resolve() / "runs"
    places = {"data": str(data.resolve()), "runs": str(runs), "model": model}
    return Desk(out=out, places=places)


def _bench(flags: argparse.Namespace, out: Path, cells: Sequence[Cell]) -> Bench:
    """What the cells share: the machine, the data and, written down first, what is planned."""
    memory_bytes = None
    place = flags.data
    if flags.device == "cpu":
        memory_bytes = MEMORY_ON_CPU
        place = flags.data / TINY
    machine = machine_here(flags.device, memory_bytes)
    probe = kept_probe(files.home())
    if probe is not None:
        machine = machine.as_probed(probe)
    data = find_data(place, out, None)
    write_plans(out, cells, data, machine)
    files.write_json(out / "machine.json", asdict(machine))
    return Bench(
        out=out,
        data=data,
        machine=machine,
        seconds=flags.steady_seconds,
        tries_other_batches=False,
    )


def _steps(part: str, device: str) -> list[Step]:
    """The steps of a part; on a CPU, with small models and few optimizer steps."""
    steps = parts()[part]
    if device == "cuda":
        return list(steps)
    small = []
    for step in steps:
        cells = [replace(for_cpu(cell), steps=STEPS_ON_CPU) for cell in step.cells]
        # There is no memory of a GPU that a neighbour could take.
        commands = [replace(command, leaves_bytes=None) for command in step.commands]
        small.append(replace(step, cells=tuple(cells), commands=tuple(commands)))
    return small


def _failures(out: Path) -> list[str]:
    """A remark that names the cells and commands that did not end well; none where all did. Too
    little memory is a result."""
    failed = []
    for path in sorted((out / "cells").glob("[!.]*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["status"] not in ("ok", "oom"):
            failed.append(path.stem)
    for ended in typed(out):
        if not ended_as_expected(ended):
            failed.append(ended["name"])
    if not failed:
        return []
    return [f"did not end well: {', '.join(failed)}; summary.md and commands.json say why"]


def _parser() -> argparse.ArgumentParser:
    description, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.session", description=description, allow_abbrev=False
    )
    what = (
        "what to measure: a, the first facts; b, the tables; c, what is compiled; d, Qwen3; "
        "e, commands; f, plans by a probe; g, notebooks"
    )
    parser.add_argument("part", choices=sorted(parts()), help=what)
    parser.add_argument("--seconds", type=number, required=True, help="in which all has to be over")
    parser.add_argument(
        "--began", type=float, default=time.time(), help="when they began, in seconds since 1970"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of the prepared sets and raw questions"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the part-NAME.tar.gz")
    parser.add_argument(
        "--work", type=Path, help="folder of runs, with their weights (default: that of --out)"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny models, does it work?"
    )
    parser.add_argument("--pack", type=Path, help="the pack, whose code has to be this project's")
    parser.add_argument(
        "--steady-seconds", type=number, default=STEADY_SECONDS, help="of steady steps a cell"
    )
    return parser


if __name__ == "__main__":
    sys.exit(guarded(main))
