"""`zeropods launch`: a training script on pods, supervised and recorded."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch.command import LAUNCHERS, Launch

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

Result = dict[str, Any]
OF_SLURM = ("slots", "partition", "time_limit", "account", "cpus_per_slot", "sbatch_option")
INTERRUPTED = 130
"""As a shell has it of a command that Ctrl-C has ended."""


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verb and its flags; `add(verbs, name, help, run)` makes it."""
    verb = add(verbs, "launch", "run a training script on pods, supervised and recorded", run)
    verb.add_argument("--num-pods", type=int, metavar="N", help="on the first N pods; all of them if not given")
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--name", help="the cluster, where several are up")
    where.add_argument("--hostfile", type=Path, metavar="F", help="hosts of your own: pods are started there first")
    verb.add_argument(
        "--ssh-config", type=Path, metavar="C", help="by which ssh reaches them; your usual one if not given"
    )
    verb.add_argument("--launcher", choices=LAUNCHERS, default="pdsh", help="none: this machine alone, without ssh")
    _add_slurm(verb)
    verb.add_argument(
        "--export", action="append", default=[], metavar="VARIABLE", help="the ranks need it as it is here"
    )
    verb.add_argument("--timeout", type=float, metavar="SECONDS", help="end a run that takes longer")
    verb.add_argument(
        "--step-timeout", type=float, metavar="SECONDS", help="end a run that does no step for so long; 0: never"
    )
    verb.add_argument(
        "--restarts", type=int, metavar="N", help="go on so often by itself, after a lost pod or a killed rank; 0"
    )
    verb.add_argument("--min-pods", type=int, metavar="M", help="with at least M of the pods; 1")
    verb.add_argument("--dry-run", action="store_true", help="print what would be run")
    verb.add_argument("command", nargs="+", metavar="-- SCRIPT ARGUMENT", help="textsql_train.py and its flags")
    verb.set_defaults(readable=readable, status=exit_status)


def _add_slurm(verb: argparse.ArgumentParser) -> None:
    job = verb.add_argument_group("--launcher slurm: a job of --num-pods nodes")
    job.add_argument("--slots", type=int, metavar="K", help="processes a node, each with a GPU where there are any; 1")
    job.add_argument("--partition", metavar="P", help="SLURM's own choice if not given")
    job.add_argument("--time-limit", metavar="T", help="as sbatch --time takes it; the run saves and requeues itself")
    job.add_argument("--account", metavar="A", help="whom the job is charged to")
    job.add_argument("--cpus-per-slot", type=int, metavar="N", help="CPU cores of each process; 4")
    job.add_argument("--sbatch-option", action="append", metavar="OPTION", help="another: --sbatch-option=--qos=high")


def run(arguments: argparse.Namespace) -> Result:
    """Run the launch and return its record."""
    from zeropods.launch.child import check_timeout
    from zeropods.launch.hangs import check_step_timeout

    if arguments.num_pods is not None and arguments.num_pods < 1:
        raise UserError(f"--num-pods {arguments.num_pods}; expected at least 1")
    check_timeout(arguments.timeout)
    check_step_timeout(arguments.step_timeout)
    _check_restarts(arguments)
    if arguments.launcher == "slurm":
        return _as_job(arguments)
    for name in OF_SLURM:
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: is for --launcher slurm; leave it out")
    if arguments.launcher == "none":
        return _alone(arguments)
    with _cluster(arguments) as cluster:
        return _over_pods(arguments, cluster)


def _check_restarts(arguments: argparse.Namespace) -> None:
    if arguments.launcher == "slurm" and arguments.restarts is not None:
        raise UserError(f"--restarts {arguments.restarts}: SLURM requeues a job by itself; leave it out")
    if arguments.launcher != "pdsh" and arguments.min_pods is not None:
        raise UserError(f"--min-pods {arguments.min_pods}: is for --launcher pdsh; leave it out")
    if arguments.min_pods is not None and not arguments.restarts:
        raise UserError(f"--min-pods {arguments.min_pods}: says how a run goes on; give --restarts too")
    if arguments.restarts is not None and arguments.restarts < 0:
        raise UserError(f"--restarts {arguments.restarts}; expected at least 0")


def readable(result: Result) -> str:
    """The record's main figures; of a dry run all of it."""
    if "exported" in result:
        lines = [f"{name}={value}" for name, value in result["exported"].items()]
        return "\n".join([*lines, " ".join(result["argv"])])
    keys = ("status", "technique", "pods", "world_size", "steps", "train_seconds", "samples_per_second")
    return "\n".join(f"{key:24} {_shown(result.get(key))}" for key in keys) + f"\n{'run folder':24} {result['folder']}"


def exit_status(result: Result) -> int:
    """0 where the run ended well; else why not, in a line on stderr, and 1."""
    if result.get("status", "ok") == "ok":
        return 0
    place = f"{result['pod']}: " if result.get("pod") else ""
    print(f"zeropods: {result['folder']}: {result['status']}: {place}{result['reason']}", file=sys.stderr)
    return INTERRUPTED if result["status"] == "interrupted" else 1


def _over_pods(arguments: argparse.Namespace, cluster: Any) -> Result:
    from zeropods.launch.planning import plan_launch
    from zeropods.launch.restart import Restarts, run_restarting

    script, *script_arguments = arguments.command
    planned = plan_launch(cluster, script, script_arguments, pods=arguments.num_pods, export=arguments.export)
    restarts = Restarts(most=arguments.restarts or 0, min_pods=1 if arguments.min_pods is None else arguments.min_pods)
    restarts.check(planned)
    if arguments.dry_run:
        return _dry(planned)
    record = run_restarting(
        planned,
        cluster,
        restarts,
        export=arguments.export,
        show=_show,
        timeout_seconds=arguments.timeout,
        step_timeout=arguments.step_timeout,
    )
    return {**record.to_json(), "folder": str(planned.folder)}


def _alone(arguments: argparse.Namespace) -> Result:
    """Run on this machine, a process for each of its slots."""
    from zeropods.launch.command import flag_values, runner_argv
    from zeropods.launch.local import run_here
    from zeropods.launch.planning import plan_alone

    if arguments.hostfile or arguments.ssh_config or arguments.name or (arguments.num_pods or 1) != 1:
        raise UserError("--launcher none: this machine alone; leave out --num-pods, --hostfile and --name")
    planned = plan_alone(arguments.command[0], arguments.command[1:])
    if arguments.restarts and flag_values(planned.arguments).get("resume") == "never":
        raise UserError("--resume never: would begin anew after each of --restarts; leave one of them out")
    if arguments.dry_run:
        return _dry(planned)
    run = run_here(
        runner_argv(planned, Path()), planned.folder, arguments.timeout, arguments.step_timeout, arguments.restarts or 0
    )
    return {**run.record.to_json(), "folder": str(planned.folder)}


def _as_job(arguments: argparse.Namespace) -> Result:
    """Run as a job of SLURM."""
    from zeropods.launch.slurm import plan_slurm, run_slurm

    if arguments.hostfile or arguments.ssh_config or arguments.name:
        raise UserError("--launcher slurm: it chooses the nodes; leave out --hostfile, --ssh-config and --name")
    if arguments.export:
        raise UserError(f"--export {arguments.export[0]}: a SLURM job gets the whole environment; leave it out")
    script, *script_arguments = arguments.command
    asked = {name: getattr(arguments, name) for name in ("partition", "time_limit", "account")}
    if arguments.dry_run and not _slurm_answers():
        # A job can be written where there is no SLURM.
        asked["has_gpus"] = True
    if arguments.cpus_per_slot is not None:
        asked["cpus_per_slot"] = arguments.cpus_per_slot
    submission = plan_slurm(
        script, script_arguments, pods=arguments.num_pods or 1, slots=1 if arguments.slots is None else arguments.slots,
        options=tuple(arguments.sbatch_option or ()), **asked,
    )  # fmt: skip
    if arguments.dry_run:
        return submission.to_json()
    record = run_slurm(submission, show=_show, timeout_seconds=arguments.timeout, step_timeout=arguments.step_timeout)
    return {**record.to_json(), "folder": str(submission.launch.folder)}


def _slurm_answers() -> bool:
    from zeropods.launch.slurm_job import SlurmError, offer

    try:
        offer(None)
    except SlurmError:
        return False
    return True


def _dry(planned: Launch) -> Result:
    from zeropods.launch.command import runner_argv

    return {**planned.to_json(), "argv": runner_argv(planned, Path("HOSTFILE"))}


@contextmanager
def _cluster(arguments: argparse.Namespace) -> Iterator[Cluster]:
    """The cluster that was named; pods on hosts of the user's own live for this launch only, if none are there."""
    from zeropods import pods

    if arguments.hostfile is None:
        if arguments.ssh_config:
            raise UserError(f"--ssh-config {arguments.ssh_config}: is for hosts of your own; give their --hostfile too")
        yield pods.find(arguments.name)
        return
    known = known_cluster(arguments.hostfile)
    if known is not None:
        yield known
        return
    cluster = pods.up(
        arguments.num_pods,
        hostfile=arguments.hostfile,
        ssh_config=arguments.ssh_config,
        name=f"launch-{os.getpid()}",
        lease="kernel",
    )
    try:
        yield cluster
    finally:
        cluster.down()


def known_cluster(hostfile: Path) -> Cluster | None:
    """A cluster whose own hostfile this is, or one that was brought up on these hosts and is not another launch's."""
    from zeropods import pods
    from zeropods.pods.hostfile import read_hostfile

    lines = tuple(host.line() for host in read_hostfile(hostfile))
    for cluster in pods.clusters():
        if cluster.hostfile.resolve() == hostfile.resolve():
            return cluster
        is_theirs = cluster.settings.hosts == lines and cluster.settings.lease == "idle"
        if is_theirs and cluster.is_ready():
            return cluster
    return None


def _show(line: str) -> None:
    """A line of the ranks above the progress bar; stdout is the result's."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
