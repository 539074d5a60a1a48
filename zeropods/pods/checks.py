"""Has a pod what a run needs, and is its software the master's? Looked at and judged on the pod itself.

    python -m zeropods.pods.checks EXPECTATION

It prints what it found as one line of JSON, imports no torch, changes nothing, and ends by itself after `SECONDS`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from zeropods.files import sha256
from zeropods.measure.environment import versions
from zeropods.programs import extension_cache, find_program, is_free, is_taken
from zeropods.tables import GIB

SECONDS = 20
PACKAGES = ("zeropods", "torch", "transformers", "deepspeed", "accelerate")
PROGRAMS = ("ssh", "ssh-keygen", "sshd", "pdsh")
CPU_ADAM = "cpu_adam"
"""DeepSpeed's operation that optimizer offload needs."""
ROOMY_DISK_BYTES = 10 * GIB
"""A checkpoint of t5-large with its optimizer takes 9 GiB."""
DISK_BYTES = GIB
"""With less free space the project folder is full."""
TEMPORARY_BYTES = GIB // 4
MEMORY_BYTES = 2 * GIB
GPU_FREE_FRACTION = 0.9
"""Share of a GPU's memory; less is free where somebody else uses it."""
CLOCK_WARNING_SECONDS, CLOCK_FAILED_SECONDS = 5.0, 60.0


@dataclass(frozen=True)
class Check:
    """What was found where one thing was looked at."""

    check: str
    """The thing, as a heading."""
    verdict: Literal["ok", "warning", "failed"]
    value: str
    """What was found, short enough for a cell of a table."""
    remedy: str = ""
    """What to do about it; empty where all is well."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a pod must have."""

    project: Path
    """The folder that the run starts in, absolute."""
    versions: dict[str, str | None]
    """The master's."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """The master's SHA-256 of files that all pods must see the same, by path relative to the project or absolute."""
    slots: int = 1
    master_port: int | None = None
    """Must be free, on the first pod."""
    offload: bool | None = None
    """Whether the run needs CPU Adam; None where no run is planned yet."""
    programs: bool = False
    """Whether it starts others: then it needs the programs for that."""

    @classmethod
    def of_this_machine(cls, project: Path, files: tuple[str, ...] = (), **run: Any) -> Expectation:
        """What pods need to be like this machine.

        Args:
            files: such as the training script, relative to the project or absolute.
            run: the other fields.
        """
        folder = project.absolute()
        return cls(project=folder, versions=versions(), digests={f: _digest(folder / f) for f in files}, **run)

    def to_json(self) -> str:
        """The document that `main` reads on the pod."""
        return json.dumps({**asdict(self), "project": str(self.project)})


def look(expected: Expectation) -> list[Check]:
    """All checks of this machine but that of its clock, in the order of the table's columns."""
    found, gpus = versions(), _gpus()
    free = {name: _free_bytes(name) for name in (str(expected.project), "/tmp", "/dev/shm")}
    checks = [
        *(check_version(name, found.get(name), expected.versions.get(name)) for name in ("python", *PACKAGES)),
        check_operations(operation_state(), expected.offload),
        check_project(expected),
        check_disk(*free.values()),
        check_memory(psutil.virtual_memory().available),
        check_gpu_memory(gpus),
        check_slots(expected.slots, len(gpus), len(os.sched_getaffinity(0))),
    ]
    if expected.programs:
        missing = [f"no {name}" for name in PROGRAMS if find_program(name) is None]
        remedy = "apt-get install openssh-client openssh-server pdsh"
        checks.insert(0, _check("programs", ", ".join(missing or PROGRAMS), failed=remedy if missing else ""))
    if expected.master_port is not None:
        taken = "" if is_free("", expected.master_port) else "choose another --master_port, or end what listens there"
        checks.append(_check("port", f"{expected.master_port} {'taken' if taken else 'free'}", failed=taken))
    return checks


def _check(check: str, value: str, *, failed: str = "", warning: str = "") -> Check:
    """What was found; it failed where there is a remedy for that, else is a warning where there is one for that."""
    return Check(check, "failed" if failed else "warning" if warning else "ok", value, failed or warning)


def check_version(name: str, found: str | None, wanted: str | None) -> Check:
    """The master's version of a package, or of Python, of which another patch release is let pass."""
    value = found or "missing"
    if wanted is None:
        return _check(name, value, failed=f"the master has no {name}; install requirements.txt there")
    if found == wanted:
        return _check(name, value)
    if name == "python":
        remedy = f"the master has {wanted}; use the same interpreter on all pods"
        same_release = value.split(".")[:2] == wanted.split(".")[:2]
        return _check(name, value, failed="" if same_release else remedy, warning=remedy)
    return _check(
        name, value, failed=f"the master has {wanted}; on the pod: pip install {name}=={wanted.split('+')[0]}"
    )


def check_operations(state: str, offload: bool | None) -> Check:
    """The operation that optimizer offload needs can be loaded; `state` is that of `operation_state`."""
    kind, _, detail = state.partition(": ")
    if offload is False or kind == "compiled":
        return _check("ops", "none needed" if offload is False else kind)
    if kind == "compilable":
        remedy = "the first run compiles it, a minute or so; or run 'python tools/compile_ops.py' on the pod"
        return _check("ops", f"{CPU_ADAM} not compiled", warning=remedy)
    if kind == "compiling":
        return _check("ops", f"{CPU_ADAM} being compiled", warning="wait a minute; the run would wait for it")
    remedy = "on the pod: apt-get install g++ python3-dev, pip install ninja; without it no optimizer offload"
    return _check("ops", f"{CPU_ADAM}: {detail}", failed=remedy if offload else "", warning=remedy)


def check_project(expected: Expectation) -> Check:
    """The project folder is there, and its files are the master's."""
    project = expected.project
    if not project.is_dir() or not os.access(project, os.R_OK | os.X_OK):
        return _check("project", "missing", failed=f"make {project} visible on the pod: one folder for all")
    for name, wanted in expected.digests.items():
        found = _digest(project / name)
        if wanted is None:
            return _check("project", f"no {name}", failed=f"name a file of {project} on the master")
        if found != wanted:
            value = f"another {name}" if found else f"no {name}"
            return _check("project", value, failed=f"{project} is not the master's folder; share or copy it")
    return _check("project", "same files" if expected.digests else "there")


def check_disk(project: int, temporary: int, shared: int) -> Check:
    """Free bytes for checkpoints in the project folder, for compilers in /tmp, for shared tensors in /dev/shm."""
    if project < DISK_BYTES:
        return _check("disk", _gib(project), failed=f"make {_gib(DISK_BYTES)} free below the project folder")
    for place, free in (("/tmp", temporary), ("/dev/shm", shared)):
        if free < TEMPORARY_BYTES:
            remedy = f"make {_gib(TEMPORARY_BYTES)} free in {place} of the pod"
            return _check("disk", f"{place} {_gib(free)}", warning=remedy)
    large = "" if project >= ROOMY_DISK_BYTES else "a large model's checkpoint may not fit below the project folder"
    return _check("disk", _gib(project), warning=large)


def check_memory(available: int) -> Check:
    """Main memory that could be used at once, in bytes."""
    short = available < MEMORY_BYTES
    return _check("memory", _gib(available), warning="end other programs on the pod, or add memory" if short else "")


def check_gpu_memory(gpus: Sequence[tuple[int, int]]) -> Check:
    """Nobody else uses the GPUs, of each of which free and total bytes are given."""
    if not gpus:
        return _check("GPU memory", "no GPU")
    least = min(range(len(gpus)), key=lambda gpu: gpus[gpu][0] / gpus[gpu][1])
    free, total = gpus[least]
    used = f"see 'nvidia-smi' on the pod: GPU {least} is in use" if free / total < GPU_FREE_FRACTION else ""
    return _check("GPU memory", f"{_gib(free)} of {_gib(total)}", warning=used)


def check_slots(slots: int, gpus: int, cores: int) -> Check:
    """A process has a GPU of its own; without GPUs, a core."""
    if gpus:
        few = f"say slots={gpus} in the hostfile, or fewer" if slots > gpus else ""
        return _check("slots", f"{slots} of {gpus} GPU", failed=few)
    shared = f"no GPU there; processes will share cores: say slots={cores}" if slots > cores else ""
    return _check("slots", f"{slots} on {cores} cores", warning=shared)


def check_clock(pods: float, asked: float, answered: float) -> Check:
    """The pod's clock agrees with the master's, in seconds since 1970 before it was asked and after it had answered."""
    ahead, behind = max(pods - answered, 0.0), max(asked - pods, 0.0)
    if max(ahead, behind) <= CLOCK_WARNING_SECONDS:
        return _check("clock", "same")
    remedy = "set the pod's clock by NTP"
    failed = remedy if max(ahead, behind) > CLOCK_FAILED_SECONDS else ""
    return _check("clock", f"{ahead:.0f} s ahead" if ahead else f"{behind:.0f} s behind", failed=failed, warning=remedy)


def operation_state() -> str:
    """CPU Adam on this machine: `compiled`, `compilable`, `compiling` or `impossible: WHAT IS MISSING`."""
    spec = find_spec("deepspeed")
    installed = Path(spec.origin).parent if spec and spec.origin else None
    folder = extension_cache() / CPU_ADAM
    # DeepSpeed may have been installed with its operations compiled (DS_BUILD_OPS).
    prebuilt = installed is not None and any((installed / "ops").glob(f"*/{CPU_ADAM}_op*.so"))
    if prebuilt or (folder / f"{CPU_ADAM}.so").is_file():
        return "compiled"
    if is_taken(folder):
        return "compiling"
    lacks = {
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")) is None,
        "Python.h": not Path(sysconfig.get_path("include"), "Python.h").is_file(),
        "ninja": shutil.which("ninja") is None and not Path(sys.executable).with_name("ninja").is_file(),
    }
    missing = [name for name, lack in lacks.items() if lack]
    return f"impossible: no {', no '.join(missing)}" if missing else "compilable"


def _gpus() -> list[tuple[int, int]]:
    """Free and total bytes of each GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        memories = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return [(memory.free, memory.total) for memory in memories]


def _digest(file: Path) -> str | None:
    """SHA-256 of a file; None where there is none that can be read."""
    try:
        return sha256(file)
    except OSError:
        return None


def _free_bytes(folder: str) -> int:
    """Free space of a folder's file system; 0 where it cannot be told."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _gib(value: int) -> str:
    return f"{value / GIB:.1f} GiB"


def main() -> int:
    """Print this machine's checks, and its clock."""
    signal.alarm(SECONDS)
    document = json.loads(sys.argv[1])
    checks = look(Expectation(**{**document, "project": Path(document["project"])}))
    print(json.dumps({"checks": [asdict(check) for check in checks], "time_seconds": time.time()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
