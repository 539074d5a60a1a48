"""A pod of this machine lost in mid-run, on purpose: to see that the run goes on."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.pods.cluster import Cluster, workers_of
from zeropods.pods.processes import PROC, Process, descendants, find_process, is_alive, send
from zeropods.train.checkpoints import POINTER

FAULT = "fault.json"
"""In the run folder: which pod was killed, and when."""
POLL_SECONDS = 0.05


@dataclass
class PodKilled:
    """SIGKILL for all that runs on a pod, as soon as a run has a complete checkpoint. A context manager.

    Nothing happens where the run is finished already. `UserError` where the cluster's pods are no processes of this
    machine, or none has that name.

        with PodKilled(cluster, "pod2", folder):
            launch(cluster, outputdir=folder, restarts=1, **flags)
    """

    cluster: Cluster
    pod: str
    folder: Path
    """The run folder."""
    _over: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _thread: threading.Thread = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.cluster.backend != "local":
            raise UserError(f"cluster {self.cluster.name}: on {self.cluster.backend}; only local pods are killed")
        if self.pod not in {pod.name for pod in self.cluster.pods}:
            raise UserError(f"pod {self.pod!r}; expected {', '.join(pod.name for pod in self.cluster.pods)}")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PodKilled:
        self._before = self._pointer()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            if self._pointer() != self._before:
                now = time.time()
                kill_pod(self.cluster, self.pod)
                files.write_json(self.folder / FAULT, {"pod": self.pod, "killed_unix_seconds": now})
                return

    def _pointer(self) -> str | None:
        path = self.folder / "checkpoints" / POINTER
        return path.read_text(encoding="utf-8") if path.is_file() else None


def kill_pod(cluster: Cluster, name: str) -> None:
    """SIGKILL for every process of a local pod at once, as by a power cut: warden, agent, sshd, ranks."""
    warden = worker_of(cluster, name)
    if warden is None:
        return
    for process in (warden, *descendants(warden.pid)):
        send(process, signal.SIGKILL)


def worker_of(cluster: Cluster, name: str) -> Process | None:
    """The process that a local pod is: its warden; None where it has ended."""
    worker = next(pod.worker for pod in cluster.pods if pod.name == name)
    records = workers_of(cluster.folder, cluster.settings).processes()
    return next(record for record in records if record.id == worker).find()


def left_over(folder: Path) -> int:
    """How many processes of this machine name a run folder on their command lines: launchers, ssh, ranks."""
    found = (path for path in PROC.glob("[0-9]*/cmdline") if str(folder).encode() in _read(path))
    processes = (find_process(int(path.parent.name)) for path in found)
    return sum(process is not None and is_alive(process) for process in processes)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
