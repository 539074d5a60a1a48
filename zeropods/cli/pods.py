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

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.pods.cluster import Cluster

UP = ("count", "hostfile", "ssh_config", "slots", "backend", "name", "port", "seconds", "cpu", "memory", "nvidia_gpu")
"""Flags of `pods up` that are passed on as arguments of `pods.up`."""
HOSTFILE_HELP = "hosts of your own, as your ssh reaches them"
SSH_CONFIG_HELP = "ssh configuration for hosts of your own (default: your usual one)"
NAME_HELP = "the cluster (default: pods, or the only one)"


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one verb."""
    kinds = verbs.add_parser("pods", help="worker pods").add_subparsers(required=True, metavar="WHAT")
    up = add(kinds, "up", "start pods and wait until all of them are ready", run_up)
    up.add_argument("--count", type=int, metavar="N", help="how many (default: all hosts of the hostfile)")
    up.add_argument("--hostfile", type=given_path, metavar="F", help=HOSTFILE_HELP)
    up.add_argument("--ssh-config", type=given_path, metavar="C", help=SSH_CONFIG_HELP)
    up.add_argument("--slots", type=int, metavar="K", help="processes per pod (default: its GPUs, at least 1)")
    up.add_argument("--backend", choices=["local", "cml"], help="where (default: cml in a CML session, else local)")
    up.add_argument("--name", default="pods", help="of the cluster")
    up.add_argument("--port", type=int, metavar="P", help="where pods report (default: 6000, or a free one)")
    up.add_argument("--seconds", type=float, default=120.0, metavar="S", help="until all must be ready")
    up.add_argument("--cpu", type=float, default=4, metavar="N", help="cores of a CML worker")
    up.add_argument("--memory", type=float, default=32, metavar="GIB", help="memory of a CML worker")
    up.add_argument(
        "--nvidia-gpu", type=int, metavar="N", help="GPUs of a CML worker (default: as here); 0: none anywhere"
    )
    up.foreign = {"-n": "--count", "--num-pods": "--count", "--pods": "--count", "--num_nodes": "--count"}
    up.flag_of_a_word = "--count"
    up.set_defaults(readable=readable_up)
    check = add(kinds, "check", "check every pod before anything starts there", run_check)
    where = check.add_mutually_exclusive_group()
    where.add_argument("--name", help=NAME_HELP)
    where.add_argument("--hostfile", type=given_path, metavar="F", help=HOSTFILE_HELP)
    where.add_argument("--self", action="store_true", dest="this_pod", help="this machine alone, without ssh")
    check.add_argument("--ssh-config", type=given_path, metavar="C", help=SSH_CONFIG_HELP)
    check.flag_of_a_word = "--name"
    check.set_defaults(readable=lambda result: str(result["shown"]), status=lambda result: 0 if result["ok"] else 1)
    add(kinds, "list", "clusters and the state of their pods", run_list).set_defaults(readable=readable_list)
    down = add(kinds, "down", "end pods and remove their keys", run_down)
    chosen = down.add_mutually_exclusive_group()
    chosen.add_argument("--name", help=NAME_HELP)
    chosen.add_argument(
        "--all", action="store_true", help="every cluster of this machine, and what ended ones of others left"
    )
    down.flag_of_a_word = "--name"
    down.set_defaults(
        readable=lambda result: f"down: {', '.join(result['down'])}" if result["down"] else "nothing was up"
    )


def run_up(arguments: argparse.Namespace) -> Result:
    """Start a cluster that lives until `pods down` or two hours after its last use."""
    from zeropods import pods
    from zeropods.pods.cluster import deepspeed_argv, deepspeed_environment

    cluster = pods.up(**{name: getattr(arguments, name) for name in UP}, lease="idle")
    return {
        **_described(cluster),
        "pods": [{"pod": p.name, "worker": p.worker, "address": p.address, "slots": p.slots} for p in cluster.pods],
        "export": deepspeed_environment(cluster),
        "command": deepspeed_argv(cluster),
    }


def readable_up(result: Result) -> str:
    """The hostfile, and DeepSpeed's own command with the variables that it needs, ready to be pasted."""
    hosts = [f"{pod['address']} slots={pod['slots']}" for pod in result["pods"]]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in result["export"].items()]
    name = result["name"]
    ends = "zeropods pods down" + ("" if name == "pods" else f" --name {name}")
    own = ["# train with 'zeropods launch'"]
    if not any(map(str.isspace, str(Path.cwd()))):  # DeepSpeed's command would be split at spaces.
        line = f"{shlex.join(result['command'])} textsql_train.py ..."
        own = [f"{own[0]}, or with DeepSpeed's own command:", *exports, line]
    return "\n".join([f"# {result['hostfile']}", *hosts, "", f"# cluster {name} is up; end it with: {ends}", *own])


def run_check(arguments: argparse.Namespace) -> Result:
    """Check the pods of a cluster, the user's own hosts, or this machine."""
    from zeropods.pods.cluster import expected_here, find
    from zeropods.pods.hostfile import read_hostfile
    from zeropods.pods.preflight import preflight, preflight_self

    ssh_config = arguments.ssh_config
    if ssh_config and not arguments.hostfile:
        raise UserError(f"--ssh-config {ssh_config}: is for hosts of your own; give their --hostfile too")
    if arguments.this_pod:
        found = preflight_self(expected_here())
    elif arguments.hostfile:
        found = preflight(read_hostfile(arguments.hostfile), expected_here(), ssh_config=ssh_config)
    else:
        found = find(arguments.name).check()
    told = {"pods": [asdict(pod) for pod in found.pods]} if arguments.json else {"shown": found}
    return {"ok": found.ok, **told}


def run_list(arguments: argparse.Namespace) -> Result:
    """Every cluster, those of other machines included, with the state that each of its pods reports."""
    from zeropods.pods.cluster import clusters

    return {"clusters": [{**_described(each), "pods": [asdict(pod) for pod in each.statuses()]} for each in clusters()]}


def readable_list(result: Result) -> str:
    """A table for each cluster."""
    from zeropods.tables import Table

    tables = []
    for cluster in result["clusters"]:
        for pod in cluster["pods"]:
            runs = ", ".join(f"{run} ({processes} processes)" for run, processes in pod["runs"].items())
            left = pod.pop("lease_seconds_left")
            pod |= {"runs": runs or "-", "lease left (s)": "-" if left is None else f"{left:.0f}"}
        title = cluster["name"]
        if not cluster["here"]:
            title += f", of another machine ({cluster['machine']})"
        tables.append(str(Table.of(cluster["pods"], f"{title}: {cluster['hostfile']}")))
    return "\n".join(tables) or "no cluster is up"


def run_down(arguments: argparse.Namespace) -> Result:
    """End one cluster or all; ending none is no error, since a wrong name looks like a cluster that has ended."""
    from zeropods.pods.cluster import chosen_name, left_of_others, names, names_here, take_down

    chosen: list[str | None]
    if arguments.all:
        chosen = [*names_here(), *left_of_others()]
    else:
        chosen = [chosen_name() if arguments.name is None else arguments.name]
    ended, errors = [], []
    for name in chosen:
        try:
            if name is not None and take_down(name):
                ended.append(name)
        except UserError as error:
            errors.append(error)
    if errors:
        # The others have been ended first.
        raise errors[0]
    if arguments.name is not None and not ended and (there := names()):
        print(f"cluster {arguments.name}: is not up; these are: {', '.join(there)}", file=sys.stderr)
    return {"down": ended}


def _described(cluster: Cluster) -> Result:
    return {
        "name": cluster.name,
        "backend": cluster.backend,
        "machine": None if cluster.machine is None else cluster.machine.hostname,
        "here": not cluster.is_elsewhere,
        "network": "loopback" if cluster.backend == "local" else cluster.backend,
        "ssh_port": cluster.pods[0].ssh_port,  # If other pods have another one, `ssh_config` says so.
        "hostfile": str(cluster.hostfile),
        "ssh_config": str(cluster.ssh_config),
    }
