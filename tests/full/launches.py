"""Launches of `rank.py` over real pods, and what is seen of them from outside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from zeropods.pods.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
RANK = ROOT / "tests" / "full" / "rank.py"
WAIT_SECONDS = 600.0


def started(cluster: Cluster, folder: Path, *arguments: object, **flags: object) -> subprocess.Popen[str]:
    """A launch of `rank.py` on all pods of a cluster; `flags`: of the launch, such as `restarts`."""
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    call = [cluster.name, *given, RANK, "--outputdir", folder, *arguments]
    command = [sys.executable, "-m", "tests.full.over_pdsh", *call]
    return subprocess.Popen([*map(str, command)], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)


def ended(process: subprocess.Popen[str], seconds: float = WAIT_SECONDS) -> str:
    """What a launch said, once it has ended."""
    return process.communicate(timeout=seconds)[1]


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


def until(happened: Callable[[], object], seconds: float = WAIT_SECONDS, pause: float = 0.1) -> float:
    """Wait until something has happened; returns the seconds that it took."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < seconds, f"it did not happen within {seconds} s"
        time.sleep(pause)
    return time.monotonic() - began


def train(folder: Path, ranks: int = 3) -> list[int]:
    """The processes of the ranks, once all of them train."""
    until(lambda: len(_process_ids(folder, ranks)) == ranks)
    return _process_ids(folder, ranks)


def _process_ids(folder: Path, ranks: int) -> list[int]:
    """The ids in the files of the ranks that have one."""
    ids = []
    for rank in range(ranks):
        file = folder / f"pid.{rank}"
        if file.is_file():
            ids.append(int(file.read_text()))
    return ids


def of_processes(name: str) -> dict[int, bytes]:
    """A file of every process that may be read, `cmdline` or `environ`; of one that waits to be reaped it is empty."""
    found = {}
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes()
    return found


def processes(*words: object) -> list[int]:
    """Processes of this machine with all these words among their arguments."""
    wanted, lines = [str(word).encode() for word in words], of_processes("cmdline").items()
    found = [pid for pid, line in lines if all(word in line.replace(b"\0", b" ") for word in wanted)]
    return [pid for pid in found if pid != os.getpid()]


def left(folder: Path) -> list[int]:
    """Processes of a run, wherever they are: launcher, pdsh, ssh, ranks."""
    return processes(folder)


def agent_of(cluster: Cluster, number: int) -> int:
    """The process of a pod's agent: the child of its warden."""
    both = processes_of_pod(cluster, number)
    return next(pid for pid in both if psutil.Process(pid).ppid() in both)


def processes_of_pod(cluster: Cluster, number: int) -> list[int]:
    """Its warden and its agent."""
    place, environments = f"={cluster.pods[number].address}\0".encode(), of_processes("environ")
    return [pid for pid in processes("worker_p.py") if place in environments.get(pid, b"")]
