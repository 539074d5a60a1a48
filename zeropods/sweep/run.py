"""A sweep: every run of a matrix in its own processes, one after the other, until each has a result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch.command import Launch, runner_argv
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.planning import plan_launch
from zeropods.launch.process import run_one
from zeropods.launch.run import run_launch
from zeropods.pods.signals import ending_in_order
from zeropods.report.progress import progress
from zeropods.sweep.datasets import provide_datasets
from zeropods.sweep.matrix import Matrix, write_matrix
from zeropods.sweep.pods import SweepPods
from zeropods.sweep.results import Row, Sweep, earlier_rows
from zeropods.sweep.standing import held, refuse_other_runs, standing_row
from zeropods.sweep.trial import Trial, trials

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

MATRIX = "matrix.yaml"
"""The matrix as it was read, beside its runs."""

Argv = Callable[[Launch, Path], list[str]]


def run_sweep(
    matrix: Matrix,
    out: str | Path,
    cluster: Cluster | None = None,
    *,
    hostfile: Path | None = None,
    again: bool = False,
    argv: Argv = runner_argv,
) -> Sweep:
    """Run what a matrix asks for and return all of its results; what has a result already is not run.

    `OUT/sweep.json` is written after each run, so that a call that was interrupted or killed goes on where
    it was. Ctrl-C ends the run that goes on, which leaves its record, and then the sweep.

    Args:
        cluster: its pods; if not given, pods of this sweep's own, which end with it.
        hostfile: hosts for pods of its own.
        again: try once more what ran out of memory or time, failed, or lost a pod.
        argv: makes the launcher's command, see `run_launch`.

    Raises:
        UserError: nothing was started: another sweep is there, a data set is missing, the pods are too few.
    """
    out = Path(out).resolve()
    with ending_in_order(), held(out), SweepPods(matrix, cluster, hostfile) as pods:
        provide_datasets(matrix, out, _say)
        planned = trials(matrix, out)
        refuse_other_runs(planned)
        earlier = earlier_rows(out, matrix)
        write_matrix(matrix, out / MATRIX)
        rows = tuple(standing_row(trial, earlier, again=again) for trial in planned)
        sweep = Sweep(out=out, matrix=matrix, rows=rows)
        sweep.write()
        return _run(sweep, planned, pods, argv)


def _run(sweep: Sweep, planned: list[Trial], pods: SweepPods, argv: Argv) -> Sweep:
    """Run what has no result yet; each result is on disk before the next begins."""
    waiting = [trial for trial, row in zip(planned, sweep.rows, strict=True) if not row.is_measured]
    if len(waiting) < len(planned):
        _say(f"{len(planned) - len(waiting)} of {len(planned)} runs have a result already")
    with progress("sweep", "runs", len(waiting)) as bar:
        for number, trial in enumerate(waiting, 1):
            _say(f"run {number} of {len(waiting)}: {trial.name} begins")
            try:
                row = _measured(trial, sweep.matrix.timeout_seconds, pods, argv)
            except (KeyboardInterrupt, SystemExit):
                sweep.with_row(_interrupted(trial)).write()
                raise
            sweep = sweep.with_row(row)
            sweep.write()
            _say(f"run {number} of {len(waiting)}: {trial.name} {_told(row)}")
            bar.update(1)
    return sweep


def _measured(trial: Trial, timeout_seconds: float | None, pods: SweepPods, argv: Argv) -> Row:
    """The row of a run that has ended, however it did."""
    began, row = time.monotonic(), Row.of(trial)
    try:
        record = _record(trial, timeout_seconds, pods, argv)
    except UnopenedError as error:
        record = _unrecorded(error.status, error.reason)
    except (UserError, OSError) as error:
        record = _unrecorded("failed", " ".join(str(error).split()))
    return row.ended(record, time.monotonic() - began)


def _record(trial: Trial, timeout_seconds: float | None, pods: SweepPods, argv: Argv) -> dict[str, Any]:
    if trial.cell.is_one_process:
        return run_one(trial.launch, timeout_seconds)
    cluster = pods.ready()
    planned = plan_launch(cluster, trial.script, trial.arguments, pods=trial.cell.pods)
    record = run_launch(planned, cluster, argv=argv, timeout_seconds=timeout_seconds)
    if record["status"] == "interrupted":
        # The supervisor has taken the signal, which was for all of us.
        raise KeyboardInterrupt(record["reason"])
    return record


def _interrupted(trial: Trial) -> Row:
    """The row of a run that ended with this sweep; its record is read when the next call has to decide."""
    return Row.of(trial).ended(_unrecorded("interrupted", "ended with the sweep"), None)


def _unrecorded(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason, "pod": None, "samples_per_second": None}


def _told(row: Row) -> str:
    """A result in a line."""
    rate = "" if row.samples_per_second is None else f", {row.samples_per_second:.4g} samples/s"
    reason = "" if row.reason is None else f": {row.reason}"
    return f"{row.status} after {row.seconds or 0.0:.0f} s{rate}{reason}"


def _say(line: str) -> None:
    """A line above the progress bar; stdout is the result's."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
