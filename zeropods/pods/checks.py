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
from collections.abc import Mapping, Sequence
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
CML_NAMES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP")
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

Gpus = Sequence[tuple[int, int]]
"""Free and total bytes of each GPU."""


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
    address: str | None = None
    """The pod's address; None for this machine itself."""
    master_port: int | None = None
    """Must be free, on the first pod."""
    offload: bool | None = None
    """Whether the run needs CPU Adam; None where no run is planned yet."""
    cml: bool = False
    """Whether the pods are CML's."""

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
    places = {"project": expected.project, "/tmp": Path("/tmp"), "/dev/shm": Path("/dev/shm")}
    checks = [
        *([check_programs()] if expected.address is None else []),
        check_python(found, expected),
        *(check_package(name, found, expected) for name in PACKAGES),
        check_operations(operation_state(), expected.offload),
        check_project(expected),
        check_disk({name: _free_bytes(folder) for name, folder in places.items()}, expected.project),
        check_memory(psutil.virtual_memory().available),
        check_gpu_memory(gpus),
        check_slots(expected.slots, len(gpus), len(os.sched_getaffinity(0))),
    ]
    if expected.master_port is not None:
        checks.append(check_port(expected.master_port))
    if expected.cml:
        checks.append(check_cml(os.environ, expected.address))
    return checks


def check_programs() -> Check:
    """What a pod that starts and serves others needs."""
    missing = [name for name in PROGRAMS if find_program(name) is None]
    if missing:
        remedy = "apt-get install openssh-client openssh-server pdsh"
        return Check("programs", "failed", f"no {', no '.join(missing)}", remedy)
    return Check("programs", "ok", ", ".join(PROGRAMS))


def check_python(versions: Mapping[str, str | None], expected: Expectation) -> Check:
    """The same release of Python; another patch release is let pass."""
    found, wanted = versions["python"] or "", expected.versions["python"] or ""
    if found == wanted:
        return Check("python", "ok", found)
    same_release = found.split(".")[:2] == wanted.split(".")[:2]
    remedy = f"the master has {wanted}; use the same interpreter on all pods"
    return Check("python", "warning" if same_release else "failed", found, remedy)


def check_package(name: str, versions: Mapping[str, str | None], expected: Expectation) -> Check:
    """The master's version of a package."""
    found, wanted = versions.get(name), expected.versions.get(name)
    if found is not None and found == wanted:
        return Check(name, "ok", found)
    if wanted is None:
        remedy = f"the master has no {name}; install requirements.txt there"
    else:
        remedy = f"the master has {wanted}; on the pod: pip install {name}=={wanted.partition('+')[0]}"
    return Check(name, "failed", found or "missing", remedy)


def check_operations(state: str, offload: bool | None) -> Check:
    """The operation that optimizer offload needs can be loaded; `state` is that of `operation_state`."""
    kind, _, detail = state.partition(": ")
    if offload is False:
        return Check("ops", "ok", "none needed")
    if kind == "compiled":
        return Check("ops", "ok", kind)
    if kind == "compilable":
        remedy = "the first run compiles it, a minute or so; or run 'python tools/compile_ops.py' on the pod"
        return Check("ops", "warning", f"{CPU_ADAM} not compiled", remedy)
    if kind == "compiling":
        return Check("ops", "warning", f"{CPU_ADAM} being compiled", "wait a minute; the run would wait for it")
    remedy = "on the pod: apt-get install g++ python3-dev, pip install ninja; without it no optimizer offload"
    return Check("ops", "failed" if offload else "warning", f"{CPU_ADAM}: {detail}", remedy)


def check_project(expected: Expectation) -> Check:
    """The project folder is there, and its files are the master's."""
    project = expected.project
    if not project.is_dir() or not os.access(project, os.R_OK | os.X_OK):
        return Check("project", "failed", "missing", f"make {project} visible on the pod: one folder for all")
    for name, wanted in expected.digests.items():
        found = _digest(project / name)
        if wanted is None:
            return Check("project", "failed", f"no {name}", f"name a file of {project} on the master")
        if found != wanted:
            value = f"another {name}" if found else f"no {name}"
            return Check("project", "failed", value, f"{project} is not the master's folder; share or copy it")
    return Check("project", "ok", "same files" if expected.digests else "there")


def check_disk(free: Mapping[str, int | None], project: Path) -> Check:
    """Room for checkpoints in the project folder, for compilers in /tmp, for shared tensors in /dev/shm."""
    room = free["project"]
    if room is None:
        return Check("disk", "failed", "unknown", f"{project} cannot be read on the pod")
    if room < DISK_BYTES:
        return Check("disk", "failed", _gib(room), f"make {_gib(DISK_BYTES)} free below {project}")
    for place in ("/tmp", "/dev/shm"):
        if (free[place] or 0) < TEMPORARY_BYTES:
            value = f"{place} {_gib(free[place] or 0)}"
            return Check("disk", "warning", value, f"make {_gib(TEMPORARY_BYTES)} free in {place} of the pod")
    if room < ROOMY_DISK_BYTES:
        return Check("disk", "warning", _gib(room), f"a large model's checkpoint may not fit below {project}")
    return Check("disk", "ok", _gib(room))


def check_memory(available: int) -> Check:
    """Main memory that could be used at once, in bytes."""
    if available < MEMORY_BYTES:
        return Check("memory", "warning", _gib(available), "end other programs on the pod, or give it more memory")
    return Check("memory", "ok", _gib(available))


def check_gpu_memory(gpus: Gpus) -> Check:
    """Nobody else uses the GPUs."""
    if not gpus:
        return Check("GPU memory", "ok", "no GPU")
    least = min(range(len(gpus)), key=lambda gpu: gpus[gpu][0] / gpus[gpu][1])
    free, total = gpus[least]
    value = f"{_gib(free)} of {_gib(total)}"
    if free / total < GPU_FREE_FRACTION:
        return Check("GPU memory", "warning", value, f"see 'nvidia-smi' on the pod: GPU {least} is in use")
    return Check("GPU memory", "ok", value)


def check_slots(slots: int, gpus: int, cores: int) -> Check:
    """A process has a GPU of its own; without GPUs, a core."""
    value = f"{slots} of {gpus} GPU" if gpus else f"{slots} on {cores} cores"
    if gpus and slots > gpus:
        return Check("slots", "failed", value, f"say slots={gpus} in the hostfile, or fewer")
    if not gpus and slots > cores:
        return Check("slots", "warning", value, f"no GPU there; processes will share cores: say slots={cores}")
    return Check("slots", "ok", value)


def check_port(port: int) -> Check:
    """The run's port, on the pod where its first rank listens."""
    if is_free("", port):
        return Check("port", "ok", f"{port} free")
    return Check("port", "failed", f"{port} taken", "choose another --master_port, or end what listens there")


def check_cml(environ: Mapping[str, str], address: str | None) -> Check:
    """CML says who the pod is, and it is the pod that was asked for. Newer versions of CML say `CML_` for `CDSW_`."""
    found = {name: environ.get(name) or environ.get(name.replace("CDSW", "CML")) for name in CML_NAMES}
    missing = [name for name, value in found.items() if not value]
    if missing:
        return Check("CML", "warning", f"no {', no '.join(missing)}", "start the pod as a CML session or worker")
    if address not in (None, found["CDSW_IP_ADDRESS"]):
        remedy = f"another pod answers at {address}; start the cluster anew"
        return Check("CML", "failed", f"is {found['CDSW_IP_ADDRESS']}", remedy)
    return Check("CML", "ok", str(found["CDSW_ENGINE_ID"]))


def check_clock(pods: float, *, asked: float, answered: float) -> Check:
    """The pod's clock agrees with the master's, in seconds since 1970 before it was asked and after it had answered."""
    ahead, behind = max(pods - answered, 0.0), max(asked - pods, 0.0)
    if max(ahead, behind) <= CLOCK_WARNING_SECONDS:
        return Check("clock", "ok", "same")
    value = f"{ahead:.0f} s ahead" if ahead else f"{behind:.0f} s behind"
    failed = max(ahead, behind) > CLOCK_FAILED_SECONDS
    return Check("clock", "failed" if failed else "warning", value, "set the pod's clock by NTP")


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


def _gpus() -> Gpus:
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        memories = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    return [(memory.free, memory.total) for memory in memories]


def _digest(file: Path) -> str | None:
    """SHA-256 of a file; None where there is none that can be read."""
    try:
        return sha256(file)
    except OSError:
        return None


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


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
