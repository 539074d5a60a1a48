"""`zeropods pods up|check|list|down`: pods from the shell."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.files import given_path
from zeropods.pods.backends import BACKEND_NAMES

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.pods.cluster import Cluster

UP_FLAGS = (
    "count",
    "hostfile",
    "ssh_config",
    "slots",
    "backend",
    "name",
    "port",
    "seconds",
    "cpu",
    "memory",
    "nvidia_gpu",
    "accelerator_label",
    "resource_profile",
    "replace_lost",
)
"""Flags of `pods up` that are passed on as arguments of `pods.up`."""
HOSTFILE_HELP = "hosts of your own, as your ssh reaches them"
SSH_CONFIG_HELP = "ssh configuration for hosts of your own (default: your usual one)"
NAME_HELP = "the cluster (default: pods, or the only one)"


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one verb."""
    parser = verbs.add_parser("pods", help="worker pods")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    _add_up(kinds, add)
    _add_check(kinds, add)
    list_verb = add(kinds, "list", "clusters and the state of their pods", run_list)
    list_verb.set_defaults(readable=readable_list)
    _add_down(kinds, add)


def _add_up(kinds: Any, add: Callable[..., Any]) -> None:
    verb = add(kinds, "up", "start pods and wait until all of them are ready", run_up)
    flag = verb.add_argument
    count_help = "how many (default: all hosts of the hostfile)"
    flag("--count", type=int, metavar="N", help=count_help)
    flag("--hostfile", type=given_path, metavar="F", help=HOSTFILE_HELP)
    flag("--ssh-config", type=given_path, metavar="C", help=SSH_CONFIG_HELP)
    slots_help = "processes per pod (default: its GPUs, at least 1)"
    flag("--slots", type=int, metavar="K", help=slots_help)
    backend_help = "where (default: cml in a CML session, else local)"
    flag("--backend", choices=BACKEND_NAMES, help=backend_help)
    flag("--name", default="pods", help="of the cluster")
    port_help = "where pods report (default: 6000, or a free one)"
    flag("--port", type=int, metavar="P", help=port_help)
    seconds_help = "until all must be ready (default: 120, of CML workers 900)"
    flag("--seconds", type=float, metavar="S", help=seconds_help)
    flag("--cpu", type=float, default=4, metavar="N", help="cores of a CML worker")
    flag("--memory", type=float, default=32, metavar="GIB", help="memory of a CML worker")
    gpu_help = "GPUs of a CML worker (default: as here); 0: none anywhere"
    flag("--nvidia-gpu", type=int, metavar="N", help=gpu_help)
    label_help = "CML's id of the kind of GPU of its workers"
    flag("--accelerator-label", type=int, metavar="ID", help=label_help)
    profile_help = "CML's id of the size of its workers"
    flag("--resource-profile", type=int, metavar="ID", help=profile_help)
    replace_help = "start a new CML worker once for one that ends early"
    flag("--replace", action="store_true", dest="replace_lost", help=replace_help)
    verb.foreign = {
        "-n": "--count",
        "--num-pods": "--count",
        "--pods": "--count",
        "--num_nodes": "--count",
    }
    verb.flag_of_a_word = "--count"
    verb.set_defaults(readable=readable_up)


def _add_check(kinds: Any, add: Callable[..., Any]) -> None:
    verb = add(kinds, "check", "check every pod before anything starts there", run_check)
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--name", help=NAME_HELP)
    where.add_argument("--hostfile", type=given_path, metavar="F", help=HOSTFILE_HELP)
    self_help = "this machine alone, without ssh"
    where.add_argument("--self", action="store_true", dest="this_pod", help=self_help)
    verb.add_argument("--ssh-config", type=given_path, metavar="C", help=SSH_CONFIG_HELP)
    verb.flag_of_a_word = "--name"
    verb.set_defaults(readable=readable_check, status=check_status)


def _add_down(kinds: Any, add: Callable[..., Any]) -> None:
    verb = add(kinds, "down", "end pods and remove their keys", run_down)
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--name", help=NAME_HELP)
    all_help = "every cluster of this machine, and what ended ones of others left"
    where.add_argument("--all", action="store_true", help=all_help)
    verb.flag_of_a_word = "--name"
    verb.set_defaults(readable=readable_down)


def run_up(arguments: argparse.Namespace) -> Result:
    """Start a cluster that lives until `pods down` or two hours after its last use."""
    from zeropods import pods
    from zeropods.pods.cluster import deepspeed_argv, deepspeed_environment

    settings = {name: getattr(arguments, name) for name in UP_FLAGS}
    cluster = pods.up(**settings, lease="idle")
    started = []
    for pod in cluster.pods:
        started.append(
            {"pod": pod.name, "worker": pod.worker, "address": pod.address, "slots": pod.slots}
        )
    over_pdsh = cluster.why_not_pdsh() is None
    return {
        **_described(cluster),
        "pods": started,
        "export": deepspeed_environment(cluster) if over_pdsh else {},
        "command": deepspeed_argv(cluster) if over_pdsh else [],
    }


def readable_up(result: Result) -> str:
    """The hostfile, and DeepSpeed's own command with the variables that it needs, ready to be
    pasted where pdsh reaches the pods."""
    lines = [f"# {result['hostfile']}"]
    for pod in result["pods"]:
        lines.append(f"{pod['address']} slots={pod['slots']}")
    name = result["name"]
    ending = "zeropods pods down"
    if name != "pods":
        ending += f" --name {name}"
    lines += ["", f"# cluster {name} is up; end it with: {ending}"]
    # DeepSpeed passes the working folder on without quotes: a path with a space would be split.
    would_be_split = any(map(str.isspace, str(Path.cwd())))
    if would_be_split or not result["command"]:
        lines.append("# train with 'zeropods launch'")
    else:
        lines.append("# train with 'zeropods launch', or with DeepSpeed's own command:")
        for variable, value in result["export"].items():
            lines.append(f"export {variable}={shlex.quote(value)}")
        lines.append(f"{shlex.join(result['command'])} textsql_train.py ...")
    return "\n".join(lines)


def run_check(arguments: argparse.Namespace) -> Result:
    """Check the pods of a cluster, the user's own hosts, or this machine.

    With `--json` the result has plain values, else under `shown` the object that people get as a
    table.
    """
    from zeropods.pods.cluster import expected_here, find
    from zeropods.pods.hostfile import read_hostfile
    from zeropods.pods.preflight import preflight, preflight_self

    ssh_config = arguments.ssh_config
    if ssh_config and not arguments.hostfile:
        remedy = "give their --hostfile too"
        raise UserError(f"--ssh-config {ssh_config}: is for hosts of your own; {remedy}")
    if arguments.this_pod:
        preflighted = preflight_self(expected_here())
    elif arguments.hostfile:
        hosts = read_hostfile(arguments.hostfile)
        preflighted = preflight(hosts, expected_here(), ssh_config=ssh_config)
    else:
        preflighted = find(arguments.name).check()
    if arguments.json:
        return {"ok": preflighted.ok, "pods": [asdict(pod) for pod in preflighted.pods]}
    return {"ok": preflighted.ok, "shown": preflighted}


def readable_check(result: Result) -> str:
    """The table of the checks."""
    return str(result["shown"])


def check_status(result: Result) -> int:
    """0 if every pod passed, else 1."""
    return 0 if result["ok"] else 1


def run_list(arguments: argparse.Namespace) -> Result:
    """Every cluster, those of other machines included, with the state that each of its pods
    reports."""
    from zeropods.pods.cluster import clusters

    described = []
    for cluster in clusters():
        states = [asdict(status) for status in cluster.statuses()]
        described.append({**_described(cluster), "pods": states})
    return {"clusters": described}


def readable_list(result: Result) -> str:
    """A table for each cluster."""
    from zeropods.tables import Table

    tables = []
    for cluster in result["clusters"]:
        for pod in cluster["pods"]:
            runs = [f"{run} ({processes} processes)" for run, processes in pod["runs"].items()]
            pod["runs"] = ", ".join(runs) or "-"
            seconds_left = pod.pop("lease_seconds_left")
            pod["lease left (s)"] = "-" if seconds_left is None else f"{seconds_left:.0f}"
        title = cluster["name"]
        if not cluster["here"]:
            title += f", of another machine ({cluster['machine']})"
        table = Table.of(cluster["pods"], f"{title}: {cluster['hostfile']}")
        tables.append(str(table))
    return "\n".join(tables) or "no cluster is up"


def run_down(arguments: argparse.Namespace) -> Result:
    """End one cluster or all, and return the names of those that were ended.

    Ending none is no error, since a wrong name looks like a cluster that has ended. If a cluster
    cannot be ended, the others are, and then its error is raised.
    """
    from zeropods.pods.cluster import chosen_name, left_of_others, names, names_here, take_down

    chosen: list[str | None]
    if arguments.all:
        chosen = [*names_here(), *left_of_others()]
    elif arguments.name is not None:
        chosen = [arguments.name]
    else:
        chosen = [chosen_name()]
    ended = []
    errors = []
    for name in chosen:
        try:
            if name is not None and take_down(name):
                ended.append(name)
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if arguments.name is not None and not ended:
        others = names()
        if others:
            running = ", ".join(others)
            print(f"cluster {arguments.name}: is not up; these are: {running}", file=sys.stderr)
    return {"down": ended}


def readable_down(result: Result) -> str:
    """The clusters that were ended."""
    if not result["down"]:
        return "nothing was up"
    return f"down: {', '.join(result['down'])}"


def _described(cluster: Cluster) -> Result:
    """What the verbs print of a cluster, its pods aside."""
    return {
        "name": cluster.name,
        "backend": cluster.backend,
        "machine": cluster.machine.hostname,
        "here": not cluster.is_elsewhere,
        "network": cluster.network,
        # The port of the first pod; where others have other ports, `ssh_config` has them.
        "ssh_port": cluster.pods[0].ssh_port,
        "hostfile": str(cluster.hostfile),
        "ssh_config": str(cluster.ssh_config),
    }
