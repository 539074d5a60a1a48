"""Preflight: check, before anything is started, that each pod has what a run needs and the same
software as the master.

    python -m zeropods.pods.preflight EXPECTATION

runs on all pods at once, over ssh or started by their agents: it prints what it finds there as one
line of JSON, does not import torch, changes nothing, and ends by itself after `PROBE_SECONDS`.
"""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any, Literal

import psutil

from zeropods.errors import UserError
from zeropods.files import sha256
from zeropods.measure.environment import versions
from zeropods.pods.gpus import visible_gpus
from zeropods.pods.hostfile import Host
from zeropods.pods.ssh import SSH_FAILED, ssh_argv
from zeropods.pods.wire import Agents, Message, RefusedError, WireError, ask_each
from zeropods.programs import (
    PROGRAMS,
    find_program,
    is_free,
    lacking_for_operation,
    required_programs,
)
from zeropods.tables import GIB, Table

MOST_PROBES = 64
"""Number of pods that are asked at a time."""
PROBE_SECONDS = 20
"""Seconds after which the probe on a pod ends itself."""
PROBE_ANSWER_SECONDS = PROBE_SECONDS + 5.0
"""Seconds until a pod that has not answered is given up; one that cannot be reached fails after
`CONNECT_SECONDS`."""
MAX_OUTPUT_BYTES = 1_048_576
"""Bytes that are read from each output stream; what comes after them is ignored."""
TIMED_OUT = -signal.SIGKILL
"""Exit status of a command that `run_all` has killed."""
NO_ANSWER = "no answer"
"""What is said of a pod that may live although it did not answer in time begins so."""
KILLED = f"{NO_ANSWER}: its check was killed, or took more than {PROBE_SECONDS} s"
LATE_ANSWER_SECONDS = 5.0
"""Seconds by which an agent's answer may come later than the end of the check that it was asked
for."""
AGENT_REFUSED = 254
"""Stands for the exit status of a check that an agent refused to run."""
NOT_STARTED = (126, 127)
"""Exit statuses of a shell that cannot run, or does not find, a program."""
PYTHON_PATH = "PYTHONPATH"
ANEW = "'zeropods pods down' and 'zeropods pods up'"
"""In remedies: the commands that start a cluster anew."""
SSH_MESSAGES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "host key changed",
        f"another machine answers at {{address}}, or the pod was recreated: {ANEW}; a host of your "
        "own that you trust: ssh-keygen -R {address}",
    ),
    "host key is known|Host key verification failed": (
        "host key unknown",
        f"restart the cluster: {ANEW}; a host of your own: log in once by hand, and compare its "
        "key",
    ),
    "Permission denied|Too many authentication failures": (
        "key refused",
        f"the pod belongs to another cluster: {ANEW}; a host of your own: ssh-copy-id {{address}}",
    ),
    "Connection refused": (
        "nothing listens",
        f"no sshd at {{address}}; {ANEW}; a host of your own: start its sshd",
    ),
    "Could not resolve hostname": (
        "unknown name",
        "correct '{address}' in the hostfile, or add it to ~/.ssh/config",
    ),
    # `imeout` is in `Timeout` and in `timeout`.
    "timed out|imeout|No route to host|Network is unreachable": (
        NO_ANSWER,
        "{address} is cut off, not running, or its sshd hangs; see 'zeropods pods list'",
    ),
}
"""Meaning of ssh's messages, by a regular expression that is found in them: the value of the check
in a few words, and the remedy, in which `{address}` stands for the pod's. The first that is found
counts."""
COMPARED_PACKAGES = ("zeropods", "torch", "transformers", "deepspeed", "accelerate")
"""Packages of which each pod must have the master's version."""
ROOMY_DISK_BYTES = 10 * GIB
"""Free bytes below which there is a warning: a checkpoint of t5-large with its optimizer takes
9 GiB."""
DISK_BYTES = GIB
"""Free bytes below which the project folder counts as full."""
TEMPORARY_BYTES = GIB // 4
"""Free bytes in /tmp, and in /dev/shm, below which there is a warning."""
MEMORY_BYTES = 2 * GIB
"""Bytes of available memory below which there is a warning."""
GPU_FREE_FRACTION = 0.9
"""Share of a GPU's memory that should be free; less is free where somebody else uses the GPU."""
CLOCK_WARNING_SECONDS = 5.0
CLOCK_FAILED_SECONDS = 60.0
"""Seconds by which a pod's clock may differ from the master's without a warning, and without a
failure."""
WITHOUT_GPUS = "train without GPUs, on pods of 'zeropods pods up --nvidia-gpu 0'"
"""Remedy for pods that have fewer GPUs than processes."""


@dataclass(frozen=True)
class Operation:
    """An operation of DeepSpeed, which is compiled on a pod before it is used there first."""

    compiling: str
    """The remedy where it is not compiled yet."""
    installing: str
    """The remedy where it cannot be compiled."""
    is_for_gpus: bool = False
    """Whether CUDA's own compiler compiles it, and processes without a GPU do not use it."""


OFFLOAD_OPERATION = "cpu_adam"
"""DeepSpeed's name of the operation that optimizer offload needs."""
OPERATIONS = {
    OFFLOAD_OPERATION: Operation(
        compiling=(
            "the first run compiles it, taking a minute or so; or run "
            "'python tools/compile_ops.py' on the pod"
        ),
        installing=(
            "on the pod: apt-get install g++ python3-dev, pip install ninja; optimizer offload "
            "needs it"
        ),
    ),
    "quantizer": Operation(
        compiling="the first run compiles it, taking some minutes",
        installing=(
            "on the pod: apt-get install g++ python3-dev, pip install ninja, and the CUDA toolkit; "
            "ZeRO++ needs it for what it sends quantized"
        ),
        is_for_gpus=True,
    ),
}
"""The operations that a run may need, by DeepSpeed's names."""


@dataclass(frozen=True)
class Check:
    """The result of checking one thing."""

    check: str
    """Name of the thing that was checked, as a heading."""
    verdict: Literal["ok", "warning", "failed"]
    value: str
    """What was found, short enough for a table cell."""
    remedy: str = ""
    """What to do about it; empty where all is well."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a pod must have."""

    project: str
    """Absolute path of the folder in which the run starts."""
    versions: dict[str, str | None]
    """The master's versions of Python and of packages, by name; None where it lacks the package."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """The master's SHA-256 of files that must be the same on all pods, by path, relative to the
    project or absolute."""
    slots: int = 1
    master_port: int | None = None
    """Port that must be free on the first pod; None where no port is checked."""
    operations: Sequence[str] | None = None
    """Names of the DeepSpeed operations that the run needs, of those in `OPERATIONS`; None where no
    run is planned yet."""
    programs: bool = False
    """Whether the machine starts others: then it needs the programs for that."""
    python_path: str | None = None
    """The master's PYTHONPATH, with which the check runs, since ranks get it too."""

    @classmethod
    def of_this_machine(cls, project: Path, files: tuple[str, ...] = (), **run: Any) -> Expectation:
        """What pods need in order to match this machine.

        Args:
            files: paths of files such as the training script, relative to the project or absolute.
            run: the other fields of the expectation.
        """
        folder = project.absolute()
        digests = {file: _digest(folder / file) for file in files}
        return cls(
            project=str(folder),
            versions=versions(),
            digests=digests,
            python_path=absolute_python_path(),
            **run,
        )


@dataclass(frozen=True, kw_only=True)
class PodChecks:
    """The checks of one pod."""

    pod: str
    address: str
    checks: tuple[Check, ...]
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs on which its processes would train."""
    gpu_models: tuple[str, ...] = ()
    """Names of the models of these GPUs."""
    hostname: str = ""
    """Its machine's name, or its container's; empty where it gave no answer."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Preflight:
    """The checks of all pods, in the order of the hostfile; shown as pods x checks, with the
    remedies below."""

    pods: tuple[PodChecks, ...]
    title: str = ""

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings are allowed."""
        return all(check.verdict != "failed" for pod in self.pods for check in pod.checks)

    def silent_pods(self) -> list[str]:
        """Names of the pods that did not answer in time; none where another check failed, which
        would only fail again."""
        names = []
        for pod in self.pods:
            for check in pod.checks:
                if check.verdict != "failed":
                    continue
                if not check.value.startswith(NO_ANSWER):
                    return []
                names.append(pod.pod)
        return names

    def remedies(self) -> list[str]:
        """A line for each check that is not ok, failures first: pod, check, value, remedy."""
        failures = []
        warnings = []
        for pod in self.pods:
            place = pod.pod
            if pod.address not in ("", pod.pod):
                place = f"{pod.pod} ({pod.address})"
            for check in pod.checks:
                line = f"{place}: {check.check} {check.verdict}: {check.value}; {check.remedy}"
                if check.verdict == "failed":
                    failures.append(line)
                elif check.verdict == "warning":
                    warnings.append(line)
        return failures + warnings

    def require(self) -> None:
        """Raise `UserError` with the first line of `remedies` where a check has failed."""
        if not self.ok:
            raise UserError(self.remedies()[0])

    def table(self) -> Table:
        """Table with a row for each pod, and a column for each check that was made on any pod; `-`
        stands where it was not made on this one."""
        headings = [check.check for pod in self.pods for check in pod.checks]
        rows = []
        for pod in self.pods:
            row = {"pod": pod.pod, **dict.fromkeys(headings, "-")}
            for check in pod.checks:
                value = check.value
                if check.verdict != "ok":
                    value = f"{check.verdict.upper()}: {value}"
                row[check.check] = value
            rows.append(row)
        return Table.of(rows, self.title)

    def _repr_html_(self) -> str:
        table = self.table().to_html()
        items = "".join(f"<li>{html.escape(line)}</li>" for line in self.remedies())
        if not items:
            return table
        return f"{table}<ul>{items}</ul>"

    def __repr__(self) -> str:
        """The table, then the remedies."""
        return "\n".join([str(self.table()), *self.remedies()])


def preflight(
    hosts: Sequence[Host],
    expected: Expectation,
    *,
    names: Sequence[str] | None = None,
    ssh_config: Path | None = None,
) -> Preflight:
    """Check all hosts over ssh, `MOST_PROBES` at a time; a dead one is given up within 3 s, one
    that hangs after `PROBE_ANSWER_SECONDS`.

    Args:
        names: names of the pods, for display; None for their addresses.
        ssh_config: the cluster's ssh configuration; None for the user's own.

    Raises:
        UserError: ssh is not installed here.
    """
    required_programs("ssh")

    def run_probes(first: int, batch: Sequence[Host]) -> list[CompletedProcess[str]]:
        commands = []
        for number, host in enumerate(batch, start=first):
            probe = probe_command(_expected_of(expected, number, host))
            commands.append(ssh_argv(ssh_config, host.address, ["sh", "-c", probe]))
        return run_all(commands)

    return _check_hosts(hosts, names, run_probes, ssh_check)


def preflight_by_agents(
    hosts: Sequence[Host],
    expected: Expectation,
    agents: Agents,
    secret: bytes,
    *,
    names: Sequence[str],
) -> Preflight:
    """Check all pods of a cluster as `preflight` does, but through their agents.

    Args:
        agents: addresses and control ports, in the order of the hosts.
        secret: the cluster's secret.
        names: names of the pods, for display.
    """

    def run_probes(first: int, batch: Sequence[Host]) -> list[CompletedProcess[str]]:
        requests = []
        for number, host in enumerate(batch, start=first):
            expectation = json.dumps(asdict(_expected_of(expected, number, host)))
            variables = python_path_variables(expected.python_path)
            requests.append(
                request_to_check(__spec__.name, [expectation], expected.project, variables)
            )
        batch_agents = agents[first : first + len(batch)]
        return run_by_agents(batch_agents, secret, requests, PROBE_ANSWER_SECONDS)

    return _check_hosts(hosts, names, run_probes, agent_check)


def _expected_of(expected: Expectation, number: int, host: Host) -> Expectation:
    """What is expected of the host with this number, counted from 0: it differs by slots and
    port."""
    # The run's port is needed on the first pod only, where its first rank listens.
    port = expected.master_port if number == 0 else None
    return replace(expected, slots=host.slots, master_port=port)


def _check_hosts(
    hosts: Sequence[Host],
    names: Sequence[str] | None,
    run_probes: Callable[[int, Sequence[Host]], list[CompletedProcess[str]]],
    check_reached: Callable[[CompletedProcess[str], str], Check],
) -> Preflight:
    """Run the probe on all hosts, `MOST_PROBES` at a time, and judge the answers.

    Args:
        names: as in `preflight`.
        run_probes: runs the probe on a batch of hosts, given the number of its first host and the
            batch; returns what each probe came to, in the order of the batch.
        check_reached: given what a probe came to and the address of its host, checks whether the
            host was reached.
    """
    pods: list[PodChecks] = []
    for first in range(0, len(hosts), MOST_PROBES):
        batch = hosts[first : first + MOST_PROBES]
        time_before = time.time()
        probes = run_probes(first, batch)
        time_after = time.time()
        for host, probe in zip(batch, probes, strict=True):
            name = names[len(pods)] if names else host.address
            reached = check_reached(probe, host.address)
            pod = PodChecks(pod=name, address=host.address, checks=(reached,))
            if reached.verdict == "ok":
                pod = _with_own_checks(pod, probe, time_before, time_after)
            # Compared with the pods before it, so that each pair is looked at once.
            for check in (shared_gpu(pod, pods), other_models(pod, pods)):
                if check is not None:
                    pod = replace(pod, checks=(*pod.checks, check))
            pods.append(pod)
    return Preflight(pods=tuple(pods))


def preflight_self(expected: Expectation) -> Preflight:
    """Check this machine alone, without ssh; also check that it has the programs to serve as a pod
    and start others."""
    command = probe_command(replace(expected, programs=True))
    time_before = time.time()
    [probe] = run_all([["sh", "-c", command]])
    time_after = time.time()
    unchecked = PodChecks(pod="self", address="", checks=())
    checked = _with_own_checks(unchecked, probe, time_before, time_after)
    return Preflight(pods=(checked,))


# The probe is run on each pod, and its answer is judged


def run_all(
    commands: Sequence[list[str]], seconds: float = PROBE_ANSWER_SECONDS
) -> list[CompletedProcess[str]]:
    """Run commands at once, and return what each came to, in their order.

    Those that still run after `seconds`, or when this process is interrupted, are killed with their
    groups; their status is then `TIMED_OUT`. Of each output stream the first `MAX_OUTPUT_BYTES` are
    returned.
    """
    with ExitStack() as stack:
        # Files instead of pipes, so that nothing has to be read while the commands run.
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for argv, output, error in zip(commands, outputs, errors, strict=True):
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=error,
                    start_new_session=True,
                )
                processes.append(process)
            deadline = time.monotonic() + seconds
            for process in processes:
                # One that runs into the limit is killed below, with all others that do.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        results = []
        for process, output, error in zip(processes, outputs, errors, strict=True):
            results.append(
                CompletedProcess(process.args, process.returncode, _text(output), _text(error))
            )
        return results


def request_to_check(
    module: str,
    arguments: Sequence[str],
    folder: str,
    variables: Mapping[str, str] | None = None,
) -> Message:
    """The message that asks an agent to run a module that checks its pod, see
    `StartedProcesses.check`.

    Args:
        folder: the module's working folder.
        variables: environment variables of the module, besides those that the agent gives it.
    """
    return {
        "do": "check",
        "module": module,
        "arguments": list(arguments),
        "folder": folder,
        "variables": dict(variables or {}),
    }


def run_by_agents(
    agents: Agents, secret: bytes, requests: Sequence[Message], seconds: float
) -> list[CompletedProcess[str]]:
    """Let agents run checks at once, and kill those that still run after `seconds`; `run_all` does
    the same with commands, such as those of ssh.

    Args:
        requests: a `request_to_check` for each agent.

    Returns:
        What each check came to, in the order of the agents. The status is `AGENT_REFUSED` where an
        agent refused to run the check, and `SSH_FAILED` where it gave no answer; then `stderr` says
        why.
    """
    limited_requests = [{**request, "seconds": seconds} for request in requests]
    results = []
    for answer in ask_each(agents, secret, limited_requests, seconds + LATE_ANSWER_SECONDS):
        if isinstance(answer, RefusedError):
            result = CompletedProcess("", AGENT_REFUSED, "", str(answer))
        elif isinstance(answer, WireError):
            result = CompletedProcess("", SSH_FAILED, "", str(answer))
        else:
            result = CompletedProcess("", answer["status"], answer["output"], answer["errors"])
        results.append(result)
    return results


def _text(file: IO[bytes]) -> str:
    """The first `MAX_OUTPUT_BYTES` of what a process has written to a file."""
    return os.pread(file.fileno(), MAX_OUTPUT_BYTES, 0).decode(errors="replace")


def probe_command(expected: Expectation) -> str:
    """The probe's shell command: in the project folder and with this interpreter, as DeepSpeed
    starts its ranks.

    On a pod without the project folder the probe runs in `/`, and itself says that the folder is
    missing. It does not run in the home folder: where that holds another clone named `zeropods`,
    Python would take the clone for the package.
    """
    argv = [sys.executable, "-m", __spec__.name, json.dumps(asdict(expected))]
    if expected.python_path:
        argv = ["env", f"{PYTHON_PATH}={expected.python_path}", *argv]
    return f"cd {shlex.quote(expected.project)} 2>/dev/null || cd /; exec {shlex.join(argv)}"


def absolute_python_path() -> str | None:
    """This process's PYTHONPATH, as it is meant in any working folder; None where it has none."""
    folders = os.environ.get(PYTHON_PATH, "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(folder) for folder in folders if folder) or None


def python_path_variables(python_path: str | None) -> dict[str, str]:
    """The environment variable with this PYTHONPATH; none where there is none."""
    return {PYTHON_PATH: python_path} if python_path else {}


def ssh_check(probe: CompletedProcess[str], address: str) -> Check:
    """The check whether ssh reached the pod; if not, the reason in a few words, and the remedy."""
    if probe.returncode == TIMED_OUT:
        remedy = (
            f"{address} hangs, or the storage of its project folder is gone; see 'zeropods pods "
            "list'"
        )
        return Check("ssh", "failed", f"{NO_ANSWER} in {PROBE_ANSWER_SECONDS:.0f} s", remedy)
    if probe.returncode != SSH_FAILED:
        return Check("ssh", "ok", "reached")
    for pattern, (value, remedy) in SSH_MESSAGES.items():
        if re.search(pattern, probe.stderr):
            return Check("ssh", "failed", value, remedy.format(address=address))
    value = _last_words(probe.stderr)
    if not value:
        # ssh fails without a word where a signal ended the command there, as the probe's own alarm
        # does.
        return Check("ssh", "failed", KILLED, f"end other programs on {address}, or try again")
    return Check("ssh", "failed", value, f"see what 'ssh -v {address}' says")


def agent_check(probe: CompletedProcess[str], address: str) -> Check:
    """The check whether a pod's agent ran the probe; if not, the reason in a few words, and the
    remedy."""
    if probe.returncode == AGENT_REFUSED:
        return Check("agent", "failed", "refused", probe.stderr)
    if probe.returncode == SSH_FAILED:
        remedy = f"{probe.stderr}; see 'zeropods pods list'"
        return Check("agent", "failed", NO_ANSWER, remedy)
    if probe.returncode < 0:
        # A signal has ended the probe, as its own alarm does.
        return Check("agent", "failed", KILLED, f"end other programs on {address}, or try again")
    return Check("agent", "ok", "reached")


def shared_gpu(pod: PodChecks, others: Sequence[PodChecks]) -> Check | None:
    """A check that is not ok, where a pod would train on a GPU on which one of the others would
    too; else None.

    NCCL refuses two processes of one host on one GPU. It takes two containers for two hosts, as
    their names differ; they train, but each slows the other down.
    """
    for other in others:
        shared = [gpu for gpu in pod.gpus if gpu in other.gpus]
        if shared:
            value = f"{shared[0]} is also {other.pod}'s"
            if pod.hostname != other.hostname:
                return Check("GPUs", "warning", value, "give each container a GPU of its own")
            remedy = (
                "both are one machine: name it once in the hostfile, with a slot for each of its "
                f"GPUs, or {WITHOUT_GPUS}"
            )
            return Check("GPUs", "failed", value, remedy)
    return None


def other_models(pod: PodChecks, others: Sequence[PodChecks]) -> Check | None:
    """A check that is not ok, where a pod and the first of the others that has answered would train
    on GPUs of different models, or only one of the two on GPUs; else None.

    GPUs of several models train together, each step as fast as the slowest of them, on batches that
    fit the smallest. A process with a GPU and one without do not: they would wait for each other,
    the one by NCCL and the other by gloo.
    """
    # Only a pod that has answered has a host name.
    first = next((other for other in others if other.hostname), None)
    if first is None or not pod.hostname or set(pod.gpu_models) == set(first.gpu_models):
        return None
    value = f"{_names_of(pod.gpu_models)}; {first.pod} has {_names_of(first.gpu_models)}"
    if not (pod.gpu_models and first.gpu_models):
        return Check("GPU model", "failed", value, f"give all pods GPUs, or {WITHOUT_GPUS}")
    remedy = (
        "a step is as fast as the slowest GPU: use machines of one kind, or name one kind for CML "
        "workers with --accelerator-label"
    )
    return Check("GPU model", "warning", value, remedy)


def _names_of(models: Collection[str]) -> str:
    """The different models of a pod's GPUs in words."""
    return " and ".join(sorted(set(models))) or "no GPU"


def _with_own_checks(
    pod: PodChecks, probe: CompletedProcess[str], time_before: float, time_after: float
) -> PodChecks:
    """A pod, and in addition the checks that it has made on itself and the check of its clock; or,
    where it has made none, a failed check `python` that says why.

    Args:
        pod: the pod with its checks so far, whether it was reached.
        probe: what the probe that ran on it came to.
        time_before: when the pod was asked, in seconds since 1970.
        time_after: when it had answered.
    """
    if probe.returncode in NOT_STARTED:
        remedy = f"{sys.executable} is not on the pod; share the project folder"
        return replace(pod, checks=(*pod.checks, Check("python", "failed", "missing", remedy)))
    # The shell's start-up files may have written other lines before the answer.
    lines = [line for line in probe.stdout.splitlines() if line.startswith("{")]
    try:
        answer = json.loads(lines[-1] if lines else "")
        checks = [Check(**check) for check in answer["checks"]]
        clock = check_clock(answer["time_seconds"], time_before, time_after)
        return replace(
            pod,
            checks=(*pod.checks, *checks, clock),
            gpus=tuple(answer["gpus"]),
            # Another version of zeropods, which a check names, may not say this.
            gpu_models=tuple(answer.get("gpu_models", ())),
            hostname=answer["hostname"],
        )
    except (ValueError, KeyError, TypeError):
        # There is no answer, or one of another version of zeropods.
        value = _last_words(probe.stderr) or f"ended with status {probe.returncode}"
        remedy = "install the same zeropods with its requirements on the pod"
        return replace(pod, checks=(*pod.checks, Check("python", "failed", value, remedy)))


def _last_words(errors: str) -> str:
    """The last line of stderr that is not blank, cut to what a table cell can show."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if not lines:
        return ""
    return "".join(filter(str.isprintable, lines[-1]))[:200]


# The checks that run on a pod


@dataclass(frozen=True)
class GpuState:
    """A GPU that processes of this machine may use."""

    name: str
    """As CUDA_VISIBLE_DEVICES has it: its number, if nothing else was said."""
    uuid: str
    free_bytes: int
    total_bytes: int
    model: str = ""
    """Its model as NVML names it, such as `NVIDIA H100 80GB HBM3`."""


def checks_here(expected: Expectation, gpus: Sequence[GpuState]) -> list[Check]:
    """All checks of this machine except that of its clock, in the order of the columns of
    `Preflight`'s table."""
    checks = []
    if expected.programs:
        checks.append(check_programs())
    versions_here = versions()
    for name in ("python", *COMPARED_PACKAGES):
        checks.append(check_version(name, versions_here.get(name), expected.versions.get(name)))
    checks += [
        check_operations(
            lacking_operations(expected.operations, has_gpus=bool(gpus)),
            are_needed=expected.operations is not None,
        ),
        check_project(expected),
        check_disk(_free_bytes(expected.project), _free_bytes("/tmp"), _free_bytes("/dev/shm")),
        check_memory(psutil.virtual_memory().available),
        *check_gpus(gpus, expected.slots, len(os.sched_getaffinity(0))),
    ]
    if expected.master_port is not None:
        checks.append(check_port(expected.master_port))
    return checks


def _check(
    check: str, value: str, remedy: str = "", verdict: Literal["warning", "failed"] = "failed"
) -> Check:
    """A check with this verdict where there is a remedy, and ok where there is none."""
    return Check(check, verdict if remedy else "ok", value, remedy)


def check_programs() -> Check:
    """Check that this machine has the programs to serve as a pod and to start others over pdsh;
    without them, agents do it."""
    missing = [f"no {name}" for name in PROGRAMS if find_program(name) is None]
    if missing:
        remedy = (
            "launches go through the pods' agents; for pdsh: apt-get install openssh-client "
            "openssh-server pdsh"
        )
        return _check("programs", ", ".join(missing), remedy, "warning")
    return _check("programs", ", ".join(PROGRAMS))


def check_version(name: str, version: str | None, wanted: str | None) -> Check:
    """Check that a package, or Python, has the version `wanted`, which is the master's; another
    patch release of Python is only a warning. None stands for a package that is missing."""
    value = version or "missing"
    if wanted is None:
        return _check(name, value, f"the master has no {name}; install requirements.txt there")
    if version == wanted:
        return _check(name, value)
    if name == "python":
        is_same_release = value.split(".")[:2] == wanted.split(".")[:2]
        remedy = f"the master has {wanted}; use the same interpreter on all pods"
        return _check(name, value, remedy, "warning" if is_same_release else "failed")
    requirement = f"{name}=={wanted.split('+')[0]}"
    return _check(name, value, f"the master has {wanted}; on the pod: pip install {requirement}")


def lacking_operations(
    operations: Sequence[str] | None, *, has_gpus: bool
) -> dict[str, Collection[str] | None]:
    """What this machine lacks to compile operations of DeepSpeed.

    Args:
        operations: as in `Expectation`.
        has_gpus: whether processes of this machine train on GPUs; otherwise operations for GPUs are
            left out.

    Returns:
        By the name of the operation, the names of what is missing: empty where it can be compiled,
        None where it is compiled already.
    """
    if operations is None:
        # No run is planned, so this is what any run on this machine may need.
        operations = (OFFLOAD_OPERATION,)
    lacking: dict[str, Collection[str] | None] = {}
    for name in operations:
        is_for_gpus = OPERATIONS[name].is_for_gpus
        if has_gpus or not is_for_gpus:
            lacking[name] = lacking_for_operation(name, cuda=is_for_gpus)
    return lacking


def check_operations(
    lacking: Mapping[str, Collection[str] | None], *, are_needed: bool = True
) -> Check:
    """Check that operations of DeepSpeed can be loaded; the worst of them is the value.

    Args:
        lacking: as `lacking_operations` returns it.
        are_needed: whether a run is planned that needs them.
    """
    if not lacking:
        return _check("ops", "none needed")
    for name, missing in lacking.items():
        if missing:
            value = f"{name}: no {', no '.join(missing)}"
            verdict: Literal["warning", "failed"] = "failed" if are_needed else "warning"
            return _check("ops", value, OPERATIONS[name].installing, verdict)
    for name, missing in lacking.items():
        if missing is not None:
            return _check("ops", f"{name} not compiled", OPERATIONS[name].compiling, "warning")
    return _check("ops", "compiled")


def check_project(expected: Expectation) -> Check:
    """Check that the project folder is there and that its files are the same as the master's."""
    project = Path(expected.project)
    if not os.access(project, os.R_OK | os.X_OK):
        remedy = f"make {project} visible on the pod, as one folder for all pods"
        return _check("project", "missing", remedy)
    for name, wanted in expected.digests.items():
        digest = _digest(project / name)
        if digest != wanted:
            value = f"different {name}" if digest else f"no {name}"
            remedy = f"{project} is not the master's folder; share or copy it"
            return _check("project", value, remedy)
    return _check("project", "same files" if expected.digests else "there")


def check_disk(project: int, temporary: int, shared: int) -> Check:
    """Check the free bytes: for checkpoints in the project folder, for compilers in /tmp
    (`temporary`), and for shared tensors in /dev/shm (`shared`)."""
    if project < DISK_BYTES:
        return _check("disk", _gib(project), f"free up {_gib(DISK_BYTES)} in the project folder")
    for place, free in (("/tmp", temporary), ("/dev/shm", shared)):
        if free < TEMPORARY_BYTES:
            remedy = f"free up {_gib(TEMPORARY_BYTES)} in {place} on the pod"
            return _check("disk", f"{place} {_gib(free)}", remedy, "warning")
    if project < ROOMY_DISK_BYTES:
        remedy = "a large model's checkpoint may not fit in the project folder"
        return _check("disk", _gib(project), remedy, "warning")
    return _check("disk", _gib(project))


def check_memory(available: int) -> Check:
    """Check the bytes of memory that are available."""
    if available < MEMORY_BYTES:
        remedy = "end other programs on the pod, or add memory"
        return _check("memory", _gib(available), remedy, "warning")
    return _check("memory", _gib(available))


def check_gpus(gpus: Sequence[GpuState], slots: int, cores: int) -> tuple[Check, Check]:
    """Check that nobody else uses the GPUs, and that each process has a GPU or, without GPUs, a
    core."""
    if not gpus:
        return _check("GPU memory", "no GPU"), _check_cores(slots, cores)
    slots_remedy = ""
    if slots > len(gpus):
        slots_remedy = f"set slots={len(gpus)} or fewer in the hostfile, or {WITHOUT_GPUS}"
    return _check_gpu_memory(gpus), _check("slots", f"{slots} of {len(gpus)} GPU", slots_remedy)


def _check_cores(slots: int, cores: int) -> Check:
    value = f"{slots} on {cores} cores"
    if slots > cores:
        remedy = f"the pod has no GPU; processes will share cores: set slots={cores}"
        return _check("slots", value, remedy, "warning")
    return _check("slots", value)


def _check_gpu_memory(gpus: Sequence[GpuState]) -> Check:
    """Check that enough is free of the GPU of which the smallest share is free."""
    fullest = min(gpus, key=lambda gpu: gpu.free_bytes / gpu.total_bytes)
    value = f"{_gib(fullest.free_bytes)} of {_gib(fullest.total_bytes)}"
    if fullest.free_bytes / fullest.total_bytes < GPU_FREE_FRACTION:
        remedy = f"see 'nvidia-smi' on the pod: GPU {fullest.name} is in use"
        return _check("GPU memory", value, remedy, "warning")
    return _check("GPU memory", value)


def check_port(port: int) -> Check:
    """Check that a port is free on all addresses of this machine."""
    if is_free("", port):
        return _check("port", f"{port} free")
    remedy = "choose another --master_port, or end what listens there"
    return _check("port", f"{port} taken", remedy)


def check_clock(pod_time: float, time_before: float, time_after: float) -> Check:
    """Check the pod's clock against the master's times of asking and of the answer, all in seconds
    since 1970."""
    ahead = max(pod_time - time_after, 0.0)
    behind = max(time_before - pod_time, 0.0)
    difference = max(ahead, behind)
    if difference <= CLOCK_WARNING_SECONDS:
        return _check("clock", "same")
    direction = "ahead" if ahead else "behind"
    value = f"{difference:.0f} s {direction}"
    verdict: Literal["warning", "failed"] = "warning"
    if difference > CLOCK_FAILED_SECONDS:
        verdict = "failed"
    return _check("clock", value, "set the pod's clock with NTP", verdict)


def gpu_states() -> list[GpuState]:
    """The GPUs that processes of this machine may use, in CUDA's order; none where NVML does not
    tell."""
    import pynvml

    states = []
    try:
        pynvml.nvmlInit()
        for gpu in visible_gpus():
            handle = _part_of(pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            model = str(pynvml.nvmlDeviceGetName(handle))
            states.append(GpuState(gpu.name, uuid, memory.free, memory.total, model))
    except (pynvml.NVMLError, UserError):
        return []
    return states


def _part_of(nvml: Any, handle: Any) -> Any:
    """NVML's handle of the first part that this process can use of a GPU which MIG divides, since
    CUDA shows one part only; or of the whole GPU."""
    # NVML may refuse the question where the GPU, or its driver, knows no MIG.
    with suppress(nvml.NVMLError):
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            # A part that does not exist, or belongs to another container, is passed over.
            with suppress(nvml.NVMLError):
                return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
    return handle


def _digest(file: Path) -> str | None:
    """SHA-256 of a file; None where it cannot be read."""
    with suppress(OSError):
        return sha256(file)
    return None


def _free_bytes(folder: str) -> int:
    """Free bytes of a folder's file system; 0 where they cannot be determined."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def _gib(value: int) -> str:
    return f"{value / GIB:.1f} GiB"


def main() -> int:
    """Print this machine's checks, what is known of it and the time of its clock, as one line of
    JSON."""
    # Its signal ends this process where anything below hangs.
    signal.alarm(PROBE_SECONDS)
    expected = Expectation(**json.loads(sys.argv[1]))
    gpus = gpu_states()
    answer = {
        "checks": [asdict(check) for check in checks_here(expected, gpus)],
        "gpus": [gpu.uuid for gpu in gpus[: expected.slots]],
        "gpu_models": [gpu.model for gpu in gpus[: expected.slots]],
        "hostname": socket.gethostname(),
        "time_seconds": time.time(),
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
