"""What a pod finds out about itself: one line of JSON.

    python -m zeropods.pods.probe --project DIR [--file NAME ...] [--port PORT ...]

It is run on the pod, imports no torch, changes nothing, and ends by itself after `SECONDS`.
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

import psutil

from zeropods.files import sha256
from zeropods.measure.environment import versions
from zeropods.programs import extension_cache, find_program, is_free, is_taken

SECONDS = 20
PROGRAMS = ("ssh", "ssh-keygen", "sshd", "pdsh")
CML_NAMES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP")
CPU_ADAM = "cpu_adam"
"""DeepSpeed's operation that optimizer offload needs."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A pod as it sees itself."""

    hostname: str
    versions: dict[str, str | None]
    """Of Python and of the packages that must be equal on all pods; None where one is missing."""
    cpu_adam: str
    """`compiled`, `compilable`, `compiling` or `impossible: WHAT IS MISSING`."""
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
    memory_available_bytes: int
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
    places = {"project": project, "/tmp": Path("/tmp"), "/dev/shm": Path("/dev/shm")}
    return Facts(
        hostname=socket.gethostname(),
        versions=versions(),
        cpu_adam=operation_state(),
        programs={name: find_program(name) is not None for name in PROGRAMS},
        project=project.is_dir() and os.access(project, os.R_OK | os.X_OK),
        digests={name: digest(project / name) for name in files},
        free_bytes={name: _free_bytes(folder) for name, folder in places.items()},
        gpus=_gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory_available_bytes=psutil.virtual_memory().available,
        ports={str(port): is_free("", port) for port in ports},
        cml=cml_variables(os.environ),
        time_seconds=time.time(),
    )


def digest(file: Path) -> str | None:
    """SHA-256 of a file; None where there is none that can be read."""
    try:
        return sha256(file)
    except OSError:
        return None


def cml_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `CML_NAMES` that are set; newer versions of CML say `CML_` for `CDSW_`."""
    found = {name: environ.get(name) or environ.get(name.replace("CDSW", "CML")) for name in CML_NAMES}
    return {name: value for name, value in found.items() if value}


def operation_state() -> str:
    """Whether CPU Adam is compiled on this machine or can be, as `Facts.cpu_adam`; found out without torch."""
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


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _gpus() -> list[dict[str, int]] | None:
    """Memory of each GPU as NVML knows it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        memories = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return [{"free_bytes": memory.free, "total_bytes": memory.total} for memory in memories] or None


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
