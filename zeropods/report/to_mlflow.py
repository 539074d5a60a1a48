"""Runs that have ended, and summaries of runs, on their way to MLflow."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.measure.mlflow_runs import (
    MLFLOW,
    MLFLOW_FILE,
    POINTS_AT_ONCE,
    connection,
    experiment_name,
    fault_of,
    opened,
    parameters_of,
    say,
    server_address,
)
from zeropods.measure.record import CONFIG, RECORD, Loss, Record

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from zeropods.report.entry import Entry
    from zeropods.report.summary import Summary

RUN_SECONDS = 300.0
"""Most seconds to wait until a run that has ended is sent, which takes one or two seconds;
mlflow's client gives up a server that does not answer after some 20."""
SUMMARY_SECONDS = 3_600.0
"""Most seconds to wait until a summary is sent, which may be of hundreds of runs."""
SUMMARY_RUN = "summary"
"""The id of a summary in its own `mlflow.json`, where a run has its run id; and the folder of a
summary's files in MLflow."""
STATUSES = {"ok": "FINISHED", "running": "RUNNING", "interrupted": "KILLED", "killed": "KILLED"}
"""MLflow's word for the status of a run; `FAILED` for any other one."""
NOT_IN_NAMES = re.compile(r"[^\w./: -]", re.ASCII)
"""Matches characters that MLflow refuses in the name of a metric; custom metrics may have any."""


@dataclass(frozen=True)
class Sent:
    """What was sent of a summary, and to where."""

    address: str
    experiment: str
    runs: int
    """Number of runs that were sent with the summary."""


def report_end(folder: Path) -> None:
    """Send a run that has ended, with a summary of it alone; do nothing if its folder names no
    MLflow run.

    What goes wrong is said on the standard error in one line and not raised: the run has ended, and
    its folder has everything.
    """
    if not (folder / MLFLOW_FILE).is_file():
        return
    fault = fault_of(lambda: _send_ended(folder), RUN_SECONDS)
    if fault is not None:
        command = f"zeropods summary {shlex.quote(str(folder))} --report-to {MLFLOW}"
        say(folder, f"MLflow has not all of this run ({fault}); send it again: {command}")


def _send_ended(folder: Path) -> None:
    """Send a run that has ended, and a summary of it alone."""
    from zeropods.report.summary import read_runs

    summary = read_runs([folder])
    (entry,) = summary.entries
    with connection() as client, tempfile.TemporaryDirectory() as page:
        mlflow_run_id = _send_run(client, entry)
        summary.write(Path(page))
        client.log_artifacts(mlflow_run_id, page, SUMMARY_RUN)


def send_summary(summary: Summary, out: Path) -> Sent:
    """Send every run of a summary, and the summary's files as a run of its own.

    A run or a summary that the server has already is brought up to date.

    Args:
        out: the folder in which the summary was written.

    Raises:
        UserError: not everything has arrived.
    """
    address = server_address()
    # Of a run without a configuration nothing is known that could be sent.
    known_runs = [entry for entry in summary.entries if entry.config is not None]

    fault = fault_of(lambda: _send_all(known_runs, out), SUMMARY_SECONDS)
    if fault is not None:
        raise UserError(
            f"--report-to {MLFLOW}: {out} is written, but {address} has not all of it ({fault}); "
            "repeat the command"
        )
    return Sent(address, experiment_name(), len(known_runs))


def _send_all(entries: Sequence[Entry], out: Path) -> None:
    """Send runs, and the files of their summary.

    Args:
        entries: runs with a configuration.
        out: the folder in which the summary was written.
    """
    with connection() as client:
        for entry in entries:
            _send_run(client, entry)
        mlflow_run_id = opened(client, out, SUMMARY_RUN, {})
        for path in sorted(out.iterdir()):
            # `mlflow.json` says only which run of the server this folder is.
            if path.is_file() and path.name != MLFLOW_FILE:
                client.log_artifact(mlflow_run_id, str(path), SUMMARY_RUN)
        client.set_terminated(mlflow_run_id)


def _send_run(client: MlflowClient, entry: Entry) -> str:
    """Send a run of a summary: its figures, the losses that the server lacks, its files, its
    status.

    Returns:
        Its id in MLflow.

    Raises:
        UserError: the run has no configuration.
    """
    config = entry.config
    if config is None:
        raise UserError(f"{entry.folder}: {entry.reason}")
    mlflow_run_id = opened(client, entry.folder, config.run_id, parameters_of(config))
    if entry.record is not None:
        _send_figures(client, mlflow_run_id, entry, entry.record)
    for name in (CONFIG, RECORD):
        if (entry.folder / name).is_file():
            client.log_artifact(mlflow_run_id, str(entry.folder / name))
    status = STATUSES.get(entry.status, "FAILED")
    # `set_terminated` would set an end, which a running run has not.
    if status == "RUNNING":
        client.update_run(mlflow_run_id, status=status)
    else:
        client.set_terminated(mlflow_run_id, status)
    return mlflow_run_id


def _send_figures(client: MlflowClient, mlflow_run_id: str, entry: Entry, record: Record) -> None:
    """Send the figures and scores of a run by their keys in `summary.json`, and the losses that the
    server lacks."""
    from mlflow.entities import Metric

    ends = [rank.ended_unix_seconds or 0.0 for rank in record.ranks]
    # The same time whenever the run is sent: MLflow keeps equal points once.
    ended_unix_milliseconds = int(max(ends, default=0.0) * 1_000)
    metrics = []
    numbers = _numbers({**vars(entry.figures), **entry.accuracy.to_json()})
    for key, value in numbers.items():
        metrics.append(Metric(key, value, ended_unix_milliseconds, record.steps))
    curves = {"train/loss": record.losses, "validation/loss": record.eval_losses}
    for curve, losses in curves.items():
        for point in _lacking_points(client, mlflow_run_id, curve, losses):
            metrics.append(Metric(curve, point.loss, ended_unix_milliseconds, point.step))
    _send_metrics(client, mlflow_run_id, metrics)


def _send_metrics(client: MlflowClient, mlflow_run_id: str, metrics: Sequence[Metric]) -> None:
    """Send figures, as many at once as a server takes."""
    for start in range(0, len(metrics), POINTS_AT_ONCE):
        batch = metrics[start : start + POINTS_AT_ONCE]
        client.log_batch(mlflow_run_id, metrics=batch)


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    """The values that are numbers, under names that MLflow takes; the others are left out."""
    numbers = {}
    for key, value in values.items():
        if isinstance(value, int | float):
            numbers[NOT_IN_NAMES.sub("_", key)] = float(value)
    return numbers


def _lacking_points(
    client: MlflowClient, mlflow_run_id: str, curve: str, losses: Sequence[Loss]
) -> list[Loss]:
    """The points of a loss curve that the server has not got, neither while the run trained nor
    later."""
    known_steps = {point.step for point in client.get_metric_history(mlflow_run_id, curve)}
    return [point for point in losses if point.step not in known_steps]
