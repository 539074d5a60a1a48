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


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verb and its flags; `add(verbs, name, help, run)` makes the verb."""
    verb = add(verbs, "sweep", "run a matrix of models, techniques, pods and prompts, with repeats", run)
    flag = verb.add_argument
    flag("matrix", type=given_path, metavar="MATRIX.yaml", help="what to run, such as matrices/demo.yaml")
    flag("--out", type=out_folder, metavar="DIR", help="folder of the runs (default: runs/NAME of the file)")
    flag("--scale", choices=("tiny",), help="a trial of the same cells in minutes, on any machine")
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--name", help="a cluster that is up (default: pods of the sweep's own)")
    where.add_argument("--hostfile", type=given_path, metavar="F", help="hosts of your own for the pods")
    flag("--again", action="store_true", help="run again what failed or ran out of memory or time")
    flag("--dry-run", action="store_true", help="print the commands of the runs in their order")
    verb.set_defaults(readable=dry_run_text)


def run(arguments: argparse.Namespace) -> Result:
    """Run the matrix and return all of its results."""
    from zeropods.sweep.matrix import at_tiny_scale, read_matrix
    from zeropods.sweep.results import FILE
    from zeropods.sweep.run import check_trials, provide_datasets, run_sweep, trials

    matrix, name = read_matrix(arguments.matrix), arguments.matrix.stem
    if arguments.scale:
        matrix, name = at_tiny_scale(matrix, str(arguments.matrix)), f"{name}-{arguments.scale}"
    out = (arguments.out or Path("runs") / name).resolve()
    if arguments.dry_run:
        planned = trials(matrix, out)
        check_trials(planned)
        provide_datasets(matrix, out, dry=True)
        runs = [
            {"cell": each.cell.name, "repeat": each.repeat, "folder": str(each.launch.folder), "command": each.command}
            for each in planned
        ]
        return {"out": str(out), "runs": runs, "left_out": matrix.left_out}
    hostfile, cluster = arguments.hostfile, None
    if hostfile is not None and not hostfile.is_file():
        raise UserError(f"--hostfile {hostfile}: {no_file(hostfile)}; zeropods pods up writes one")
    if hostfile is not None or arguments.name is not None:
        # If no cluster is up on the hosts of a hostfile, the sweep starts pods of its own there.
        cluster = pods.find(arguments.name) if hostfile is None else pods.known_cluster(hostfile)
    sweep = run_sweep(matrix, out, cluster, hostfile=hostfile, again=arguments.again)
    arguments.readable = lambda result: f"{sweep.table()}\nsweep: {out / FILE}"
    arguments.status = lambda result: int(not sweep.is_measured)
    return {"out": str(out), **sweep.to_json()}


def dry_run_text(result: Result) -> str:
    """A line for each run that would be started, and for each combination that is not possible."""
    left_out = [f"# left out: {left['cell']}: {left['reason']}" for left in result["left_out"]]
    return "\n".join([*(run["command"] for run in result["runs"]), *left_out])
