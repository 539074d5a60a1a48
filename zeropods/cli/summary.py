"""`zeropods summary`: runs side by side, and a gate that says what got worse."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.files import given_path
from zeropods.measure.mlflow_runs import MLFLOW, check_server
from zeropods.measure.record import LOCK, RECORD
from zeropods.outputs import out_folder
from zeropods.tables import counted, not_negative, wrapped

if TYPE_CHECKING:
    from zeropods.cli import Result

SUMMARY_FOLDER = "summary"


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verb and its flags; `add(verbs, name, help, run)` makes the verb."""
    verb = add(verbs, "summary", "runs side by side: tables, plots, HTML", run)
    flag = verb.add_argument
    runs_help = "run folders (default: all below runs/)"
    flag("runs", type=given_path, nargs="*", metavar="RUN", help=runs_help)
    out_help = "where the report is written (default: summary, in the folder of the runs)"
    flag("--out", type=out_folder, metavar="DIR", help=out_help)
    against_help = "an earlier summary.json: status 1 if a row got worse"
    flag("--against", type=given_path, metavar="OLD.json", help=against_help)
    price_help = "of a pod, in any currency (default: none)"
    flag("--price-per-hour", type=not_negative, metavar="P", help=price_help)
    differences_help = "ratios also between rows with other differences, marked"
    flag("--allow-differences", action="store_true", help=differences_help)
    report_help = "mlflow: send the runs and the report there too"
    flag("--report-to", choices=[MLFLOW], help=report_help)
    verb.set_defaults(status=exit_status)


def run(arguments: argparse.Namespace) -> Result:
    """Write the report, and send it to MLflow if asked; return what `summary.json` holds, and what
    the gate found."""
    from zeropods.report.gate import compare, read_rows
    from zeropods.report.summary import read_runs
    from zeropods.report.to_mlflow import Sent, send_summary

    # All records stay in memory to the end. The garbage collector would walk through them again and
    # again, and once more when the process ends.
    gc.set_threshold(1_000_000)
    atexit.register(gc.freeze)
    runs = arguments.runs or [Path("runs")]
    for path in runs:
        if path.is_file():
            raise UserError(f"{path}: a file; name run folders, or a folder that contains some")
    if arguments.out is None:
        arguments.out = out_folder(str(usual_out(runs)))
    if is_run(arguments.out):
        raise UserError(f"--out {arguments.out}: is a run folder; choose another")
    if arguments.report_to is not None:
        check_server(f"--report-to {arguments.report_to}")
    # The old summary is read before anything is written: it may lie where the new one goes.
    old = None if arguments.against is None else read_rows(arguments.against)
    summary = read_runs(
        runs,
        price_per_hour=arguments.price_per_hour,
        allow_differences=arguments.allow_differences,
    )
    document = summary.write(arguments.out)
    sent: Sent | None = None
    if arguments.report_to is not None:
        sent = send_summary(summary, arguments.out)
    verdict = None if old is None else compare(old, document["groups"])

    def readable(result: Result) -> str:
        """The tables, what the gate found, where the page is, and last the conclusions."""
        text = wrapped(summary.to_text(), "  ")
        if verdict is not None:
            text += f"\n{verdict}"
        text += f"\nreport: {arguments.out / 'index.html'}"
        if sent is not None:
            text += f"\nMLflow: {counted(sent.runs, 'run')} and the report, "
            text += f"in experiment {sent.experiment} at {sent.address}"
        conclusions = wrapped(repr(summary.answers()))
        return f"{text}\n\n{conclusions}"

    arguments.readable = readable
    against = None if verdict is None else asdict(verdict)
    result = {"out": str(arguments.out), **document, "against": against}
    if sent is not None:
        result["mlflow"] = asdict(sent)
    return result


def usual_out(runs: Sequence[Path]) -> Path:
    """The folder of the report where `--out` names none: `summary` in the folder that was named or,
    if this is a run itself or several were named, in the nearest folder above all of them."""
    if len(runs) == 1 and not is_run(runs[0]):
        return runs[0] / SUMMARY_FOLDER
    above = os.path.commonpath([run.absolute().parent for run in runs])
    return Path(above) / SUMMARY_FOLDER


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return any((folder / name).exists() for name in (RECORD, LOCK))


def exit_status(result: Result) -> int:
    """1 if a row got worse or no run could be read, else 0; why no run could be read is printed on
    stderr."""
    is_worse = result["against"] is not None and result["against"]["worse"]
    is_broken = all(run["status"] == "broken" for run in result["runs"])
    if is_broken:
        first = result["runs"][0]
        message = f"{first['run']}: {first['reason']}; no run could be read"
        print(f"zeropods: {message}", file=sys.stderr)
    return 1 if is_worse or is_broken else 0
