"""`zeropods launch`: a training script on pods, supervised and recorded."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.chatter import is_chatter
from zeropods.errors import INTERRUPTED, UserError
from zeropods.files import given_path
from zeropods.tables import digits, said_above, whole
from zeropods.tasks import judging_value

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.launch.script_call import ScriptCall
    from zeropods.launch.supervisor import Supervision
    from zeropods.pods.cluster import Cluster

LAUNCHERS = ("pdsh", "agents", "slurm", "none")
LAUNCHERS_ON_PODS = (None, "pdsh", "agents")
"""Values of --launcher with which the ranks run on the pods of a cluster; None if it is not
given."""
SLURM_FLAGS = ("partition", "time_limit", "account", "cpus_per_slot", "sbatch_option")
"""Flags of a job, by their names among the arguments."""
CLUSTER_FLAGS = ("hostfile", "ssh_config", "name")
"""Flags that say on which pods to run, by their names among the arguments."""
MAIN_FIGURES = {
    "technique": "technique",
    "pods": "pods",
    "world_size": "processes",
    "device": "device",
    "train_seconds": "training (s)",
}
"""The figures of a record that are printed, by key, and what people call them."""
DEEPSPEED_FLAGS = {
    "--num_nodes": "--num-pods",
    "--nnodes": "--num-pods",
    "--num_gpus": "--slots",
    "--nproc_per_node": "--slots",
}
"""Flags of DeepSpeed's launcher and of torchrun, and the flags here in their place."""


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verb and its flags; `add(verbs, name, help, run)` makes the verb."""
    verb = add(verbs, "launch", "run a training script on pods, supervised and recorded", run)
    flag = verb.add_argument
    flag("--num-pods", type=whole, metavar="N", help="use the first N pods (default: all of them)")
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--name", help="the cluster (default: pods, or the only one)")
    hostfile_help = "hosts of your own: pods are started there"
    where.add_argument("--hostfile", type=given_path, metavar="F", help=hostfile_help)
    ssh_help = "ssh configuration for them (default: yours)"
    flag("--ssh-config", type=given_path, metavar="C", help=ssh_help)
    launcher_help = "agents: without ssh; none: here (default: pdsh, else agents)"
    flag("--launcher", choices=LAUNCHERS, help=launcher_help)
    flag("--slots", type=whole, metavar="K", help="processes per pod (default: 1; none: GPUs)")
    _add_slurm_flags(verb)
    export_help = "pass it on to the ranks; repeatable"
    flag("--export", action="append", default=[], metavar="VARIABLE", help=export_help)
    batch_help = "per step of all processes; sets the passes"
    flag("--global-batch", type=whole, metavar="ROWS", help=batch_help)
    timeout_help = "end a run that takes longer (default: never)"
    flag("--timeout", type=float, metavar="SECONDS", help=timeout_help)
    step_help = "per step; 0: never (default: from its steps)"
    flag("--step-timeout", type=float, metavar="SECONDS", help=step_help)
    flag("--restarts", type=int, metavar="N", help="after a lost pod or killed rank (default: 0)")
    replace_help = "for a restart, start a new CML worker for a lost one, once"
    flag("--replace", action="store_true", help=replace_help)
    pods_help = "start and restart on at least M pods (default: all, 1)"
    flag("--min-pods", type=whole, metavar="M", help=pods_help)
    questions_help = "test questions to score it on (default: none)"
    flag("--questions", type=whole, metavar="N", help=questions_help)
    flag("--dry-run", action="store_true", help="print what would be run")
    flag("command", nargs="+", metavar="SCRIPT", help="textsql_train.py or causal_train.py")
    verb.usage = "zeropods launch [FLAG ...] -- SCRIPT [ARGUMENT ...]"
    verb.hint = "; arguments of SCRIPT come after '--'"
    verb.foreign = DEEPSPEED_FLAGS
    verb.set_defaults(readable=readable, status=exit_status)


def _add_slurm_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags of a job."""
    job = verb.add_argument_group("--launcher slurm, a job of --num-pods nodes")
    flag = job.add_argument
    flag("--partition", metavar="P", help="partition of the job (default: SLURM's own)")
    flag("--time-limit", metavar="T", help="as for sbatch (default: SLURM's own)")
    flag("--account", metavar="A", help="account to charge (default: yours)")
    flag("--cpus-per-slot", type=whole, metavar="N", help="CPU cores per process (default: 4)")
    option_help = "any other, as in --sbatch-option=--qos=high"
    flag("--sbatch-option", action="append", metavar="OPTION", help=option_help)


def run(arguments: argparse.Namespace) -> Result:
    """Run the launch and return its record, with the score if questions are asked; for a dry run,
    what would be run."""
    from zeropods.launch.command import check_inputs
    from zeropods.launch.script_call import ScriptCall
    from zeropods.launch.supervisor import Supervision
    from zeropods.pods.hostfile import read_hostfile

    _check(arguments)
    supervision = Supervision(
        show=show,
        timeout_seconds=arguments.timeout,
        step_timeout=arguments.step_timeout,
        restarts=arguments.restarts or 0,
        min_pods=arguments.min_pods,
        replace_lost=arguments.replace,
    )
    if arguments.hostfile is not None:
        # A fault in it is reported before anything that the run would lack.
        read_hostfile(arguments.hostfile)
    script, *words = arguments.command
    call = ScriptCall.of(script, words)
    check_inputs(call)
    if arguments.launcher == "slurm":
        result = _as_job(arguments, call, supervision)
    elif arguments.launcher in LAUNCHERS_ON_PODS:
        result = _on_pods(arguments, call, supervision)
    else:
        result = _on_this_machine(arguments, call, supervision)
    if arguments.questions and result.get("status") == "ok":
        result["score"] = _score(result["folder"], arguments.questions)
    return result


def _score(folder: str, questions: int) -> Result:
    """Let a run's model answer this number of questions, and return the score; `UserError` if that
    fails."""
    # Another process loads the model, since this one never loads torch.
    argv = [sys.executable, "-m", "zeropods", "predict", "--model", folder]
    argv += ["--limit", str(questions), "--score", "--json"]
    process = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode != 0:
        raise UserError(
            f"{folder}: trained but not scored; see the output of zeropods predict above"
        )
    return json.loads(process.stdout)["score"]


def show(line: str) -> None:
    """Show a line of the run's processes above the progress of its steps, unless it says nothing to
    a user."""
    if not is_chatter(line):
        said_above(line)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse flags that have no meaning, alone or together."""
    fault = next(_faults(arguments), None)
    if fault is not None:
        raise UserError(fault)


def _faults(arguments: argparse.Namespace) -> Iterator[str]:
    """What is wrong with the flags; the first fault is reported."""
    from zeropods.train.flags import arguments_of

    launcher = arguments.launcher
    questions = arguments.questions
    script = arguments.command[0]
    if questions and arguments_of(script) is None:
        reason = f"{script} is not one of our scripts, so its runs cannot answer any"
        yield f"--questions {questions}: {reason}; leave it out"

    yield from _restart_faults(arguments)

    slots = arguments.slots
    if launcher in LAUNCHERS_ON_PODS and slots is not None:
        yield f"--slots {slots}: pods have slots of their own; leave it out"

    yield from _slurm_faults(arguments)

    names_pods = _names_hosts(arguments) or arguments.num_pods not in (None, 1)
    if launcher == "none" and names_pods:
        remedy = "leave out --num-pods, --hostfile and --name"
        yield f"--launcher none: uses this machine only; {remedy}"


def _restart_faults(arguments: argparse.Namespace) -> Iterator[str]:
    """What is wrong with the flags about restarts and lost pods."""
    restarts = arguments.restarts
    min_pods = arguments.min_pods
    if arguments.launcher == "slurm" and restarts is not None:
        yield f"--restarts {restarts}: SLURM requeues a job by itself; leave it out"
    if arguments.launcher not in LAUNCHERS_ON_PODS and min_pods is not None:
        yield f"--min-pods {min_pods}: is for --launcher pdsh or agents; leave it out"
    if restarts is not None and restarts < 0:
        yield f"--restarts {restarts}; expected at least 0"
    if arguments.replace and arguments.launcher in ("slurm", "none"):
        yield "--replace: is for CML workers; leave it out"
    if arguments.replace and not restarts:
        yield "--replace: a new worker is started for a restart; give --restarts too"


def _slurm_faults(arguments: argparse.Namespace) -> Iterator[str]:
    """What is wrong with a job's flags; without `--launcher slurm`, that there are any."""
    if arguments.launcher != "slurm":
        for name in SLURM_FLAGS:
            if getattr(arguments, name) is not None:
                flag = name.replace("_", "-")
                yield f"--{flag}: is for --launcher slurm; leave it out"
        return
    if _names_hosts(arguments):
        remedy = "leave out --hostfile, --ssh-config and --name"
        yield f"--launcher slurm: it chooses the nodes; {remedy}"
    exported = ", ".join(arguments.export)
    if exported:
        yield f"--export {exported}: a SLURM job gets the whole environment; leave it out"


def _names_hosts(arguments: argparse.Namespace) -> bool:
    """Whether a flag says on which pods to run."""
    return any(getattr(arguments, name) is not None for name in CLUSTER_FLAGS)


def readable(result: Result) -> str:
    """The record's main figures; for a dry run, the exported variables and the command line."""
    is_dry_run = "exported" in result
    if is_dry_run:
        return _dry_run_text(result)
    from zeropods.measure.record import closing_line, read_record
    from zeropods.train.flags import arguments_of

    lines = []
    for key, name in MAIN_FIGURES.items():
        value = result.get(key)
        if isinstance(value, float):
            lines.append(f"{name:24} {digits(value)}")
        elif value is not None:
            lines.append(f"{name:24} {value}")
    folder = Path(result["folder"])
    if result["status"] == "ok":
        record = read_record(folder)
        score = _score_text(result.get("score", {}))
        is_other_script = arguments_of(Path(result["argv"][0]).name) is None
        lines.append(closing_line(folder, record, score, ends_here=is_other_script))
    else:
        lines.append(f"run folder: {result['folder']}")
    return "\n".join(lines)


def _dry_run_text(result: Result) -> str:
    """The exported variables, and the command line to be pasted into a shell."""
    from zeropods.launch.command import shell_line

    lines = [f"{name}={value}" for name, value in result["exported"].items()]
    lines.append(result.get("shell") or shell_line(result["argv"]))
    return "\n".join(lines)


def _score_text(score: Result) -> str:
    """The measure that a run is judged by, with its name; empty if the score has none."""
    judging = judging_value(score)
    if judging is None:
        return ""
    measure, value = judging
    return f"{measure.name} {measure.text(value)}"


def exit_status(result: Result) -> int:
    """0 if the run ended well; otherwise 1, or `INTERRUPTED` for an interrupted run, with the
    reason on stderr."""
    if result.get("status", "ok") == "ok":
        return 0
    place = f"{result['pod']}: " if result.get("pod") else ""
    reason = f"{result['status']}: {place}{result['reason']}"
    print(f"zeropods: {result['folder']}: {reason}", file=sys.stderr)
    return INTERRUPTED if result["status"] == "interrupted" else 1


def _on_pods(arguments: argparse.Namespace, call: ScriptCall, supervision: Supervision) -> Result:
    """Run on the pods of a cluster and return the record; for a dry run, what would be run."""
    from zeropods.launch import command
    from zeropods.launch.restart import check_restarts
    from zeropods.launch.supervisor import run_launch

    with _cluster(arguments) as cluster:
        planned = command.plan_launch(
            cluster,
            call,
            pods=arguments.num_pods,
            export=arguments.export,
            launcher=arguments.launcher,
            global_batch=arguments.global_batch,
        )
        check_restarts(planned, supervision.restarts, supervision.min_pods)
        if arguments.dry_run:
            argv = command.runner_argv(planned, cluster.hostfile)
            shell = command.launch_line(planned, cluster, cluster.hostfile)
            return {**planned.to_json(), "argv": argv, "shell": shell}
        if arguments.launcher is None and planned.launcher == command.AGENTS:
            reason = f"{cluster.why_not_pdsh()}, so the pods' agents start the ranks"
            said_above(f"cluster {cluster.name}: {reason}")
        if cluster.hides_gpus:
            reason = "its pods train without GPUs, as 'zeropods pods up' started them"
            said_above(f"cluster {cluster.name}: {reason}")
        record = run_launch(planned, cluster, supervision)
    return {**record.to_json(), "folder": str(planned.folder)}


def _on_this_machine(
    arguments: argparse.Namespace, call: ScriptCall, supervision: Supervision
) -> Result:
    """Run with a process for each slot of this machine and return the record; for a dry run, what
    would be run."""
    from zeropods.launch import command
    from zeropods.launch.local import run_here
    from zeropods.measure.record import read_record
    from zeropods.pods.gpus import check_gpus_for

    # The ranks inherit all variables of this process, so the names are only checked.
    command.check_exported_names(arguments.export)
    planned = command.plan_alone(call, arguments.slots, arguments.global_batch)
    resume = call.flag_texts.get("resume", "auto")
    if supervision.restarts and resume != "auto":
        reason = "would lose at each restart what was done; leave out this or --restarts"
        raise UserError(f"--resume {resume}: {reason}")
    argv = command.runner_argv(planned, Path())
    if arguments.dry_run:
        return {**planned.to_json(), "argv": argv, "shell": command.shell_line(argv)}
    check_gpus_for(planned.world_size)
    run_here(argv, planned.folder, arguments.timeout, arguments.step_timeout, supervision.restarts)
    record = read_record(planned.folder)
    return {**record.to_json(), "folder": str(planned.folder)}


def _as_job(arguments: argparse.Namespace, call: ScriptCall, supervision: Supervision) -> Result:
    """Run as a job of SLURM and return the record; for a dry run, what would be submitted."""
    from zeropods.launch.slurm import plan_slurm, run_slurm

    options = []
    if arguments.time_limit is not None:
        options.append(f"--time={arguments.time_limit}")
    if arguments.account is not None:
        options.append(f"--account={arguments.account}")
    options += arguments.sbatch_option or ()
    submission = plan_slurm(
        call,
        pods=arguments.num_pods or 1,
        slots=arguments.slots or 1,
        cpus_per_slot=arguments.cpus_per_slot or 4,
        partition=arguments.partition,
        options=tuple(options),
        needs_slurm=not arguments.dry_run,
        global_batch=arguments.global_batch,
    )
    if arguments.dry_run:
        return submission.to_json()
    record = run_slurm(submission, supervision)
    return {**record.to_json(), "folder": str(submission.launch.folder)}


@contextmanager
def _cluster(arguments: argparse.Namespace) -> Iterator[Cluster]:
    """The cluster that was named, or that is up on the hosts of the hostfile. Where none is up
    there, pods are started for the block only."""
    from zeropods import pods
    from zeropods.pods.machine import name_of_process

    hostfile = arguments.hostfile
    ssh_config = arguments.ssh_config
    if hostfile is None:
        if ssh_config:
            remedy = "give their --hostfile too"
            raise UserError(f"--ssh-config {ssh_config}: is for hosts of your own; {remedy}")
        yield pods.find(arguments.name)
        return
    running = pods.known_cluster(hostfile)
    if running is not None:
        yield running
        return
    cluster = pods.up(
        arguments.num_pods,
        hostfile=hostfile,
        ssh_config=ssh_config,
        name=name_of_process("launch"),
        lease="kernel",
    )
    try:
        yield cluster
    finally:
        cluster.down()
