"""What a pod finds out about itself: one line of JSON.

python -m zeropods.pods.probe --project DIR [--file NAME ...] [--port PORT ...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zeropods.files import sha256
from zeropods.measure.environment import versions
from zeropods.programs import extension_cache, is_free, is_taken

# What this machine has: programs, files, room, ports, GPUs. Nothing here imports torch or changes anything.


def find_program(name: str) -> str | None:
    """A program on PATH, or where daemons are, which an ordinary user's PATH may lack."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")


def digest(file: Path) -> str | None:
    """SHA-256 of a file; None where there is none that can be read."""
    try:
        return sha256(file)
    except OSError:
        return None


def free_bytes(folder: Path) -> int | None:
    """Room on the file system of a folder; None where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def gpus() -> list[dict[str, int]] | None:
    """`free_bytes` and `total_bytes` of each GPU as NVML knows it; None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        memories = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return [{"free_bytes": memory.free, "total_bytes": memory.total} for memory in memories] or None


def memory_available() -> int | None:
    """Bytes of main memory that could be used at once; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:
        return None
    stated = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(stated.split()[1]) * 1024 if stated else None


# DeepSpeed's operations for the CPU: compiled on this machine, or able to be; found out without importing torch.

CPU_ADAM = "cpu_adam"
"""Needed by optimizer offload."""
OPERATIONS = (CPU_ADAM,)


def operation_states() -> dict[str, str]:
    """For each operation `compiled`, `compilable`, `compiling` or `impossible: WHAT IS MISSING`."""
    cache = extension_cache()
    impossible = _impossible()
    return {name: _state(cache / name, name, impossible) for name in OPERATIONS}


def _state(folder: Path, name: str, impossible: str) -> str:
    if _prebuilt(name):
        return "compiled"
    if (folder / f"{name}.so").is_file():
        return "compiled"
    return "compiling" if is_taken(folder) else impossible or "compilable"


def _prebuilt(name: str) -> bool:
    """Whether DeepSpeed was installed with this operation compiled (`DS_BUILD_OPS`)."""
    folder = _package("deepspeed")
    return folder is not None and any((folder / "ops").glob(f"*/{name}_op*.so"))


def _impossible() -> str:
    """What a compilation lacks on this machine, or nothing."""
    compiler = os.environ.get("CXX", "c++")
    lacks = {
        "C++ compiler": shutil.which(compiler) is None,
        "Python.h": not Path(sysconfig.get_path("include"), "Python.h").is_file(),
        "ninja": shutil.which("ninja") is None and not Path(sys.executable).with_name("ninja").is_file(),
    }
    missing = [name for name, lack in lacks.items() if lack]
    return f"impossible: no {', no '.join(missing)}" if missing else ""


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


# What a pod finds out about itself: one line of JSON.
#
#     python -m zeropods.pods.probe --project DIR [--file NAME ...] [--port PORT ...]
#
# It is run on the pod, imports no torch, changes nothing, and ends by itself after `SECONDS`.

SECONDS = 20
PROGRAMS = ("ssh", "ssh-keygen", "sshd", "pdsh")
CML_NAMES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A pod as it sees itself."""

    hostname: str
    versions: dict[str, str | None]
    """Of Python and of the packages that must be equal on all pods; None where one is missing."""
    operations: dict[str, str]
    """As `operations.operation_states` says."""
    programs: dict[str, bool]
    project: bool
    """Whether the project folder is there and can be read."""
    digests: dict[str, str | None]
    """SHA-256 of the files asked for; None where one is missing."""
    free_bytes: dict[str, int | None]
    """At `project`, `/tmp` and `/dev/shm`; None where there is no such folder."""
    gpus: list[dict[str, int]] | None
    """`free_bytes` and `total_bytes` of each GPU; None where there is none."""
    cores: int
    memory_available_bytes: int | None
    ports: dict[str, bool]
    """Whether a port asked for is free."""
    cml: dict[str, str]
    """CML's variables that say who the pod is, where they are set."""
    time_seconds: float
    """The pod's clock: seconds since 1970."""

    @classmethod
    def from_json(cls, document: Any) -> Facts:
        """Facts as another pod printed them; `ValueError` if it has another idea of what they are."""
        if not isinstance(document, dict) or document.keys() != {field.name for field in fields(cls)}:
            raise ValueError("not the facts that this version of zeropods asks for")
        return cls(**document)


def gather(project: Path, files: Iterable[str] = (), ports: Iterable[int] = ()) -> Facts:
    """Look around on this machine.

    Args:
        files: of which the digest is wanted, relative to the project or absolute.
        ports: of which it is wanted whether they are free.
    """
    return Facts(
        hostname=socket.gethostname(),
        versions=versions(),
        operations=operation_states(),
        programs={name: find_program(name) is not None for name in PROGRAMS},
        project=project.is_dir() and os.access(project, os.R_OK | os.X_OK),
        digests={name: digest(project / name) for name in files},
        free_bytes={
            "project": free_bytes(project),
            "/tmp": free_bytes(Path("/tmp")),
            "/dev/shm": free_bytes(Path("/dev/shm")),
        },
        gpus=gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory_available_bytes=memory_available(),
        ports={str(port): is_free("", port) for port in ports},
        cml=cml_variables(os.environ),
        time_seconds=time.time(),
    )


def cml_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `CML_NAMES` that are set; newer versions of CML say `CML_` for `CDSW_`."""
    found = {name: environ.get(name) or environ.get(name.replace("CDSW", "CML")) for name in CML_NAMES}
    return {name: value for name, value in found.items() if value}


def main(argv: list[str] | None = None) -> int:
    """Print this machine's facts as one line of JSON."""
    signal.alarm(SECONDS)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--file", action="append", default=[])
    parser.add_argument("--port", type=int, action="append", default=[])
    wanted = parser.parse_args(argv)
    print(json.dumps(asdict(gather(wanted.project, wanted.file, wanted.port))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
