"""A launch as data: what runs where, with which flags and environment, and the command that runs
it.

`plan_launch` and `plan_alone` build one from what a user asks for, and refuse what is already known
to be wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods import files
from zeropods.data.manifest import FILE as MANIFEST
from zeropods.errors import UserError
from zeropods.launch.over_agents import VARIABLES_FILE
from zeropods.launch.script_call import ScriptCall
from zeropods.measure.mlflow_runs import has_user_info
from zeropods.measure.record import RECORD, Record, read_json, read_record
from zeropods.pods.gpus import VISIBLE, own_gpus
from zeropods.pods.hostfile import Host, own_slots, world_info
from zeropods.pods.ssh import pdsh_ssh_arguments
from zeropods.programs import free_port
from zeropods.tables import counted
from zeropods.train.deepspeed_config import check_operation
from zeropods.train.deepspeed_config_check import check_config
from zeropods.train.flags import NO_FP16

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

PDSH = "pdsh"
AGENTS = "agents"
ON_PODS = (PDSH, AGENTS)
"""The launchers for the pods of a cluster: DeepSpeed's over pdsh, or the pods' agents, which start
the same of DeepSpeed on each pod without ssh. Either is one command here, which ends with the last
rank, writes the ranks' lines with the address of their pod before each, and is killed without harm:
the agents end the ranks."""
OVER_AGENTS = "zeropods.launch.over_agents"
"""Name of our module that lets the agents start the ranks, in the place of pdsh."""
LIGHT = "zeropods.launch.light"
"""Name of our module that runs a module of DeepSpeed's launcher with fewer imports."""
RUNNER = "deepspeed.launcher.runner"
LAUNCH = "launch.json"
"""File in the run folder that says what was launched last."""
FORWARDED = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_CACHE",
    "HF_TOKEN_PATH",
    "TORCH_EXTENSIONS_DIR",
    "OMP_WAIT_POLICY",
)
"""Variables that ranks need with the values they have here; DeepSpeed itself forwards PYTHON*,
NCCL* and a few more."""
FORWARDED_BY_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Prefixes of the variables that DeepSpeed's launcher exports unasked
(deepspeed/launcher/runner.py)."""
SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE)(?!\w*_(PATH|FILE)$)",
    re.IGNORECASE,
)
"""Matches the name of a variable that holds a secret, but not one that holds the path of a file
with a secret."""
UNSAFE = re.compile(r"[\"'`$\\\n\r\0%]|[\ud800-\udfff]|^\s|\s$")
"""Matches what a remote shell, pdsh or DeepSpeed would misread, and what is not UTF-8."""
BREAKS = re.compile(r"[\n\0\ud800-\udfff]")
NOT_IN_A_LINE = re.compile(r"[\n\r\0\ud800-\udfff]")
"""Matches what a line of the file with the variables of ranks by agents cannot hold."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One run of a script on some pods. Paths are absolute: every pod sees the same project
    folder."""

    call: ScriptCall
    """The script and its arguments, whose flags are read once."""
    folder: Path
    """The run folder, the script's `--outputdir`."""
    hosts: tuple[Host, ...]
    master_port: int
    """Port on which rank 0 listens for the other ranks."""
    launcher: str = PDSH
    requested_launcher: str | None = None
    """The launcher that the user asked for; None where it was chosen by itself."""
    ssh_config: Path | None = None
    control_ports: tuple[int, ...] = ()
    """Control ports of the pods' agents, in the order of the hosts."""
    secret_file: Path | None = None
    """Path of the file with the cluster's secret."""
    exported: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank, in addition to those that DeepSpeed forwards itself; no
    secrets."""
    export: tuple[str, ...] = ()
    """Names of the exported variables that the user asked for."""
    restarts: int = 0
    """Number of restarts so far, including the one that began this attempt."""
    original: Launch | None = None
    """The launch that the user asked for, where this one replaces it, perhaps on fewer pods or with
    other flags."""
    changed_flags: dict[str, str] = field(default_factory=dict)
    """The flags with which it differs from that launch."""

    @property
    def script(self) -> Path:
        """The script that every rank runs."""
        return self.call.script

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words of the script's command line."""
        return self.call.arguments

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    def to_json(self) -> dict[str, object]:
        """The launch as `--dry-run` prints it."""
        return {
            "script": str(self.script),
            "arguments": list(self.arguments),
            "folder": str(self.folder),
            "hosts": [{"address": host.address, "slots": host.slots} for host in self.hosts],
            "master_port": self.master_port,
            "launcher": self.launcher,
            "exported": self.exported,
        }


# What a user asks for


def plan_launch(
    cluster: Cluster,
    call: ScriptCall,
    *,
    pods: int | None = None,
    export: Sequence[str] = (),
    launcher: str | None = None,
    global_batch: int | None = None,
) -> Launch:
    """A launch on the pods of a cluster as data, with its arguments checked; starts nothing.

    Args:
        pods: number of the cluster's pods to use; all if not given.
        export: names of environment variables that the ranks need with the values they have here.
        launcher: one of `ON_PODS`; if not given, pdsh where it reaches the pods, else the agents.
        global_batch: as for `plan_on`.
    """
    requested_launcher = launcher
    launcher = launcher_on(cluster, requested_launcher)
    hosts = cluster.hosts[:pods]
    name = cluster.name
    if pods is not None and len(hosts) != pods:
        has = counted(len(cluster.hosts), "pod")
        remedy = (
            f"zeropods pods down --name {name}, then zeropods pods up --name {name} --count {pods}"
        )
        raise UserError(f"--num-pods {pods}: {name} has {has}; {remedy}")
    if launcher == PDSH:
        check_plain("working folder", Path.cwd())
        check_plain("Python", sys.executable)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None and cluster.shared_machine:
        # Pods of one machine share its cores.
        cores = len(os.sched_getaffinity(0))
        threads = str(max(1, cores // sum(host.slots for host in hosts)))
    fixed = {} if threads is None else {"OMP_NUM_THREADS": threads}
    exported = exported_variables(export, fixed, launcher)
    return plan_on(
        hosts,
        call,
        has_no_gpu=cluster.hides_gpus or (cluster.shared_machine and own_gpus() == 0),
        launcher=launcher,
        requested_launcher=requested_launcher,
        ssh_config=cluster.ssh_config,
        control_ports=tuple(pod.control_port for pod in cluster.pods[:pods]),
        secret_file=cluster.secret_file,
        exported=exported,
        export=tuple(export),
        global_batch=global_batch,
    )


def launcher_on(cluster: Cluster, launcher: str | None = None) -> str:
    """The launcher that was asked for, else pdsh where it reaches the pods of a cluster, else their
    agents; `UserError` for pdsh where it does not."""
    if launcher == AGENTS:
        return AGENTS
    why_not_pdsh = cluster.why_not_pdsh()
    if why_not_pdsh is None:
        return PDSH
    if launcher is None:
        return AGENTS
    remedy = "leave it out, so that the pods' agents start the ranks"
    raise UserError(f"--launcher {launcher}: {why_not_pdsh}; {remedy}")


def plan_alone(
    call: ScriptCall, processes: int | None = None, global_batch: int | None = None
) -> Launch:
    """A launch on this machine alone as data, with its arguments checked; starts nothing.

    Args:
        processes: number of processes; one per slot of this machine if not given.
        global_batch: as for `plan_on`.
    """
    hosts = (Host(socket.gethostname(), processes or own_slots()),)
    # With `processes`, the plan may be meant for a machine that is still to be rented.
    is_for_this_machine = processes is None
    has_no_gpu = is_for_this_machine and own_gpus() == 0
    planned = plan_on(
        hosts, call, has_no_gpu=has_no_gpu, global_batch=global_batch, launcher="none"
    )
    is_ours = call.kind is not None
    if is_for_this_machine and is_ours and call.deepspeed is not None:
        # Over pods the preflight looks.
        check_operation(call.deepspeed.config, call.deepspeed.path, on_gpu=own_gpus() > 0)
    return planned


def plan_on(
    hosts: tuple[Host, ...],
    call: ScriptCall,
    *,
    has_no_gpu: bool = False,
    global_batch: int | None = None,
    **more: Any,
) -> Launch:
    """A launch on these hosts as data, with its arguments checked.

    Args:
        has_no_gpu: whether the ranks are known to have no GPU.
        global_batch: rows of all ranks in an optimizer step, which set the script's passes; None
            leaves these as they are.
        more: further fields of `Launch`.
    """
    ranks = sum(host.slots for host in hosts)
    if global_batch is None:
        call = call.with_own_step_rows(ranks)
    else:
        call = call.with_step_rows(global_batch, ranks)
    planned = Launch(
        call=call,
        folder=call.folder,
        hosts=hosts,
        master_port=free_port(),
        **more,
    )
    check_arguments(planned, has_no_gpu=has_no_gpu)
    return planned


def check_arguments(planned: Launch, *, has_no_gpu: bool = False) -> None:
    """Refuse arguments that can be seen to be wrong before anything starts, such as FP16 without a
    GPU.

    One of our scripts would refuse wrong flags itself, but only after half a minute on every pod.
    """
    call = planned.call
    if planned.launcher != AGENTS:
        check_plain("script", call.script)
    for argument in call.arguments:
        if "\0" in argument:
            reason = "contains NUL, which no program can be given"
            raise UserError(f"argument {argument!r}: {reason}; take it out")
    values = call.values
    is_ours = call.kind is not None
    if has_no_gpu and is_ours and values["precision"] == "fp16":
        raise UserError(NO_FP16)
    if values.get("max_train_seconds") and planned.world_size > 1:
        raise UserError(
            "--max_train_seconds: clocks of several processes differ; give --max_steps instead"
        )
    if call.deepspeed is not None:
        path = Path(call.deepspeed.path)
        known = {
            **values,
            "world_size": planned.world_size,
            "pod_slots": tuple(host.slots for host in planned.hosts),
            "has_no_gpu": has_no_gpu,
        }
        fp16_fault = None if call.kind is None else call.kind.fp16_fault
        check_config(call.deepspeed.config, path, known, fp16_fault, ours=is_ours)


def check_inputs(call: ScriptCall, *, data: bool = True) -> None:
    """Check the flags of a script of ours, the model and, if `data`, the data that they name,
    before a pod is used."""
    flags = call.parsed
    if flags is None:
        return
    if data:
        flags.check_inputs()
    else:
        flags.check_model()


# Whether a launch has run to its end before, found out without starting anything


def finished_record(launch: Launch) -> Record | None:
    """Return this launch's record if it is finished, and say so; `UserError` if another finished
    run is there."""
    if not (launch.folder / RECORD).is_file():
        return None
    record = read_record(launch.folder)
    if record.status != "ok":
        return None
    before = remembered(launch.folder)
    if before != identity(launch):
        other = "with other arguments or data"
        if before is None:
            other = "that zeropods did not launch"
        raise UserError(
            f"{launch.folder}: holds a finished run on {record.pods} pods {other}; "
            "choose another --outputdir"
        )
    print(f"{launch.folder}: this run is finished; nothing to do", file=sys.stderr)
    return record


def remember(launch: Launch) -> None:
    """Save the identity of a launch beside its record."""
    files.write_json(launch.folder / LAUNCH, identity(launch))


def remembered(folder: Path) -> dict[str, Any] | None:
    """The identity of the last launch into a run folder; None where there was none."""
    path = folder / LAUNCH
    return read_json(path) if path.is_file() else None


def identity(launch: Launch) -> dict[str, Any]:
    """What makes two launches the same run; the port, the lease and what a restart has changed do
    not count."""
    launch = launch.original or launch
    flags = launch.call.values
    config = Path(str(flags.get("deepspeed") or ""))
    data = flags.get("dataset_path") or flags.get("data") or ""
    manifest = Path(str(data)) / MANIFEST
    config_digest = None
    if config.is_file():
        config_digest = hashlib.sha256(config.read_bytes()).hexdigest()
    content_key = None
    if manifest.is_file():
        content_key = read_json(manifest).get("content_key")
    return {
        "script": str(launch.script),
        "arguments": list(launch.arguments),
        "pods": [host.slots for host in launch.hosts],
        "deepspeed": config_digest,
        "dataset": content_key,
    }


# DeepSpeed's launcher


def runner_argv(launch: Launch, hostfile: Path) -> list[str]:
    """The command of DeepSpeed's launcher: over pdsh, by the pods' agents, or on this machine
    alone."""
    if launch.launcher == AGENTS:
        return [
            *(sys.executable, "-m", OVER_AGENTS),
            *("--hostfile", str(hostfile)),
            *("--control_ports", ",".join(map(str, launch.control_ports))),
            *("--secret_file", str(launch.secret_file)),
            *("--master_port", str(launch.master_port)),
            str(launch.script),
            *launch.arguments,
        ]
    if launch.launcher == "none":
        # This launcher needs no ssh, starts a process per slot, and ends its children when it is
        # ended.
        places = {"localhost": list(range(launch.world_size))}
        return [
            *(sys.executable, "-u", "-m", LIGHT, "deepspeed.launcher.launch"),
            f"--world_info={world_info(places)}",
            "--master_addr=127.0.0.1",
            f"--master_port={launch.master_port}",
            str(launch.script),
            *launch.arguments,
        ]
    return [
        *(sys.executable, "-m", LIGHT, RUNNER),
        *("--hostfile", str(hostfile)),
        *("--launcher", PDSH),
        *("--num_nodes", str(len(launch.hosts))),
        *("--master_addr", launch.hosts[0].address),
        *("--master_port", str(launch.master_port)),
        # DeepSpeed's ssh check ignores the ssh options and has no timeout; the preflight has
        # reached every pod.
        "--no_ssh_check",
        # Without it, a single host would run here, without ssh.
        "--force_multi",
        str(launch.script),
        *map(remote_argument, launch.arguments),
    ]


def shell_line(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """A command and variables of its environment as text to paste into a shell, with one flag per
    line."""
    program = Path(argv[0]).with_name("deepspeed")
    if list(argv[1:4]) == ["-m", LIGHT, RUNNER] and program.is_file():
        argv = [str(program), *argv[4:]]
    first_line = []
    for name, value in (variables or {}).items():
        first_line.append(f"{name}={shlex.quote(value)}")
    lines = [first_line]
    for word in argv:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(map(" ".join, lines))


def launch_line(launch: Launch, cluster: Cluster, hostfile: Path) -> str:
    """What to paste into a shell for a launch on pods: DeepSpeed's own command over pdsh or, since
    agents start only ranks that are supervised, `zeropods launch`."""
    if launch.launcher == PDSH:
        return shell_line(runner_argv(launch, hostfile), launcher_variables(launch))
    exported = []
    for name in launch.export:
        exported += ["--export", name]
    argv = [
        *(sys.executable, "-m", "zeropods", "launch"),
        *("--name", cluster.name),
        *("--launcher", AGENTS),
        *("--num-pods", str(len(launch.hosts))),
        *exported,
        *("--", str(launch.script)),
        *launch.arguments,
    ]
    return shell_line(argv)


def launcher_variables(launch: Launch) -> dict[str, str]:
    """Environment variables that pdsh needs when DeepSpeed's launcher starts it; none for another
    launcher."""
    if launch.launcher != PDSH:
        return {}
    variables = {"PDSH_RCMD_TYPE": "ssh"}
    if launch.ssh_config is not None:
        variables["PDSH_SSH_ARGS_APPEND"] = pdsh_ssh_arguments(launch.ssh_config)
    return variables


def remote_argument(argument: str) -> str:
    """Quote an argument for DeepSpeed's launcher, so that the script on the pod gets it unchanged.

    The launcher joins arguments with blanks for a remote shell; it puts an argument that contains a
    blank into double quotes, in which only `"` is escaped (deepspeed/launcher/multinode_runner.py).
    pdsh replaces `%n` and the like.
    """
    if BREAKS.search(argument):
        why = "contains a line break or is not UTF-8, so it cannot pass through a remote shell"
        raise UserError(f"argument {argument!r}: {why}; put it into a file")
    percent = argument.replace("%", "%%")
    if " " not in argument:
        return shlex.quote(percent)
    return re.sub(r"([\\$`])", r"\\\1", percent)


def check_plain(what: str, path: Path | str) -> None:
    """Refuse a path that pdsh or a remote shell would change."""
    unsafe = UNSAFE.search(str(path))
    if unsafe is not None:
        raise UserError(
            f"{what} {str(path)!r}: pdsh cannot handle {unsafe[0]!r}; "
            "use a path without that character"
        )


# The environment of the launcher and of every rank


def check_exported_names(names: Iterable[str]) -> None:
    """Refuse names of `--export` that are not set here, that sound like a secret, or that no pod
    may be given: values of exported variables stand on command lines or in the run folder."""
    for name in names:
        if name not in os.environ:
            raise UserError(
                f"--export {name}: not set here; give the name of a variable that is set"
            )
        if not name.isidentifier():
            raise UserError(f"--export {name}: expected letters, digits and _")
        if name == VISIBLE:
            raise UserError(
                f"--export {name}: every pod has GPUs of its own; set it where the pods are started"
            )
        if SECRET_NAME.search(name):
            raise UserError(
                f"--export {name}: sounds like a secret, and others can read what is exported; "
                "put it into a file that the pods see, and export the file's path"
            )


def exported_variables(
    names: Sequence[str], fixed: Mapping[str, str], launcher: str = PDSH
) -> dict[str, str]:
    """Variables for every rank: the `fixed` ones, those asked for by name, and those of FORWARDED
    that are set.

    They end up on command lines or in the run folder, so a secret is refused, as is a value that
    would not arrive unchanged: over pdsh it passes through a shell, by agents a line of a file
    holds it.
    """
    forbidden = UNSAFE
    why_forbidden = "would be changed by a remote shell"
    if launcher == AGENTS:
        forbidden = NOT_IN_A_LINE
        why_forbidden = "cannot be passed on"
    check_exported_names(names)
    variables = {}
    for name in (*FORWARDED, *names):
        if name in os.environ:
            variables[name] = os.environ[name]
    variables.update(fixed)
    for name, value in variables.items():
        place = f"--export {name}" if name in names else name
        if has_user_info(value):
            reason = "its address holds a user, and others can read what is exported"
            raise UserError(f"{place}: {reason}; set it without")
        unsafe = forbidden.search(value)
        if unsafe is not None:
            reason = f"{unsafe[0]!r} in its value {why_forbidden}"
            raise UserError(f"{place}: {reason}; put it into a file")
    return variables


def is_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret: by its name, or as an address with a user in it."""
    return SECRET_NAME.search(name) is not None or has_user_info(value)


def variables_of_ranks(launch: Launch, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in the file from which the launcher on the pods takes those of the ranks.

    Over pdsh DeepSpeed's runner adds those that it forwards unasked; here they are added for the
    agents. `UserError` names one of these that a line of the file cannot hold.

    Args:
        environment: this process's environment.
    """
    if launch.launcher != AGENTS:
        return launch.exported
    variables = {}
    for name, value in environment.items():
        if name.startswith(FORWARDED_BY_DEEPSPEED) and not is_secret(name, value):
            variables[name] = value
    searched = [os.getcwd()]
    if environment.get("PYTHONPATH"):
        searched.append(environment["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(searched)
    for name, value in variables.items():
        broken = NOT_IN_A_LINE.search(value)
        if broken is not None:
            reason = f"is passed on to the ranks, and {broken[0]!r} in its value cannot be"
            raise UserError(f"{name}: {reason}; set it without that")
    return {**variables, **launch.exported}


def runner_environment(
    launch: Launch, env_file: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of DeepSpeed's launcher, which runs here and starts pdsh, or of what lets
    the agents start the ranks.

    It holds no secret that the launcher would pass on. `UserError` names a variable that DeepSpeed
    forwards over pdsh and whose value a remote shell would change.

    Args:
        environment: this process's environment, with the programs of its Python first on PATH.
    """
    forwarded = {name for name in environment if name.startswith(FORWARDED_BY_DEEPSPEED)}
    secret = {name for name in forwarded if is_secret(name, environment[name])}
    for name in sorted(forwarded - secret):
        if launch.launcher == PDSH and UNSAFE.search(environment[name]):
            raise UserError(
                f"{name}: DeepSpeed forwards it, and a remote shell would change its value; "
                "unset it"
            )
    kept = {name: value for name, value in environment.items() if name not in secret}
    return {**kept, **launcher_variables(launch), VARIABLES_FILE: str(env_file)}
