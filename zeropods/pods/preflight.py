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
    "timed out|imeout|No route to host|Network is unreachable": (
        NO_ANSWER,
        "{address} is cut off, not running, or its sshd hangs; see 'zeropods pods list'",
    ),
}
"""Meaning of ssh's messages, by a regular expression that matches them: the value in a few words,
and the remedy."""
COMPARED_PACKAGES = ("zeropods", "torch", "transformers", "deepspeed", "accelerate")
ROOMY_DISK_BYTES = 10 * GIB
"""Free bytes below which there is a warning: a checkpoint of t5-large with its optimizer takes
9 GiB."""
DISK_BYTES = GIB
"""Free bytes below which the project folder counts as full."""
TEMPORARY_BYTES = GIB // 4
MEMORY_BYTES = 2 * GIB
GPU_FREE_FRACTION = 0.9
"""Share of a GPU's memory that should be free; less is free where somebody else uses the GPU."""
CLOCK_WARNING_SECONDS = 5.0
CLOCK_FAILED_SECONDS = 60.0
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
            python_path=os.environ.get(PYTHON_PATH),
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
    """Its machine's name, or its container's."""


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
                elif check.verdict != "ok":
                    warnings.append(line)
        return failures + warnings

    def require(self) -> None:
        """Raise `UserError` with the first line of `remedies` where a check has failed."""
        if not self.ok:
            raise UserError(self.remedies()[0])

    def table(self) -> Table:
        """Table with a row for each pod and a column for each check that was made on any pod."""
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
    """Check all hosts in parallel; a dead one is given up within 3 s, one that hangs after
    `PROBE_ANSWER_SECONDS`.

    Args:
        names: names of the pods, for display; None for their addresses.
        ssh_config: the cluster's ssh configuration; None for the user's own.

    Raises:
        UserError: ssh is not installed here.
    """
    required_programs("ssh")

    def probed(first: int, batch: Sequence[Host]) -> list[CompletedProcess[str]]:
        commands = []
        for number, host in enumerate(batch, start=first):
            probe = probe_command(_expected_of(expected, number, host))
            commands.append(ssh_argv(ssh_config, host.address, ["sh", "-c", probe]))
        return run_all(commands)

    return _checked(hosts, names, probed, ssh_check)


def preflight_by_agents(
    hosts: Sequence[Host],
    expected: Expectation,
    agents: Agents,
    secret: bytes,
    *,
    names: Sequence[str],
) -> Preflight:
    """Check all pods of a cluster in parallel, as `preflight` does, through their agents.

    Args:
        agents: addresses and control ports, in the order of the hosts.
        secret: the cluster's.
    """

    def probed(first: int, batch: Sequence[Host]) -> list[CompletedProcess[str]]:
        requests = []
        for number, host in enumerate(batch, start=first):
            expectation = json.dumps(asdict(_expected_of(expected, number, host)))
            variables = python_path_variables(expected.python_path)
            requests.append(
                request_to_check(__spec__.name, [expectation], expected.project, variables)
            )
        batch_agents = agents[first : first + len(batch)]
        return run_by_agents(batch_agents, secret, requests, PROBE_ANSWER_SECONDS)

    return _checked(hosts, names, probed, agent_check)


def _expected_of(expected: Expectation, number: int, host: Host) -> Expectation:
    """What is expected of the host with this number, counted from 0."""
    # The run's port is needed on the first pod only, where its first rank listens.
    port = expected.master_port if number == 0 else None
    return replace(expected, slots=host.slots, master_port=port)


def _checked(
    hosts: Sequence[Host],
    names: Sequence[str] | None,
    probed: Callable[[int, Sequence[Host]], list[CompletedProcess[str]]],
    check_reached: Callable[[CompletedProcess[str], str], Check],
) -> Preflight:
    """The checks of all hosts.

    Args:
        names: as in `preflight`.
        probed: runs the probe on some hosts, of which the first has this number.
        check_reached: whether a probe was reached at an address.
    """
    pods: list[PodChecks] = []
    for first in range(0, len(hosts), MOST_PROBES):
        batch = hosts[first : first + MOST_PROBES]
        time_before = time.time()
        ends = probed(first, batch)
        time_after = time.time()
        for host, end in zip(batch, ends, strict=True):
            name = names[len(pods)] if names else host.address
            reached = check_reached(end, host.address)
            pod = PodChecks(pod=name, address=host.address, checks=(reached,))
            if reached.verdict == "ok":
                pod = _judged(pod, end, time_before, time_after)
            for check in (shared_gpu(pod, pods), other_models(pod, pods)):
                if check is not None:
                    pod = replace(pod, checks=(*pod.checks, check))
            pods.append(pod)
    return Preflight(pods=tuple(pods))


def preflight_self(expected: Expectation) -> Preflight:
    """Check this machine alone, without ssh; also check that it has the programs to serve as a pod
    and start others."""
    probe = probe_command(replace(expected, programs=True))
    time_before = time.time()
    (end,) = run_all([["sh", "-c", probe]])
    time_after = time.time()
    unchecked = PodChecks(pod="self", address="", checks=())
    return Preflight(pods=(_judged(unchecked, end, time_before, time_after),))


# The probe is run on each pod, and its answer is judged


def run_all(
    commands: Sequence[list[str]], seconds: float = PROBE_ANSWER_SECONDS
) -> list[CompletedProcess[str]]:
    """Run commands at once; those still running at the time limit or on an interrupt are killed
    with their groups."""
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
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        ends = []
        for process, output, error in zip(processes, outputs, errors, strict=True):
            end = CompletedProcess(process.args, process.returncode, _text(output), _text(error))
            ends.append(end)
        return ends


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
    """Let agents run checks at once, and kill those that are still running at the time limit; as
    `run_all` does it over ssh.

    Args:
        requests: a `request_to_check` for each agent.

    Returns:
        What each check came to. Where an agent gave no answer, the status is `SSH_FAILED`, and
        `stderr` says why.
    """
    limited = [{**request, "seconds": seconds} for request in requests]
    ends = []
    for answer in ask_each(agents, secret, limited, seconds + LATE_ANSWER_SECONDS):
        if isinstance(answer, RefusedError):
            end = CompletedProcess("", AGENT_REFUSED, "", str(answer))
        elif isinstance(answer, WireError):
            end = CompletedProcess("", SSH_FAILED, "", str(answer))
        else:
            end = CompletedProcess("", answer["status"], answer["output"], answer["errors"])
        ends.append(end)
    return ends


def _text(file: IO[bytes]) -> str:
    """What a process has written to a file, from the beginning."""
    return os.pread(file.fileno(), MAX_OUTPUT_BYTES, 0).decode(errors="replace")


def probe_command(expected: Expectation) -> str:
    """The probe's shell command: in the project folder and with this interpreter, as DeepSpeed
    starts its ranks.

    A pod without the project folder is asked from `/`, and says itself what it lacks: in a home
    folder that holds another clone named `zeropods`, Python would take that folder for the package.
    """
    argv = [sys.executable, "-m", __spec__.name, json.dumps(asdict(expected))]
    if expected.python_path:
        argv = ["env", f"{PYTHON_PATH}={expected.python_path}", *argv]
    return f"cd {shlex.quote(expected.project)} 2>/dev/null || cd /; exec {shlex.join(argv)}"


def python_path_variables(python_path: str | None) -> dict[str, str]:
    """The environment variable with this PYTHONPATH; none where there is none."""
    return {PYTHON_PATH: python_path} if python_path else {}


def ssh_check(end: CompletedProcess[str], address: str) -> Check:
    """Whether ssh reached the pod; if not, the reason in a few words, and the remedy."""
    if end.returncode == TIMED_OUT:
        remedy = (
            f"{address} hangs, or the storage of its project folder is gone; see 'zeropods pods "
            "list'"
        )
        return Check("ssh", "failed", f"{NO_ANSWER} in {PROBE_ANSWER_SECONDS:.0f} s", remedy)
    if end.returncode != SSH_FAILED:
        return Check("ssh", "ok", "reached")
    for pattern, (value, remedy) in SSH_MESSAGES.items():
        if re.search(pattern, end.stderr):
            return Check("ssh", "failed", value, remedy.format(address=address))
    value = _last_words(end.stderr)
    if not value:
        # ssh fails without a word where a signal ended the command there, as the probe's own alarm
        # does.
        return Check("ssh", "failed", KILLED, f"end other programs on {address}, or try again")
    return Check("ssh", "failed", value, f"see what 'ssh -v {address}' says")


def agent_check(end: CompletedProcess[str], address: str) -> Check:
    """Whether a pod's agent ran the check; if not, the reason in a few words, and the remedy."""
    if end.returncode == AGENT_REFUSED:
        return Check("agent", "failed", "refused", end.stderr)
    if end.returncode == SSH_FAILED:
        remedy = f"{end.stderr}; see 'zeropods pods list'"
        return Check("agent", "failed", NO_ANSWER, remedy)
    if end.returncode < 0:
        # A signal has ended it, as the probe's own alarm does.
        return Check("agent", "failed", KILLED, f"end other programs on {address}, or try again")
    return Check("agent", "ok", "reached")


def shared_gpu(pod: PodChecks, others: Sequence[PodChecks]) -> Check | None:
    """A check that is not ok, where a pod would train on a GPU on which one of the others trains;
    else None.

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
    """A check that is not ok, where a pod would train on GPUs of other models than the first of the
    others that has answered, or one of the two without a GPU; else None.

    GPUs of several models train together, each step as fast as the slowest of them, on batches that
    fit the smallest. A process with a GPU and one without do not: they would wait for each other,
    the one by NCCL and the other by gloo.
    """
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
    """The models of a pod's GPUs in words."""
    return " and ".join(sorted(set(models))) or "no GPU"


def _judged(
    pod: PodChecks, finished: CompletedProcess[str], time_before: float, time_after: float
) -> PodChecks:
    """A pod with the checks that it has made on itself, and that of its clock; or one that says why
    there are none.

    Args:
        pod: the pod, with the check of its ssh.
        finished: the probe that ran on it.
        time_before: when the pod was asked, in seconds since 1970.
        time_after: when it had answered.
    """
    if finished.returncode in NOT_STARTED:
        remedy = f"{sys.executable} is not on the pod; share the project folder"
        return replace(pod, checks=(*pod.checks, Check("python", "failed", "missing", remedy)))
    # The shell's start-up files may have written other lines before the answer.
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
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
        value = _last_words(finished.stderr) or f"ended with status {finished.returncode}"
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
    """All checks of this machine except that of its clock, in the order of the table's columns."""
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
    """A check that is ok where there is no remedy."""
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
    """Check that a package, or Python, has the master's version; another patch release of Python is
    only a warning."""
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
    """What this machine lacks to compile operations, by their names, as `lacking_for_operation`
    says it; those for GPUs are left out on a machine without one.

    Args:
        operations: as in `Expectation`.
        has_gpus: whether processes of this machine train on GPUs.
    """
    if operations is None:
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
    """Check that operations of DeepSpeed can be loaded; `lacking` is from `lacking_operations`.

    Args:
        are_needed: whether the run that is planned needs them.
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
    """Check the free bytes for checkpoints in the project folder, compilers in /tmp and shared
    tensors in /dev/shm."""
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
    """Check that nobody else uses the GPUs, and that each process has a GPU or core."""
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
    """Check the GPU of which the smallest share is free."""
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
    """NVML's handle of the part that CUDA shows of a GPU which MIG divides, or of the whole GPU."""
    with suppress(nvml.NVMLError):
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            # Of several containers on one GPU, each can use only its own parts.
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
    """Print this machine's checks and the time of its clock."""
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
