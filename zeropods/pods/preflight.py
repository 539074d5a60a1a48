"""Preflight: check, before anything is started, that each pod has what a run needs and the same software as the master.

    python -m zeropods.pods.preflight EXPECTATION

runs on all pods at once, over ssh: it prints what it finds there as one line of JSON, does not import torch, changes
nothing, and ends by itself after `PROBE_SECONDS`.
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
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Literal

import psutil

from zeropods.errors import UserError
from zeropods.files import sha256
from zeropods.measure.environment import versions
from zeropods.pods.gpus import visible_gpus
from zeropods.pods.hostfile import Host
from zeropods.pods.ssh import ssh_argv
from zeropods.programs import PROGRAMS, find_program, is_free, lacking_for_operation, required_programs
from zeropods.tables import GIB, Table

MAX_AT_ONCE = 64
PROBE_SECONDS = 20
ANSWER_SECONDS = PROBE_SECONDS + 5.0
"""Seconds until a pod that has not answered is given up; one that cannot be reached fails after `CONNECT_SECONDS`."""
MAX_OUTPUT_BYTES = 1_048_576
"""Bytes that are read from each output stream; what comes after them is ignored."""
SSH_STATUS, TIMED_OUT = 255, -signal.SIGKILL
"""ssh's own exit status where the connection failed, and that of a command which `run_all` has killed."""
ANEW = "'zeropods pods down' and 'zeropods pods up'"
FAILURES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "host key changed",
        f"another machine answers at {{address}}, or the pod was recreated: {ANEW}; a host of your own that you trust: "
        "ssh-keygen -R {address}",
    ),
    "host key is known|Host key verification failed": (
        "host key unknown",
        f"restart the cluster: {ANEW}; a host of your own: log in once by hand, and compare its key",
    ),
    "Permission denied|Too many authentication failures": (
        "key refused",
        f"the pod belongs to another cluster: {ANEW}; a host of your own: ssh-copy-id {{address}}",
    ),
    "Connection refused": ("nothing listens", f"no sshd at {{address}}; {ANEW}; a host of your own: start its sshd"),
    "Could not resolve hostname": ("unknown name", "correct '{address}' in the hostfile, or add it to ~/.ssh/config"),
    "timed out|imeout|No route to host|Network is unreachable": (
        "no answer",
        "{address} is cut off, not running, or its sshd hangs; see 'zeropods pods list'",
    ),
}
"""Meaning of ssh's messages, by a regular expression that matches them: the value in a few words, and the remedy."""
PACKAGES = ("zeropods", "torch", "transformers", "deepspeed", "accelerate")
CPU_ADAM = "cpu_adam"
"""The DeepSpeed operation that optimizer offload needs."""
ROOMY_DISK_BYTES = 10 * GIB
"""Free bytes below which there is a warning: a checkpoint of t5-large with its optimizer takes 9 GiB."""
DISK_BYTES = GIB
"""Free bytes below which the project folder counts as full."""
TEMPORARY_BYTES = GIB // 4
MEMORY_BYTES = 2 * GIB
GPU_FREE_FRACTION = 0.9
"""Share of a GPU's memory that should be free; less is free where somebody else uses the GPU."""
CLOCK_WARNING_SECONDS, CLOCK_FAILED_SECONDS = 5.0, 60.0
WITHOUT_GPUS = "train without GPUs, on pods of 'zeropods pods up --nvidia-gpu 0'"
"""Remedy for pods that have fewer GPUs than processes."""


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
    """The master's SHA-256 of files that must be the same on all pods, by path, relative to the project or absolute."""
    slots: int = 1
    master_port: int | None = None
    """Port that must be free on the first pod; None where no port is checked."""
    offload: bool | None = None
    """Whether the run needs CPU Adam; None where no run is planned yet."""
    programs: bool = False
    """Whether the machine starts others: then it needs the programs for that."""

    @classmethod
    def of_this_machine(cls, project: Path, files: tuple[str, ...] = (), **run: Any) -> Expectation:
        """What pods need in order to match this machine.

        Args:
            files: paths of files such as the training script, relative to the project or absolute.
            run: the other fields of the expectation.
        """
        folder = project.absolute()
        return cls(project=str(folder), versions=versions(), digests={f: _digest(folder / f) for f in files}, **run)


@dataclass(frozen=True, kw_only=True)
class PodChecks:
    """The checks of one pod."""

    pod: str
    address: str
    checks: tuple[Check, ...]
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs on which its processes would train."""
    hostname: str = ""
    """Its machine's name, or its container's."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Preflight:
    """The checks of all pods, in the order of the hostfile; shown as pods x checks, with the remedies below."""

    pods: tuple[PodChecks, ...]
    title: str = ""

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings are allowed."""
        return all(check.verdict != "failed" for pod in self.pods for check in pod.checks)

    def remedies(self) -> list[str]:
        """A line for each check that is not ok, failures first: pod, check, value, remedy."""
        found = [(pod, check) for pod in self.pods for check in pod.checks if check.verdict != "ok"]
        lines = []
        for pod, check in sorted(found, key=lambda each: each[1].verdict != "failed"):
            place = pod.pod if pod.address in ("", pod.pod) else f"{pod.pod} ({pod.address})"
            lines.append(f"{place}: {check.check} {check.verdict}: {check.value}; {check.remedy}")
        return lines

    def require(self) -> None:
        """Raise `UserError` with the first line of `remedies` where a check has failed."""
        if not self.ok:
            raise UserError(self.remedies()[0])

    def table(self) -> Table:
        """Table with a row for each pod and a column for each check that was made on any pod."""
        headings = dict.fromkeys((check.check for pod in self.pods for check in pod.checks), "-")
        rows = []
        for pod in self.pods:
            shown = {c.check: c.value if c.verdict == "ok" else f"{c.verdict.upper()}: {c.value}" for c in pod.checks}
            rows.append({"pod": pod.pod, **headings, **shown})
        return Table.of(rows, self.title)

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.remedies())
        return self.table().to_html() + (f"<ul>{lines}</ul>" if lines else "")

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
    """Check all hosts in parallel; a dead one is given up within 3 s, one that hangs after `ANSWER_SECONDS`.

    Args:
        names: names of the pods, for display; None for their addresses.
        ssh_config: the cluster's ssh configuration; None for the user's own.

    Raises:
        UserError: ssh is not installed here.
    """
    required_programs("ssh")
    pods: list[PodChecks] = []
    while some := hosts[len(pods) : len(pods) + MAX_AT_ONCE]:
        shells = []
        for number, host in enumerate(some, start=len(pods)):
            # The run's port is needed on the first pod only, where its first rank listens.
            wanted = replace(expected, slots=host.slots, master_port=None if number else expected.master_port)
            shells.append(ssh_argv(ssh_config, host.address, ["sh", "-c", probe_command(wanted)]))
        asked = time.time()
        ends = run_all(shells)
        answered = time.time()
        for host, end in zip(some, ends, strict=True):
            name = names[len(pods)] if names else host.address
            reached = ssh_check(end, host.address)
            pod = PodChecks(pod=name, address=host.address, checks=(reached,))
            if reached.verdict == "ok":
                pod = _judged(pod, end, asked, answered)
            shared = shared_gpu(pod, pods)
            pods.append(pod if shared is None else replace(pod, checks=(*pod.checks, shared)))
    return Preflight(pods=tuple(pods))


def preflight_self(expected: Expectation) -> Preflight:
    """Check this machine alone, without ssh; also check that it has the programs to serve as a pod and start others."""
    asked = time.time()
    (end,) = run_all([["sh", "-c", probe_command(replace(expected, programs=True))]])
    return Preflight(pods=(_judged(PodChecks(pod="self", address="", checks=()), end, asked, time.time()),))


# The probe is run on each pod, and its answer is judged


def run_all(commands: Sequence[list[str]], seconds: float = ANSWER_SECONDS) -> list[CompletedProcess[str]]:
    """Run commands at once; those still running at the time limit or on an interrupt are killed with their groups."""
    with ExitStack() as stack:
        # Files instead of pipes, so that nothing has to be read while the commands run.
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in commands]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for argv, (output, errors) in zip(commands, files, strict=True):
                how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors, "start_new_session": True}
                processes.append(subprocess.Popen(argv, **how))  # type: ignore[call-overload]
            deadline = time.monotonic() + seconds
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said = [[os.pread(file.fileno(), MAX_OUTPUT_BYTES, 0).decode(errors="replace") for file in of] for of in files]
        return [CompletedProcess(p.args, p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def probe_command(expected: Expectation) -> str:
    """The probe's shell command: in the project folder and with this interpreter, as DeepSpeed starts its ranks.

    A pod without the project folder is asked from `/`, and says itself what it lacks: in a home folder that holds
    another clone named `zeropods`, Python would take that folder for the package.
    """
    argv = [sys.executable, "-m", __spec__.name, json.dumps(asdict(expected))]
    return f"cd {shlex.quote(expected.project)} 2>/dev/null || cd /; exec {shlex.join(argv)}"


def ssh_check(end: CompletedProcess[str], address: str) -> Check:
    """Whether ssh reached the pod; if not, the reason in a few words, and the remedy."""
    if end.returncode == TIMED_OUT:
        remedy = f"{address} hangs, or the storage of its project folder is gone; see 'zeropods pods list'"
        return Check("ssh", "failed", f"no answer in {ANSWER_SECONDS:.0f} s", remedy)
    if end.returncode != SSH_STATUS:
        return Check("ssh", "ok", "reached")
    for pattern, (value, remedy) in FAILURES.items():
        if re.search(pattern, end.stderr):
            return Check("ssh", "failed", value, remedy.format(address=address))
    return Check("ssh", "failed", _last_words(end.stderr) or "ssh failed", f"see what 'ssh -v {address}' says")


def shared_gpu(pod: PodChecks, others: Sequence[PodChecks]) -> Check | None:
    """A check that is not ok, where a pod would train on a GPU on which one of the others trains; else None.

    NCCL refuses two processes of one host on one GPU. It takes two containers for two hosts, as their names differ;
    they train, but each slows the other down.
    """
    for other in others:
        shared = [gpu for gpu in pod.gpus if gpu in other.gpus]
        if shared:
            value = f"{shared[0]} is also {other.pod}'s"
            if pod.hostname != other.hostname:
                return Check("GPUs", "warning", value, "give each container a GPU of its own")
            remedy = "both are one machine: name it once in the hostfile, with a slot for each of its GPUs"
            return Check("GPUs", "failed", value, f"{remedy}, or {WITHOUT_GPUS}")
    return None


def _judged(pod: PodChecks, end: CompletedProcess[str], asked: float, answered: float) -> PodChecks:
    """A pod with the checks that it has made on itself, and that of its clock; or one that says why there are none.

    Args:
        pod: with the checks that came before.
        asked, answered: when the pod was asked and when it had answered, in seconds since 1970.
    """
    if end.returncode in (126, 127):
        remedy = f"{sys.executable} is not on the pod; share the project folder"
        return replace(pod, checks=(*pod.checks, Check("python", "failed", "missing", remedy)))
    # The shell's start-up files may have written other lines before the answer.
    answer = next((line for line in reversed(end.stdout.splitlines()) if line.startswith("{")), "")
    try:
        found = json.loads(answer)
        checks = [Check(**check) for check in found["checks"]]
        clock = check_clock(found["time_seconds"], asked, answered)
        gpus, hostname = tuple(found["gpus"]), found["hostname"]
        return replace(pod, checks=(*pod.checks, *checks, clock), gpus=gpus, hostname=hostname)
    except (ValueError, KeyError, TypeError):
        value = _last_words(end.stderr) or f"ended with status {end.returncode}"
        remedy = "install the same zeropods with its requirements on the pod"
        return replace(pod, checks=(*pod.checks, Check("python", "failed", value, remedy)))


def _last_words(errors: str) -> str:
    """The last line of stderr that is not blank, cut to what a table cell can show."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return "".join(filter(str.isprintable, lines[-1]))[:200] if lines else ""


# The checks that run on a pod


@dataclass(frozen=True)
class GpuState:
    """A GPU that processes of this machine may use."""

    name: str
    """As CUDA_VISIBLE_DEVICES has it: its number, if nothing else was said."""
    uuid: str
    free_bytes: int
    total_bytes: int


def look(expected: Expectation, gpus: Sequence[GpuState]) -> list[Check]:
    """All checks of this machine except that of its clock, in the order of the table's columns."""
    found, memory = versions(), psutil.virtual_memory().available
    short = "end other programs on the pod, or add memory" if memory < MEMORY_BYTES else ""
    checks = [
        *(check_version(name, found.get(name), expected.versions.get(name)) for name in ("python", *PACKAGES)),
        check_operations(lacking_for_operation(CPU_ADAM), expected.offload),
        check_project(expected),
        check_disk(*map(_free_bytes, (expected.project, "/tmp", "/dev/shm"))),
        _check("memory", _gib(memory), short, "warning"),
        *check_gpus(gpus, expected.slots, len(os.sched_getaffinity(0))),
    ]
    if expected.programs:
        missing = [f"no {name}" for name in PROGRAMS if find_program(name) is None]
        remedy = "apt-get install openssh-client openssh-server pdsh" if missing else ""
        checks.insert(0, _check("programs", ", ".join(missing or PROGRAMS), remedy))
    if (port := expected.master_port) is not None:
        taken = "" if is_free("", port) else "choose another --master_port, or end what listens there"
        checks.append(_check("port", f"{port} {'taken' if taken else 'free'}", taken))
    return checks


def _check(check: str, value: str, remedy: str = "", verdict: Literal["warning", "failed"] = "failed") -> Check:
    """A check that is ok where there is no remedy."""
    return Check(check, verdict if remedy else "ok", value, remedy)


def check_version(name: str, found: str | None, wanted: str | None) -> Check:
    """Check that a package, or Python, has the master's version; another patch release of Python is only a warning."""
    value = found or "missing"
    if wanted is None:
        return _check(name, value, f"the master has no {name}; install requirements.txt there")
    if found == wanted:
        return _check(name, value)
    if name == "python":
        same_release = value.split(".")[:2] == wanted.split(".")[:2]
        remedy = f"the master has {wanted}; use the same interpreter on all pods"
        return _check(name, value, remedy, "warning" if same_release else "failed")
    return _check(name, value, f"the master has {wanted}; on the pod: pip install {name}=={wanted.split('+')[0]}")


def check_operations(lacking: Collection[str] | None, offload: bool | None) -> Check:
    """Check that the operation for optimizer offload can be loaded; `lacking` is from `lacking_for_operation`."""
    if offload is False or lacking is None:
        return _check("ops", "none needed" if offload is False else "compiled")
    if not lacking:
        remedy = "the first run compiles it, taking a minute or so; or run 'python tools/compile_ops.py' on the pod"
        return _check("ops", f"{CPU_ADAM} not compiled", remedy, "warning")
    remedy = "on the pod: apt-get install g++ python3-dev, pip install ninja; optimizer offload needs it"
    return _check("ops", f"{CPU_ADAM}: no {', no '.join(lacking)}", remedy, "failed" if offload else "warning")


def check_project(expected: Expectation) -> Check:
    """Check that the project folder is there and that its files are the same as the master's."""
    project = Path(expected.project)
    if not os.access(project, os.R_OK | os.X_OK):
        return _check("project", "missing", f"make {project} visible on the pod, as one folder for all pods")
    for name, wanted in expected.digests.items():
        found = _digest(project / name)
        if found != wanted:
            value = f"different {name}" if found else f"no {name}"
            return _check("project", value, f"{project} is not the master's folder; share or copy it")
    return _check("project", "same files" if expected.digests else "there")


def check_disk(project: int, temporary: int, shared: int) -> Check:
    """Check the free bytes for checkpoints in the project folder, compilers in /tmp and shared tensors in /dev/shm."""
    if project < DISK_BYTES:
        return _check("disk", _gib(project), f"free up {_gib(DISK_BYTES)} in the project folder")
    for place, free in (("/tmp", temporary), ("/dev/shm", shared)):
        if free < TEMPORARY_BYTES:
            remedy = f"free up {_gib(TEMPORARY_BYTES)} in {place} on the pod"
            return _check("disk", f"{place} {_gib(free)}", remedy, "warning")
    large = "" if project >= ROOMY_DISK_BYTES else "a large model's checkpoint may not fit in the project folder"
    return _check("disk", _gib(project), large, "warning")


def check_gpus(gpus: Sequence[GpuState], slots: int, cores: int) -> tuple[Check, Check]:
    """Check that nobody else uses the GPUs, and that each process has a GPU or core."""
    if not gpus:
        shared = f"the pod has no GPU; processes will share cores: set slots={cores}" if slots > cores else ""
        return _check("GPU memory", "no GPU"), _check("slots", f"{slots} on {cores} cores", shared, "warning")
    least = min(gpus, key=lambda gpu: gpu.free_bytes / gpu.total_bytes)
    free, total = least.free_bytes, least.total_bytes
    used = f"see 'nvidia-smi' on the pod: GPU {least.name} is in use" if free / total < GPU_FREE_FRACTION else ""
    few = f"set slots={len(gpus)} or fewer in the hostfile, or {WITHOUT_GPUS}" if slots > len(gpus) else ""
    memory = _check("GPU memory", f"{_gib(free)} of {_gib(total)}", used, "warning")
    return memory, _check("slots", f"{slots} of {len(gpus)} GPU", few)


def check_clock(pods: float, asked: float, answered: float) -> Check:
    """Check the pod's clock against the master's times of asking and of the answer, all in seconds since 1970."""
    ahead, behind = max(pods - answered, 0.0), max(asked - pods, 0.0)
    off = max(ahead, behind)
    if off <= CLOCK_WARNING_SECONDS:
        return _check("clock", "same")
    value = f"{off:.0f} s {'ahead' if ahead else 'behind'}"
    return _check("clock", value, "set the pod's clock with NTP", "failed" if off > CLOCK_FAILED_SECONDS else "warning")


def gpu_states() -> list[GpuState]:
    """The GPUs that processes of this machine may use, in CUDA's order; none where NVML does not tell."""
    import pynvml

    states = []
    try:
        pynvml.nvmlInit()
        for gpu in visible_gpus():
            handle = _part_of(pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            states.append(GpuState(gpu.name, pynvml.nvmlDeviceGetUUID(handle), memory.free, memory.total))
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
    expected, gpus = Expectation(**json.loads(sys.argv[1])), gpu_states()
    answer = {
        "checks": [asdict(check) for check in look(expected, gpus)],
        "gpus": [gpu.uuid for gpu in gpus[: expected.slots]],
        "hostname": socket.gethostname(),
        "time_seconds": time.time(),
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
