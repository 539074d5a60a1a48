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
"""The launchers for the pods of a cluster. With `pdsh`, DeepSpeed's runner starts DeepSpeed's
launcher on each pod over ssh; with `agents`, the pods' agents start it without ssh.

Either is one command here. It ends with the last rank, and writes each line of a rank with the
address of the rank's pod before it. It can be killed at any time: the agents end the ranks."""
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
NOT_IN_AN_ARGUMENT = re.compile(r"[\n\0\ud800-\udfff]")
"""Matches what an argument cannot hold that passes through a remote shell, even in quotes."""
NOT_IN_A_LINE = re.compile(r"[\n\r\0\ud800-\udfff]")
"""Matches what a line of the launcher's environment file cannot hold."""


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
    """Environment variables of every rank with their values, in addition to those that DeepSpeed
    forwards itself; no secrets."""
    export: tuple[str, ...] = ()
    """The names among these that the user asked for with `--export`."""
    restarts: int = 0
    """Number of restarts so far, including the one that began this attempt."""
    original: Launch | None = None
    """The launch that the user asked for, where this one replaces it, perhaps on fewer pods or with
    other flags; None where this is that launch."""
    changed_flags: dict[str, str] = field(default_factory=dict)
    """The script's flags that differ from those of `original`, with their new values."""

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
    `UserError` where the arguments, or this machine's environment, do not allow it.

    Args:
        pods: number of the cluster's pods to use, the first ones; all if not given.
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
        ranks = sum(host.slots for host in hosts)
        threads = str(max(1, cores // ranks))
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
    """A launch on these hosts as data, with its arguments checked; `UserError` where they are
    wrong.

    Args:
        has_no_gpu: whether the ranks are known to have no GPU.
        global_batch: rows of all ranks in an optimizer step, from which the script's gradient
            accumulation follows; if not given, it follows from the script's own `--global_batch`,
            where the script has that.
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
    GPU; `UserError` says which.

    One of our scripts would refuse wrong flags itself, but only after half a minute on every pod.

    Args:
        has_no_gpu: whether the ranks are known to have no GPU.
    """
    call = planned.call
    if planned.launcher != AGENTS:
        check_plain("script", call.script)
    for argument in call.arguments:
        if "\0" in argument:
            reason = "contains NUL, which no program can be given"
            raise UserError(f"argument {argument!r}: {reason}; take it out")
    # This parses the flags of one of our scripts, and refuses wrong ones.
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
        facts = {
            **values,
            "world_size": planned.world_size,
            "pod_slots": tuple(host.slots for host in planned.hosts),
            "has_no_gpu": has_no_gpu,
        }
        fp16_fault = None if call.kind is None else call.kind.fp16_fault
        check_config(call.deepspeed.config, path, facts, fp16_fault, ours=is_ours)


def check_inputs(call: ScriptCall, *, data: bool = True) -> None:
    """Check the flags of one of our scripts, the model that they name and, if `data`, the data too;
    `UserError` where something is wrong. Other scripts are not checked."""
    flags = call.parsed
    if flags is None:
        return
    if data:
        flags.check_inputs()
    else:
        flags.check_model()


# Whether a launch has run to its end before, found out without starting anything


def finished_record(launch: Launch) -> Record | None:
    """The record of this launch if its folder holds it as a finished run, which a line on stderr
    then says; None where no run is finished there.

    Raises:
        UserError: the finished run there is another one.
    """
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
    """Save the identity of a launch in its run folder, where `remembered` finds it."""
    files.write_json(launch.folder / LAUNCH, identity(launch))


def remembered(folder: Path) -> dict[str, Any] | None:
    """The identity of the last launch into a run folder; None where there was none."""
    path = folder / LAUNCH
    return read_json(path) if path.is_file() else None


def identity(launch: Launch) -> dict[str, Any]:
    """What makes two launches the same run, as JSON: script, arguments, slots of each pod, and the
    contents of the DeepSpeed configuration and of prepared data.

    Which pods these are, the port, the lease and what a restart has changed do not count.
    """
    requested = launch.original or launch
    flags = requested.call.values
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
        "script": str(requested.script),
        "arguments": list(requested.arguments),
        "pods": [host.slots for host in requested.hosts],
        "deepspeed": config_digest,
        "dataset": content_key,
    }


# DeepSpeed's launcher


def runner_argv(launch: Launch, hostfile: Path) -> list[str]:
    """The command that starts the ranks of a launch and ends with them: over pdsh, by the pods'
    agents, or on this machine alone.

    Args:
        hostfile: file with the launch's hosts; not used on this machine alone.
    """
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
        # DeepSpeed's launcher for a pod, which its runner would start over ssh, needs no ssh
        # itself. It starts a process per slot, and ends its children when it is ended.
        slots = {"localhost": list(range(launch.world_size))}
        return [
            *(sys.executable, "-u", "-m", LIGHT, "deepspeed.launcher.launch"),
            f"--world_info={world_info(slots)}",
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
    line. DeepSpeed's own program stands in the place of our faster way to start its runner."""
    program = Path(argv[0]).with_name("deepspeed")
    if list(argv[1:4]) == ["-m", LIGHT, RUNNER] and program.is_file():
        argv = [str(program), *argv[4:]]
    settings = []
    for name, value in (variables or {}).items():
        settings.append(f"{name}={shlex.quote(value)}")
    lines = [settings]
    for word in argv:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(words) for words in lines)


def launch_line(launch: Launch, cluster: Cluster, hostfile: Path) -> str:
    """What to paste into a shell for a launch on pods: over pdsh DeepSpeed's own command; with
    agents `zeropods launch`, since agents start only ranks that are supervised.

    Args:
        hostfile: file with the hosts, for DeepSpeed's command.
    """
    if launch.launcher == PDSH:
        return shell_line(runner_argv(launch, hostfile), launcher_variables(launch))
    export_flags = []
    for name in launch.export:
        export_flags += ["--export", name]
    argv = [
        *(sys.executable, "-m", "zeropods", "launch"),
        *("--name", cluster.name),
        *("--launcher", AGENTS),
        *("--num-pods", str(len(launch.hosts))),
        *export_flags,
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
    """Quote an argument for DeepSpeed's runner, so that the script on the pod gets it unchanged;
    `UserError` where no quoting does that.

    The runner joins arguments with blanks for a remote shell. It puts an argument that contains a
    blank into double quotes, in which it escapes only `"` (deepspeed/launcher/multinode_runner.py).
    pdsh replaces `%n` and the like.
    """
    if NOT_IN_AN_ARGUMENT.search(argument):
        why = "contains a line break or is not UTF-8, so it cannot pass through a remote shell"
        raise UserError(f"argument {argument!r}: {why}; put it into a file")
    text = argument.replace("%", "%%")
    if " " not in argument:
        return shlex.quote(text)
    # The other characters that a shell heeds within double quotes.
    return re.sub(r"([\\$`])", r"\\\1", text)


def check_plain(what: str, path: Path | str) -> None:
    """Refuse a path that pdsh or a remote shell would change: `UserError`, which says of `what` it
    is the path."""
    unsafe = UNSAFE.search(str(path))
    if unsafe is not None:
        raise UserError(
            f"{what} {str(path)!r}: pdsh cannot handle {unsafe[0]!r}; "
            "use a path without that character"
        )


# The environment of the launcher and of every rank


def check_exported_names(names: Iterable[str]) -> None:
    """Refuse names of `--export` that are not set here, that sound like a secret, or that no pod
    may be given; `UserError` says which. Others can read what is exported: it stands on command
    lines or in the run folder."""
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
    """Variables for every rank with their values: those of `FORWARDED` that are set here, those
    asked for by name, and the `fixed` ones, which win.

    They end up on command lines or in the run folder, so `UserError` refuses a secret. It also
    refuses a value that would not arrive unchanged: over pdsh it passes through a shell, by agents
    a line of a file holds it.

    Args:
        names: as given with `--export`.
        fixed: variables whose values are not those they have here.
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
    """Whether a variable holds a secret, by its name, or because its value is an address with a
    user in it."""
    return SECRET_NAME.search(name) is not None or has_user_info(value)


def variables_of_ranks(launch: Launch, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for the launcher's environment file, from which the ranks get them.

    Over pdsh these are the exported ones, and DeepSpeed's runner adds those that it forwards
    unasked. For the agents these are added here; `UserError` names one of them that a line of the
    file cannot hold.

    Args:
        environment: this process's environment.
    """
    if launch.launcher != AGENTS:
        return launch.exported
    variables = {}
    for name, value in environment.items():
        if name.startswith(FORWARDED_BY_DEEPSPEED) and not is_secret(name, value):
            variables[name] = value
    # DeepSpeed's runner puts the working folder first too.
    folders = [os.getcwd()]
    if environment.get("PYTHONPATH"):
        folders.append(environment["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(folders)
    for name, value in variables.items():
        broken = NOT_IN_A_LINE.search(value)
        if broken is not None:
            reason = f"is passed on to the ranks, and {broken[0]!r} in its value cannot be"
            raise UserError(f"{name}: {reason}; set it without that")
    return {**variables, **launch.exported}


def runner_environment(
    launch: Launch, env_file: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the command that `runner_argv` returns.

    It is this process's without the secrets that the command would pass on to the pods, and with
    what pdsh and DeepSpeed need. `UserError` names a variable that DeepSpeed forwards over pdsh and
    whose value a remote shell would change.

    Args:
        env_file: the file with what `variables_of_ranks` returns.
        environment: this process's environment, with the programs of its Python first on PATH.
    """
    forwarded = {name for name in environment if name.startswith(FORWARDED_BY_DEEPSPEED)}
    secrets = {name for name in forwarded if is_secret(name, environment[name])}
    for name in sorted(forwarded - secrets):
        if launch.launcher == PDSH and UNSAFE.search(environment[name]):
            raise UserError(
                f"{name}: DeepSpeed forwards it, and a remote shell would change its value; "
                "unset it"
            )
    kept = {name: value for name, value in environment.items() if name not in secrets}
    return {**kept, **launcher_variables(launch), VARIABLES_FILE: str(env_file)}
