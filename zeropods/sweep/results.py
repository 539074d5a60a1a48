"""The results of a sweep: `sweep.json`, written after each run, its models' answers, and a table of
all results."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from zeropods import files
from zeropods.data.manifest import read_manifest
from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.measure.record import Record
from zeropods.measure.score_json import AnswerScore, QueryScore, score_of
from zeropods.programs import end_with_parent
from zeropods.report.entry import score_lines
from zeropods.sweep.matrix import Cell, Matrix
from zeropods.tables import Table, digits, progress
from zeropods.train.saved_models import prepared_of, raw_data

SWEEP_FILE = "sweep.json"
SWEEP_SCHEMA_VERSION = 1
RESULT_STATUSES = ("ok", "oom", "timeout", "failed", "pod_lost")
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
    """The launch into `OUT/CELL/REPEAT`, as far as it is known without pods: enough to recognise
    it."""
    is_prepared: bool
    """Whether the sweep prepares the data of this run; otherwise they are given."""
    status: str | None = None
    """Status as in a record, or `refused` if the run never began; None where it has not run yet."""
    reason: str | None = None
    """Why the run ended as it did; None where it ended well, or has not run yet."""
    samples_per_second: float | None = None
    precision: str | None = None
    """The precision that the run computed in, as measured; None where it was not measured."""
    seconds: float | None = None
    """Wall time in seconds from the launch to the record, for the attempt that produced the
    record."""

    @property
    def name(self) -> str:
        """Path of the run folder below OUT."""
        return f"{self.cell.name}/{self.repeat}"

    @property
    def command(self) -> str:
        """The command that somebody would type to get this run alone."""
        if self.cell.is_one_process:
            starter = [sys.executable]
        else:
            starter = ["zeropods", "launch", "--num-pods", str(self.cell.pods), "--"]
        return shlex.join([*starter, str(self.launch.script), *self.launch.arguments])

    @property
    def is_measured(self) -> bool:
        """Whether this trial has a result and needs no further run."""
        return self.status in RESULT_STATUSES

    def take(self, record: Record, seconds: float | None) -> None:
        """Store the result of a record in this trial.

        Args:
            seconds: wall time of the run; None where it is not known.
        """
        self.status = record.status
        self.reason = None
        if record.reason is not None:
            place = f"{record.pod}: " if record.pod else ""
            self.reason = f"{place}{record.reason}"
        self.samples_per_second = record.samples_per_second
        precision = record.measured_precision
        self.precision = None if precision is None else precision.text
        self.seconds = seconds

    def to_json(self) -> dict[str, object]:
        """The entry of this run in `sweep.json`."""
        return {
            "cell": self.cell.name,
            "repeat": self.repeat,
            **asdict(self.cell),
            "folder": self.name,
            "status": self.status,
            "reason": self.reason,
            "samples_per_second": self.samples_per_second,
            "precision": self.precision,
            "seconds": self.seconds,
        }


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
        files.write_json(self.out / SWEEP_FILE, self.to_json())

    def to_json(self) -> dict[str, object]:
        """The document of `sweep.json`."""
        return {
            "schema_version": SWEEP_SCHEMA_VERSION,
            "matrix": self.matrix.to_json(),
            "cells": [trial.to_json() for trial in self.trials],
            "left_out": self.matrix.left_out,
        }

    def table(self) -> Table:
        """A table with a line for each cell; samples per second are the mean over its repeats that
        ended well.

        Repeats that computed in different precisions have no mean, and the line says so.
        Where questions are asked, another column says how good the answers are.
        """
        header = ["cell", "repeats ok", "samples/s"]
        if self._has_answers:
            header.append("inference result")
        header.append("result")
        lines = [self._line(cell) for cell in self.matrix.cells]
        for impossible in self.matrix.left_out:
            blanks = [""] * (len(header) - 2)
            reason = f"left out: {impossible['reason']}"
            lines.append((impossible["cell"], *blanks, reason))
        return Table(tuple(header), tuple(lines))

    @property
    def _has_answers(self) -> bool:
        """Whether the models of finished runs answer questions."""
        return self.matrix.questions is not None

    def _line(self, cell: Cell) -> tuple[str, ...]:
        """The line of the table for a cell that is not left out."""
        trials = [trial for trial in self.trials if trial.cell == cell]
        finished = [trial for trial in trials if trial.status == "ok"]
        rate = _mean_rate(finished)
        results = "; ".join(dict.fromkeys(map(_result, trials)))
        precisions = sorted({trial.precision for trial in finished if trial.precision is not None})
        if len(precisions) > 1:
            rate = "n/a"
            computed = " and in ".join(precisions)
            results += f"; not one mean, since repeats computed in {computed}"
        line = [cell.name, f"{len(finished)} of {len(trials)}", rate]
        if self._has_answers:
            line.append(_inference_result(finished))
        line.append(results)
        return tuple(line)

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return str(self.table())


def _mean_rate(trials: Sequence[Trial]) -> str:
    """Mean samples per second of those trials that have measured them, as text; `n/a` if none
    has."""
    rates = []
    for trial in trials:
        if trial.samples_per_second is not None:
            rates.append(trial.samples_per_second)
    return digits(fmean(rates)) if rates else "n/a"


def _inference_result(trials: Sequence[Trial]) -> str:
    """How good the answers of some trials of one cell are, as text; `n/a` if none was scored."""
    scores = []
    for trial in trials:
        split_and_score = score_of(trial.launch.folder)
        if split_and_score is not None:
            _, score = split_and_score
            scores.append(score)
    if not scores:
        return "n/a"
    # The first line is the one over all tables.
    over_all_tables = next(score_lines(None, scores))
    measure = over_all_tables.judged_by
    result = over_all_tables.inference_result
    if measure is None or result is None:
        return "n/a"
    return f"{measure.name} {measure.text(result)}"


def _result(trial: Trial) -> str:
    """What came of a trial, as text."""
    if trial.status is None:
        return "not run yet"
    reason = (trial.reason or "").split("\n")[0]
    if not reason:
        return trial.status
    if len(reason) > LONGEST_REASON:
        reason = f"{reason[: LONGEST_REASON - 1]}…"
    return f"{trial.status}: {reason}"


# How good a run's model is: it answers questions that it never saw, and the answers are scored.
#
# Nothing here loads torch into the calling process: it may be a notebook's, whose next run needs
# the GPU.

ANSWERING_MODULES = ["zeropods.evaluate.generate", "zeropods.evaluate.score", "evaluate"]
"""Modules that every answer needs; importing them takes longer than a tiny model's answers."""


def answer_runs(runs: Sequence[Path], questions: int | None, *, linked: bool = False) -> None:
    """Let each run answer the first questions of its test split (dev if there is no test split),
    and score the answers.

    Leaves `predictions.SPLIT.jsonl` and `score.SPLIT.json` in the run folder. Queries are
    constrained. Each run answers in a process of its own. A run that has answered as many questions
    already, or all of its split, is passed over. If a run cannot be scored, a line on stderr says
    why, and the next run answers.

    Args:
        runs: run folders.
        questions: number of questions; None if none are to be answered.
        linked: whether queries compare only with cells that their question quotes; answers of the
            other kind are replaced.
    """
    if questions is None:
        return
    waiting = [run for run in runs if _has_more_to_answer(run, questions, linked)]
    if not waiting:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ANSWERING_MODULES)
    with progress("answer", "runs", len(waiting)) as bar:
        for run in waiting:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    pool.submit(_answer_and_score, run, questions, linked).result()
                except UserError as error:
                    print(f"not scored: {error}", file=sys.stderr)
                except BrokenProcessPool:
                    reason = "its answers took too much memory; ask fewer questions"
                    print(f"not scored: {run}: {reason}", file=sys.stderr)
            bar.update(1)


def _has_more_to_answer(run: Path, questions: int, linked: bool) -> bool:
    """Whether a run has answered fewer questions than these and than its split has, or has answered
    them in the other way."""
    split_and_score = score_of(run)
    if split_and_score is None:
        return True
    split, score = split_and_score
    if not isinstance(score, AnswerScore) or score.examples == 0:
        return True
    is_linked = isinstance(score, QueryScore) and score.linked
    if is_linked != linked:
        return True
    manifest = read_manifest(prepared_of(run))
    split_statistics = manifest.splits.get(split)
    wanted = questions
    if split_statistics is not None:
        wanted = min(questions, split_statistics.rows)
    return score.examples < wanted


def _answer_and_score(run: Path, questions: int, linked: bool) -> None:
    """Let a run answer, and score the answers. It is called in a process of its own, which is made
    to end with the one that started it."""
    end_with_parent(os.getppid(), signal.SIGTERM)
    from zeropods.evaluate.generate import ANSWERERS, predict
    from zeropods.evaluate.score import score
    from zeropods.train.saved_models import answer_task

    task = answer_task(run)
    how = replace(ANSWERERS[task].usual, linked=linked)
    data, split = raw_data(run)
    out = run / f"predictions.{split}.jsonl"
    predict(run, data, split, out, how, limit=questions)
    score(out, data, split)
