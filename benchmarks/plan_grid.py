"""Compare the plan with runs of this machine: a grid of settings, half of them to fit, half to judge.

make bench-plan                               # goes on where it was interrupted
python -m benchmarks.plan_grid --cells 20     # a trial of the first cells
python -m benchmarks.plan_grid --fold         # ship the fit, once all cells have run
python -m benchmarks.plan_grid --beside FILE  # fit and judge together with the results of another machine
python -m benchmarks.plan_grid --further 24   # judge the shipped fit on cells that nobody had seen when it was made
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.data import ROOT
from benchmarks.figure import Figure
from zeropods import files
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.tokenizers import GPT_TINY
from zeropods.errors import UserError, guarded
from zeropods.launch.notebook import train_series
from zeropods.measure.calibration import (
    SHIPPED,
    Calibration,
    MachineProbe,
    Sample,
    fitted,
    judge,
    measured_memory,
    measured_step,
    probe_for,
    read_calibration,
    read_probe,
    sample_of,
)
from zeropods.measure.record import read_record
from zeropods.programs import wait_passively
from zeropods.report.formulas import figures as values_of
from zeropods.techniques import technique_named
from zeropods.train.causal import causal_config, random_causal
from zeropods.train.probe import probe

CELLS, DRAWN, STEPS = 64, 400, 4
"""Number of runs in the grid, of random combinations from which each is chosen, and of optimizer steps in a run."""
SEEN = 72
"""Number of cells beyond the grid whose results were already known when the parts of the plan were chosen."""
REPEATED = 8
"""One in this many runs is made twice."""
T5 = ("t5-tiny", "t5-efficient-mini", "t5-small")
CAUSAL: dict[str, dict[str, object] | None] = {
    "distilgpt2": None,
    "bloom-56m": {"model_type": "bloom", "hidden_size": 512, "n_layer": 8, "n_head": 8, "vocab_size": 60_000},
    "qwen3-40m": {
        "model_type": "qwen3", "hidden_size": 448, "num_hidden_layers": 8, "num_attention_heads": 7,
        "num_key_value_heads": 7, "head_dim": 64, "intermediate_size": 1_344, "vocab_size": 50_304,
        "max_position_embeddings": 2_048, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""BLOOM and Qwen have sizes that this machine trains in seconds; a model without a shape is known by its name."""


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """One run of the grid."""

    model: str
    technique: str
    processes: int
    rows: int
    is_long: bool
    """T5: the source has table and question, not the question alone; causal: a row has 64 tokens, not 32."""
    checkpointing: bool

    @property
    def name(self) -> str:
        """Name of the cell's run folder."""
        length, again = ("long" if self.is_long else "short"), ("-again" if self.checkpointing else "")
        return f"{self.model}-{self.technique}-x{self.processes}-{self.rows}-{length}{again}"

    @property
    def is_possible(self) -> bool:
        """Whether the technique can run with this number of processes."""
        return (
            (self.processes == 1)
            if technique_named(self.technique).is_alone
            else (self.technique != "ddp" or self.processes > 1)
        )


AXES: dict[str, Sequence[Any]] = {
    "model": (*T5, *CAUSAL),
    "technique": ("none", "ddp", "zero1", "zero2", "zero3", "zero3_offload"),
    "processes": (1, 2, 3),
    "rows": (2, 8),
    "is_long": (False, True),
    "checkpointing": (False, True),
}


def grid(number: int = CELLS) -> list[GridCell]:
    """Return `number` different cells that cover every possible pair of settings; those at even indices are to fit."""
    draw, cells, seen = random.Random(0), list[GridCell](), set[tuple[Any, ...]]()
    every = [cell for values in itertools.product(*AXES.values()) if (cell := _cell(values)).is_possible]
    while len(cells) < number:
        drawn = draw.sample(every, min(DRAWN, len(every)))
        best = max(drawn, key=lambda cell: len(_pairs(cell) - seen))
        if not _pairs(best) - seen:
            seen.clear()
        seen |= _pairs(best)
        cells.append(best)
        every.remove(best)
    return cells


def _cell(values: tuple[Any, ...]) -> GridCell:
    return GridCell(**dict(zip(AXES, values, strict=True)))


def _pairs(cell: GridCell) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(asdict(cell).items(), 2))


def flags_of(cell: GridCell, work: Path, runs: str) -> dict[str, Any]:
    """The flags of a cell's run, which lies in the folder `runs` of `work`."""
    common: dict[str, Any] = {
        "per_device_train_batch_size": cell.rows, "gradient_checkpointing": cell.checkpointing, "eval_steps": 0,
        "save_steps": 0, "logging_steps": 1, "precision": "fp32", "memory_interval": 0.1, "threads": 1,
        "per_device_eval_batch_size": cell.rows,
        "deepspeed": technique_named(cell.technique).file, "outputdir": work / runs / cell.name,
        "slots": cell.processes,
    }  # fmt: skip
    if cell.model in T5:
        data = work / "data" / ("schema" if cell.is_long else "question")
        return {**common, "model_id": cell.model, "dataset_path": data, "init": "random", "max_steps": STEPS}
    shape = CAUSAL[cell.model]
    return {
        **common,
        "model_name_or_path": cell.model if shape is None else work / "models" / cell.model,
        "init": "random" if shape is None else "pretrained",
        "data": work / "data" / ("64" if cell.is_long else "32"),
        "gradient_accumulation_steps": 1,
        "max_train_steps": STEPS,
        "max_eval_steps": 2,
    }


def prepared(work: Path) -> None:
    """Make the data and models that do not exist yet."""
    limit = 120
    write_sample(work / "sample")
    for prompt in ("schema", "question"):
        prepare(
            Preparation(data=work / "sample", tokenizer="t5-tiny", prompt=prompt, limit=limit), work / "data" / prompt
        )
    write_sample(work / "text", task="lm")
    for length in (32, 64):
        wanted = Preparation(task="lm", data=work / "text", tokenizer=GPT_TINY, max_seq_length=length, limit=limit)
        prepare(wanted, work / "data" / str(length))
    for name, shape in CAUSAL.items():
        folder = work / "models" / name
        if shape is not None and not folder.is_dir():
            random_causal(causal_config(shape), seed=0).save_pretrained(folder)


def run(cell: GridCell, work: Path, runs: str = "runs") -> Path:
    """Run a cell, unless its run is finished; returns its folder."""
    script = "textsql_train.py" if cell.model in T5 else "causal_train.py"
    (found,) = train_series(ROOT / script, [flags_of(cell, work, runs)])
    return found.folder


# The results of the runs, saved after each run.


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """A cell that has run: the parts of its plan and what it measured, or why it failed."""

    cell: GridCell
    half: str
    """`fit` or `judge`."""
    status: str
    sample: Sample | None = None
    live_bytes_ratio: float | None = None
    """Live bytes of states: measured divided by planned."""
    repeated: dict[str, float | None] = field(default_factory=dict)
    """What a second run of the same cell measured, by quantity."""


def measured(cell: GridCell, half: str, work: Path, machine: MachineProbe, repeat: bool) -> GridRun:
    """Run a cell, and once more if `repeat` is set."""
    try:
        record = read_record(run(cell, work))
        again = read_record(run(cell, work, "again")) if repeat else None
    except UserError as error:
        return GridRun(cell=cell, half=half, status=" ".join(str(error).split()))
    figures = values_of(record)
    return GridRun(
        cell=cell,
        half=half,
        status=record.status,
        sample=sample_of(record, probe_for(record, machine)),
        live_bytes_ratio=figures.measured_to_planned,
        repeated={} if again is None else {"memory": measured_memory(again), "time": measured_step(again)},
    )


def judged(
    runs: Sequence[GridRun], machine: MachineProbe, others: Sequence[GridRun] = ()
) -> tuple[list[Figure], Calibration]:
    """The figures of the half that judges, and the calibration fitted to the other half.

    Args:
        others: runs of another machine, half of which are fitted too; the figures are of this machine alone.
    """
    fit = [each.sample for each in (*runs, *others) if each.sample and each.half == "fit"]
    calibration = fitted(fit, f"{len(fit)} runs of the shipped grid", machine)
    return errors([each for each in runs if each.half == "judge"], calibration), calibration


def read_runs(path: Path) -> list[GridRun]:
    """Read the runs from a file that this program wrote."""
    return [files.validated(GridRun, path, json.dumps(each).encode()) for each in json.loads(path.read_bytes())["runs"]]


def errors(runs: Sequence[GridRun], calibration: Calibration) -> list[Figure]:
    """How far plans made with a calibration are off, for runs that it was not fitted to."""
    judges = [each for each in runs if each.sample]
    figures, inside = list[Figure](), list[bool]()
    for quantity, name, most in (("memory", "resident memory above the bare process", 0.08), ("time", "step", 0.2)):
        pairs = [
            judge(each.sample, quantity, value, calibration)
            for each in judges
            if each.sample and (value := each.sample.measured[quantity])
        ]
        offs = sorted(abs(each.measured / each.planned - 1) for each in pairs)
        inside += [each.low <= each.measured <= each.high for each in pairs if each.low and each.high]
        asked = ("3", "95") if quantity == "memory" else ("8", "90")
        figures += [
            Figure(name=f"{name}: median error", value=100 * median(offs), unit="%", asked=asked[0]),
            Figure(name=f"{name}: runs within {most:.0%}", value=_share(off <= most for off in offs), unit="%",
                   asked=asked[1], note=f"{len(offs)} runs, worst {max(offs):.0%}"),
        ]  # fmt: skip
    states = [abs(each.live_bytes_ratio - 1) for each in judges if each.live_bytes_ratio]
    for quantity, what in (("memory", "resident memory"), ("time", "a step")):
        spread = [
            abs(again / value - 1)
            for each in runs
            if each.sample and (again := each.repeated.get(quantity)) and (value := each.sample.measured[quantity])
        ]
        if spread:
            note = f"{len(spread)} repeats, worst {max(spread):.0%}"
            name = f"the same run again: median difference of {what}"
            figures.append(Figure(name=name, value=100 * median(spread), unit="%", note=note))
    fastest = _fastest(judges, calibration)
    figures += [
        Figure(name="live bytes of states: worst error", value=100 * max(states or [math.nan]), unit="%", asked="1"),
        Figure(name="the fastest is, or within 5 % of it", value=_share(fastest), unit="%", asked="90",
               note=f"{len(fastest)} groups of one model, batch and length"),
        Figure(name="intervals said to hold 80 %: hold", value=_share(inside), unit="%", asked="70 to 90"),
    ]  # fmt: skip
    return [figure for figure in figures if figure.value is not None and not math.isnan(figure.value)]


def _fastest(runs: Sequence[GridRun], calibration: Calibration) -> list[bool]:
    """Whether the planned fastest is within 5 % of the best, for each model, batch and length with several runs."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for each in runs:
        if each.sample and (seconds := each.sample.measured["time"]):
            planned = calibration.planned("cpu", "time", each.sample.parts["time"])
            samples = each.cell.rows * each.cell.processes
            key = (each.cell.model, each.cell.rows, each.cell.is_long)
            groups.setdefault(key, []).append((samples / planned, samples / seconds))
    return [max(group)[1] >= 0.95 * max(rate for _, rate in group) for group in groups.values() if len(group) > 1]


def _share(holds: Iterable[bool]) -> float:
    found = list(holds)
    return 100 * sum(found) / len(found) if found else math.nan


def main() -> None:
    """Run the cells that have not run yet, and print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.plan_grid", description=__doc__, allow_abbrev=False)
    parser.add_argument("--cells", type=int, default=CELLS, metavar="N", help="only the first N of the grid")
    parser.add_argument("--work", type=Path, default=Path("runs/plan-grid"), help="where the runs are")
    parser.add_argument("--out", type=Path, help="results/plan_grid.json or plan_further.json if not given")
    parser.add_argument("--fold", action="store_true", help="ship the fit with the package")
    parser.add_argument(
        "--further", type=int, default=0, metavar="N", help="N cells that nobody has seen, by the shipped fit"
    )
    parser.add_argument("--beside", type=Path, metavar="FILE", help="results of another machine, fitted with these")
    arguments = parser.parse_args()
    others = read_runs(arguments.beside) if arguments.beside else []
    wait_passively()
    further = arguments.further
    out = arguments.out or Path("results") / ("plan_further.json" if further else "plan_grid.json")
    work = arguments.work.resolve()
    cells = grid(CELLS + SEEN + further)[CELLS + SEEN :] if further else grid(arguments.cells)
    halves = ["judge" if further else ("fit", "judge")[number % 2] for number in range(len(cells))]
    work.mkdir(parents=True, exist_ok=True)
    # The cells of both halves are written down before the first run.
    named = {cell.name: half for cell, half in zip(cells, halves, strict=True)}
    files.write_json(work / ("further.json" if further else "halves.json"), named)
    path = work / "machine.json"
    if not path.is_file():
        files.write_json(path, asdict(probe()))
    machine, runs = read_probe(path), list[GridRun]()
    prepared(work)
    for number, (cell, half) in enumerate(zip(cells, halves, strict=True)):
        runs.append(measured(cell, half, work, machine, repeat=number % REPEATED == 1))
        print(f"{number + 1}/{len(cells)} {half} {cell.name}: {runs[-1].status}", flush=True)
        files.write_json(out, {"machine": asdict(machine), "runs": [asdict(each) for each in runs]})
    shipped = read_calibration(SHIPPED)
    figures, calibration = (errors(runs, shipped), shipped) if further else judged(runs, machine, others)
    for figure in figures:
        print(figure.line())
    document = {"figures": [asdict(figure) for figure in figures], "machine": asdict(machine)}
    for figure in (found := errors([each for each in others if each.half == "judge"], calibration) if others else []):
        print(f"{arguments.beside}: {figure.line()}")
    document |= {"beside": [asdict(figure) for figure in found]} if found else {}
    files.write_json(out, {**document, "runs": [asdict(each) for each in runs]})
    if arguments.fold and (len(cells) < CELLS or any(each.status != "ok" for each in runs)):
        raise UserError(f"--fold: not all of the {CELLS} cells have run; see {out}")
    if arguments.fold:
        files.write_json(SHIPPED, asdict(calibration))
        print(f"written to {SHIPPED}")
    print(f"written to {out}")


if __name__ == "__main__":
    sys.exit(guarded(main))
