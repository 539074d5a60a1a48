"""`zeropods launch`: a training script on pods, supervised and recorded."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.chatter import is_chatter
from zeropods.errors import INTERRUPTED, UserError
from zeropods.files import given_path
from zeropods.tables import digits, said_above, whole

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.launch.supervisor import Supervision
    from zeropods.pods.cluster import Cluster

LAUNCHERS = ("pdsh", "slurm", "none")
OF_SLURM = ("partition", "time_limit", "account", "cpus_per_slot", "sbatch_option")
OF_CLUSTER = ("hostfile", "ssh_config", "name")
MAIN_FIGURES = {
    "technique": "technique",
    "pods": "pods",
    "world_size": "processes",
    "device": "device",
    "train_seconds": "training (s)",
}
OF_DEEPSPEED = {
    "--num_nodes": "--num-pods",
    "--nnodes": "--num-pods",
    "--num_gpus": "--slots",
    "--nproc_per_node": "--slots",
}
"""Flags of DeepSpeed's launcher and of torchrun, and the flags here in their place."""
MEASURES = {"f1": "F1", "execution_accuracy": "execution", "logical_form_accuracy": "logical form"}
"""Measures of a score with their names; the first one that a score has is shown."""


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verb and its flags; `add(verbs, name, help, run)` makes the verb."""
    verb = add(verbs, "launch", "run a training script on pods, supervised and recorded", run)
    flag = verb.add_argument
    flag("--num-pods", type=whole, metavar="N", help="use the first N pods (default: all of them)")
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--name", help="the cluster (default: pods, or the only one)")
    where.add_argument("--hostfile", type=given_path, metavar="F", help="hosts of your own: pods are started there")
    flag("--ssh-config", type=given_path, metavar="C", help="ssh configuration for them (default: yours)")
    flag("--launcher", choices=LAUNCHERS, default="pdsh", help="none: here, without ssh")
    flag("--slots", type=whole, metavar="K", help="processes per pod (default: 1; none: GPUs)")
    job = verb.add_argument_group("--launcher slurm, a job of --num-pods nodes").add_argument
    job("--partition", metavar="P", help="partition of the job (default: SLURM's own)")
    job("--time-limit", metavar="T", help="as for sbatch (default: SLURM's own)")
    job("--account", metavar="A", help="account to charge (default: yours)")
    job("--cpus-per-slot", type=whole, metavar="N", help="CPU cores per process (default: 4)")
    job("--sbatch-option", action="append", metavar="OPTION", help="any other, as in --sbatch-option=--qos=high")
    flag("--export", action="append", default=[], metavar="VARIABLE", help="pass it on to the ranks; repeatable")
    flag("--timeout", type=float, metavar="SECONDS", help="end a run that takes longer (default: never)")
    flag("--step-timeout", type=float, metavar="SECONDS", help="per step; 0: never (default: from its steps)")
    flag("--restarts", type=int, metavar="N", help="after a lost pod or killed rank (default: 0)")
    flag("--min-pods", type=whole, metavar="M", help="start and restart on at least M pods (default: all, 1)")
    flag("--questions", type=whole, metavar="N", help="test questions to score it on (default: none)")
    flag("--dry-run", action="store_true", help="print what would be run")
    flag("command", nargs="+", metavar="SCRIPT", help="textsql_train.py or causal_train.py")
    verb.usage = "zeropods launch [FLAG ...] -- SCRIPT [ARGUMENT ...]"
    verb.hint = "; arguments of SCRIPT come after '--'"
    verb.foreign = OF_DEEPSPEED
    verb.set_defaults(readable=readable, status=exit_status)


def run(arguments: argparse.Namespace) -> Result:
    """Run the launch and return its record."""
    from zeropods.launch.command import check_inputs
    from zeropods.launch.supervisor import Supervision
    from zeropods.pods.hostfile import read_hostfile

    _check(arguments)
    supervision = Supervision(
        show=show,
        timeout_seconds=arguments.timeout,
        step_timeout=arguments.step_timeout,
        restarts=arguments.restarts or 0,
        min_pods=arguments.min_pods,
    )
    if arguments.hostfile is not None:
        read_hostfile(arguments.hostfile)  # A fault in it is reported before anything that the run would lack.
    check_inputs(arguments.command[0], arguments.command[1:])
    result = (_as_job if arguments.launcher == "slurm" else _launched)(arguments, supervision)
    if arguments.questions and result.get("status") == "ok":
        # Another process loads the model, since this one never loads torch.
        predict = ["predict", "--model", result["folder"], "--limit", str(arguments.questions), "--score", "--json"]
        argv = [sys.executable, "-m", "zeropods", *predict]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise UserError(f"{result['folder']}: trained but not scored; see the output of zeropods predict above")
        result["score"] = json.loads(done.stdout)["score"]
    return result


def show(line: str) -> None:
    """Show a line of the run's processes above the progress of its steps, unless it says nothing to a user."""
    if not is_chatter(line):
        said_above(line)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse flags that have no meaning, alone or together."""
    from zeropods.train.arguments import arguments_of

    launcher, pods, restarts, least = arguments.launcher, arguments.num_pods, arguments.restarts, arguments.min_pods
    for_slurm = next((name for name in OF_SLURM if getattr(arguments, name) is not None), "").replace("_", "-")
    is_elsewhere = any(getattr(arguments, name) is not None for name in OF_CLUSTER)
    questions, script, slots = arguments.questions, arguments.command[0], arguments.slots
    over_pods, is_job, is_alone = (launcher == each for each in LAUNCHERS)
    is_theirs = arguments_of(script) is None
    exported = ", ".join(arguments.export)
    faults = (
        (
            questions and is_theirs,
            f"--questions {questions}: {script} is not one of our scripts, so its runs cannot answer any; leave it out",
        ),
        (is_job and restarts is not None, f"--restarts {restarts}: SLURM requeues a job by itself; leave it out"),
        (not over_pods and least is not None, f"--min-pods {least}: is for --launcher pdsh; leave it out"),
        (restarts is not None and restarts < 0, f"--restarts {restarts}; expected at least 0"),
        (over_pods and slots is not None, f"--slots {slots}: pods have slots of their own; leave it out"),
        (not is_job and for_slurm, f"--{for_slurm}: is for --launcher slurm; leave it out"),
        (
            is_job and is_elsewhere,
            "--launcher slurm: it chooses the nodes; leave out --hostfile, --ssh-config and --name",
        ),
        (is_job and exported, f"--export {exported}: a SLURM job gets the whole environment; leave it out"),
        (
            is_alone and (is_elsewhere or (pods or 1) != 1),
            "--launcher none: uses this machine only; leave out --num-pods, --hostfile and --name",
        ),
    )
    for is_there, fault in faults:
        if is_there:
            raise UserError(fault)


def readable(result: Result) -> str:
    """The record's main figures; for a dry run, the exported variables and the command line."""
    if "exported" in result:
        from zeropods.launch.command import shell_line

        lines = [f"{name}={value}" for name, value in result["exported"].items()]
        return "\n".join([*lines, result.get("shell") or shell_line(result["argv"])])
    from zeropods.measure.record import closing_line, read_record
    from zeropods.train.arguments import arguments_of

    lines = []
    for key, name in MAIN_FIGURES.items():
        if (value := result.get(key)) is not None:
            lines.append(f"{name:24} {digits(value) if isinstance(value, float) else value}")
    known = ((name, result.get("score", {}).get(key)) for key, name in MEASURES.items())
    scored = next((f"{name} {value:.3f}" for name, value in known if value is not None), "")
    last, folder = f"run folder: {result['folder']}", Path(result["folder"])
    if result["status"] == "ok":
        is_other = arguments_of(Path(result["argv"][0]).name) is None
        last = closing_line(folder, read_record(folder), scored, ends_here=is_other)
    return "\n".join([*lines, last])


def exit_status(result: Result) -> int:
    """0 if the run ended well; otherwise 1, or `INTERRUPTED` for an interrupted run, with the reason on stderr."""
    if result.get("status", "ok") == "ok":
        return 0
    place = f"{result['pod']}: " if result.get("pod") else ""
    print(f"zeropods: {result['folder']}: {result['status']}: {place}{result['reason']}", file=sys.stderr)
    return INTERRUPTED if result["status"] == "interrupted" else 1


def _launched(arguments: argparse.Namespace, supervision: Supervision) -> Result:
    """Run on pods, or on this machine with a process for each of its slots."""
    from zeropods.launch import command
    from zeropods.launch.local import run_here
    from zeropods.launch.restart import check_restarts
    from zeropods.launch.supervisor import run_launch
    from zeropods.measure.record import read_record
    from zeropods.pods.gpus import check_gpus_for

    script, *flags = arguments.command
    with _cluster(arguments) if arguments.launcher == "pdsh" else nullcontext() as cluster:
        if cluster is not None:
            planned = command.plan_launch(cluster, script, flags, pods=arguments.num_pods, export=arguments.export)
            check_restarts(planned, supervision.restarts, supervision.min_pods)
            variables = command.launcher_variables(planned)
        else:
            command.exported_variables(arguments.export, {})  # Only a check: the ranks inherit them anyway.
            planned, variables = command.plan_alone(script, flags, arguments.slots), {}
            if supervision.restarts and command.flag_values(flags).get("resume") == "never":
                raise UserError("--resume never: would start over at each restart; leave out this or --restarts")
        argv = command.runner_argv(planned, Path() if cluster is None else cluster.hostfile)
        if arguments.dry_run:
            return {**planned.to_json(), "argv": argv, "shell": command.shell_line(argv, variables)}
        if cluster is not None:
            if cluster.hides_gpus:
                said_above(f"cluster {cluster.name}: its pods train without GPUs, as 'zeropods pods up' started them")
            record = run_launch(planned, cluster, supervision)
        else:
            check_gpus_for(planned.world_size)
            run_here(argv, planned.folder, arguments.timeout, arguments.step_timeout, supervision.restarts)
            record = read_record(planned.folder)
    return {**record.to_json(), "folder": str(planned.folder)}


def _as_job(arguments: argparse.Namespace, supervision: Supervision) -> Result:
    """Run as a job of SLURM."""
    from zeropods.launch.slurm import plan_slurm, run_slurm

    script, *flags = arguments.command
    given = {"time": arguments.time_limit, "account": arguments.account}
    submission = plan_slurm(
        script,
        flags,
        pods=arguments.num_pods or 1,
        slots=arguments.slots or 1,
        cpus_per_slot=arguments.cpus_per_slot or 4,
        partition=arguments.partition,
        options=(*(f"--{name}={v}" for name, v in given.items() if v is not None), *(arguments.sbatch_option or ())),
        needs_slurm=not arguments.dry_run,
    )
    if arguments.dry_run:
        return submission.to_json()
    return {**run_slurm(submission, supervision).to_json(), "folder": str(submission.launch.folder)}


@contextmanager
def _cluster(arguments: argparse.Namespace) -> Iterator[Cluster]:
    """The cluster that was named; on a user's own hosts without pods, some are started for this launch only."""
    from zeropods import pods
    from zeropods.pods.machine import name_of_process

    hostfile, ssh_config = arguments.hostfile, arguments.ssh_config
    if hostfile is None:
        if ssh_config:
            raise UserError(f"--ssh-config {ssh_config}: is for hosts of your own; give their --hostfile too")
        yield pods.find(arguments.name)
        return
    known = pods.known_cluster(hostfile)
    if known is not None:
        yield known
        return
    name = name_of_process("launch")
    cluster = pods.up(arguments.num_pods, hostfile=hostfile, ssh_config=ssh_config, name=name, lease="kernel")
    try:
        yield cluster
    finally:
        cluster.down()
