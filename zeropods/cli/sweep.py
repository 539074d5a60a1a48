"""`zeropods sweep`: do every run of a matrix, and report the outcome of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods import pods
from zeropods.errors import UserError
from zeropods.files import given_path, no_file
from zeropods.outputs import out_folder

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.pods.cluster import Cluster
    from zeropods.sweep.matrix import Matrix


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verb and its flags; `add(verbs, name, help, run)` makes the verb."""
    sweep_help = "run a matrix of models, techniques, pods and prompts, with repeats"
    verb = add(verbs, "sweep", sweep_help, run)
    flag = verb.add_argument
    matrix_help = "what to run, such as matrices/demo.yaml"
    flag("matrix", type=given_path, metavar="MATRIX.yaml", help=matrix_help)
    out_help = "folder of the runs (default: runs/NAME of the file)"
    flag("--out", type=out_folder, metavar="DIR", help=out_help)
    flag("--scale", choices=("tiny",), help="a trial of the same cells in minutes, on any machine")
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--name", help="a cluster that is up (default: pods of the sweep's own)")
    hostfile_help = "hosts of your own for the pods"
    where.add_argument("--hostfile", type=given_path, metavar="F", help=hostfile_help)
    flag("--again", action="store_true", help="run again what failed or ran out of memory or time")
    flag("--dry-run", action="store_true", help="print the commands of the runs in their order")
    verb.set_defaults(readable=dry_run_text)


def run(arguments: argparse.Namespace) -> Result:
    """Run the matrix and return all of its results; with `--dry-run`, the runs that it would
    start."""
    from zeropods.sweep.matrix import at_tiny_scale, read_matrix
    from zeropods.sweep.results import SWEEP_FILE
    from zeropods.sweep.run import run_sweep

    matrix = read_matrix(arguments.matrix)
    name = arguments.matrix.stem
    if arguments.scale:
        matrix = at_tiny_scale(matrix, str(arguments.matrix))
        name = f"{name}-{arguments.scale}"
    out = (arguments.out or Path("runs") / name).resolve()
    if arguments.dry_run:
        return _planned_runs(matrix, out)
    cluster = _cluster(arguments)
    hostfile = arguments.hostfile
    sweep = run_sweep(matrix, out, cluster, hostfile=hostfile, again=arguments.again)
    arguments.readable = lambda result: f"{sweep.table()}\nsweep: {out / SWEEP_FILE}"
    arguments.status = lambda result: 0 if sweep.is_measured else 1
    return {"out": str(out), **sweep.to_json()}


def _planned_runs(matrix: Matrix, out: Path) -> Result:
    """The runs that would be started, once everything that can be checked has been checked."""
    from zeropods.sweep.run import check_trials, provide_datasets, trials

    planned = trials(matrix, out)
    check_trials(planned)
    provide_datasets(matrix, out, dry=True)
    runs = []
    for trial in planned:
        run = {
            "cell": trial.cell.name,
            "repeat": trial.repeat,
            "folder": str(trial.launch.folder),
            "command": trial.command,
        }
        runs.append(run)
    return {"out": str(out), "runs": runs, "left_out": matrix.left_out}


def _cluster(arguments: argparse.Namespace) -> Cluster | None:
    """The cluster that was named, or that is up on the hosts of the hostfile; None where the sweep
    is to start pods of its own."""
    hostfile = arguments.hostfile
    if hostfile is not None:
        if not hostfile.is_file():
            reason = no_file(hostfile)
            raise UserError(f"--hostfile {hostfile}: {reason}; zeropods pods up writes one")
        return pods.known_cluster(hostfile)
    if arguments.name is not None:
        return pods.find(arguments.name)
    return None


def dry_run_text(result: Result) -> str:
    """A line for each run that would be started, and for each combination that is not possible."""
    lines = [run["command"] for run in result["runs"]]
    for impossible in result["left_out"]:
        lines.append(f"# left out: {impossible['cell']}: {impossible['reason']}")
    return "\n".join(lines)
