"""The results of a sweep: `sweep.json`, written after each run, its models' answers, and a table of all results."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from zeropods import files
from zeropods.data.manifest import read_manifest
from zeropods.errors import UserError
from zeropods.evaluate.models import prepared_of, raw_data
from zeropods.evaluate.score_json import TextScore, score_of
from zeropods.launch.command import Launch
from zeropods.measure.record import Record
from zeropods.programs import end_with_parent
from zeropods.report.entry import score_lines
from zeropods.sweep.matrix import Cell, Matrix
from zeropods.tables import Table, digits, progress

FILE = "sweep.json"
SCHEMA_VERSION = 1
RESULTS = ("ok", "oom", "timeout", "failed", "pod_lost")
"""Statuses of a run that has been measured, however it ended; `interrupted` is not one of them."""
LONGEST_REASON = 120
"""Most characters of a reason in a table; `sweep.json` has the whole reason."""


@dataclass(kw_only=True)
class Trial:
    """One run of a cell of a matrix: what is run, and what came of it."""

    cell: Cell
    repeat: int
    """Number of the repeat, counted from 1."""
    launch: Launch
    """The launch into `OUT/CELL/REPEAT`, as far as it is known without pods: enough to recognise it."""
    is_prepared: bool
    """Whether the sweep prepares the data of this run; otherwise they are given."""
    status: str | None = None
    """Status as in a record, or `refused` if the run never began; None where it has not run yet."""
    reason: str | None = None
    samples_per_second: float | None = None
    precision: str | None = None
    """The precision that it computed in, as measured; None where it was not measured."""
    seconds: float | None = None
    """Wall time in seconds from the launch to the record, for the attempt that produced the record."""

    @property
    def name(self) -> str:
        """Path of the run folder below OUT."""
        return f"{self.cell.name}/{self.repeat}"

    @property
    def command(self) -> str:
        """The command that somebody would type to get this run alone."""
        alone, pods = [sys.executable], ["zeropods", "launch", "--num-pods", str(self.cell.pods), "--"]
        script = [str(self.launch.script), *self.launch.arguments]
        return shlex.join([*(alone if self.cell.is_one_process else pods), *script])

    @property
    def is_measured(self) -> bool:
        """Whether this trial has a result and needs no further run."""
        return self.status in RESULTS

    def take(self, record: Record, seconds: float | None) -> None:
        """Take over the result from a record."""
        place = f"{record.pod}: " if record.pod else ""
        self.reason = None if record.reason is None else f"{place}{record.reason}"
        self.status, self.samples_per_second, self.seconds = record.status, record.samples_per_second, seconds
        self.precision = None if record.measured_precision is None else record.measured_precision.text

    def to_json(self) -> dict[str, object]:
        """The entry of this run in `sweep.json`."""
        said = ("status", "reason", "samples_per_second", "precision", "seconds")
        run = {"cell": self.cell.name, "repeat": self.repeat, **asdict(self.cell), "folder": self.name}
        return {**run, **{name: getattr(self, name) for name in said}}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A matrix and its runs, in the order in which they are run."""

    out: Path
    matrix: Matrix
    trials: Sequence[Trial]

    @property
    def is_measured(self) -> bool:
        """Whether every run has a result, of whatever kind."""
        return all(trial.is_measured for trial in self.trials)

    def write(self) -> None:
        """Write `sweep.json`."""
        files.write_json(self.out / FILE, self.to_json())

    def to_json(self) -> dict[str, object]:
        """The document of `sweep.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "matrix": self.matrix.to_json(),
            "cells": [trial.to_json() for trial in self.trials],
            "left_out": self.matrix.left_out,
        }

    def table(self) -> Table:
        """A table with a line for each cell; samples per second are the mean over its repeats that ended well.

        Repeats that computed in different precisions have no mean, and the line says so.
        Where questions are asked, another column says how good the answers are.
        """
        asked = self.matrix.questions is not None
        header = ("cell", "repeats ok", "samples/s", *(["inference result"] if asked else []), "result")
        lines = list[tuple[str, ...]]()
        for cell in self.matrix.cells:
            rows = [trial for trial in self.trials if trial.cell == cell]
            well = [row for row in rows if row.status == "ok"]
            rates = [row.samples_per_second for row in well if row.samples_per_second is not None]
            scores = [found[1] for row in well if asked and (found := score_of(row.launch.folder))]
            judged = next(score_lines(None, scores)) if scores else None
            good = f"{judged['inference_kind']} {judged['inference_result']:.3f}" if judged else "n/a"
            rate, results = digits(fmean(rates)) if rates else "n/a", "; ".join(dict.fromkeys(map(_result, rows)))
            precisions = sorted({row.precision for row in well if row.precision is not None})
            if len(precisions) > 1:
                rate = "n/a"
                results += f"; not one mean, since repeats computed in {' and in '.join(precisions)}"
            lines.append((cell.name, f"{len(well)} of {len(rows)}", rate, *([good] if asked else []), results))
        for left in self.matrix.left_out:
            lines.append((left["cell"], *[""] * (len(header) - 2), f"left out: {left['reason']}"))
        return Table(header, tuple(lines))

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return str(self.table())


def _result(row: Trial) -> str:
    if row.status is None:
        return "not run yet"
    reason = (row.reason or "").split("\n")[0]
    reason = reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 1]}…"
    return f"{row.status}: {reason}" if reason else row.status


# How good a run's model is: it answers questions that it never saw, and the answers are scored.
#
# Nothing here loads torch into the calling process: it may be a notebook's, whose next run needs the GPU.

IMPORTED = ["zeropods.evaluate.generate", "zeropods.evaluate.score", "evaluate"]
"""Modules that every answer needs; importing them takes longer than a tiny model's answers."""


def answer_runs(runs: Sequence[Path], questions: int | None) -> None:
    """Let each run answer the first questions of its test split (dev if there is no test split), and score the answers.

    Leaves `predictions.SPLIT.jsonl` and `score.SPLIT.json` in the run folder. Queries are constrained. Each run that
    has answered neither that many questions yet nor all of its split does so in a process of its own. If a run cannot
    be scored, a line on stderr says why, and the next run answers.
    """
    if questions is None:
        return
    waiting = []
    for run in runs:
        split, score = score_of(run) or ("", None)
        answered = 0 if score is None or isinstance(score, TextScore) else score.examples
        known = read_manifest(prepared_of(run)).splits.get(split) if answered else None
        if answered < (min(questions, known.rows) if known else questions):
            waiting.append(run)
    if not waiting:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with progress("answer", "runs", len(waiting)) as bar:
        for run in waiting:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    pool.submit(_answer, run, questions).result()
                except UserError as error:
                    print(f"not scored: {error}", file=sys.stderr)
                except BrokenProcessPool:
                    print(f"not scored: {run}: its answers took too much memory; ask fewer questions", file=sys.stderr)
            bar.update(1)


def _answer(run: Path, questions: int) -> None:
    end_with_parent(os.getppid(), signal.SIGTERM)
    from zeropods.evaluate.generate import predict
    from zeropods.evaluate.score import score

    data, split = raw_data(run)
    out = run / f"predictions.{split}.jsonl"
    predict(run, data, split, out, limit=questions)
    score(out, data, split)
