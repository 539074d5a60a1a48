"""What a pod finds out about itself: one line of JSON.

    python -m zeropods.pods.preflight.probe --project DIR [--file NAME ...] [--port PORT ...]

It is run on the pod, imports no torch, changes nothing, and ends by itself after `SECONDS`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from zeropods.measure.environment import versions
from zeropods.pods.preflight import machine
from zeropods.pods.preflight.operations import operation_states
from zeropods.ports import is_free

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
        programs={name: machine.find_program(name) is not None for name in PROGRAMS},
        project=project.is_dir() and os.access(project, os.R_OK | os.X_OK),
        digests={name: machine.digest(project / name) for name in files},
        free_bytes={
            "project": machine.free_bytes(project),
            "/tmp": machine.free_bytes(Path("/tmp")),
            "/dev/shm": machine.free_bytes(Path("/dev/shm")),
        },
        gpus=machine.gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory_available_bytes=machine.memory_available(),
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
