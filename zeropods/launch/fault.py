"""A pod of this machine lost in mid-run, on purpose: to see that the run goes on."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import psutil

from zeropods import files
from zeropods.errors import UserError
from zeropods.pods.cluster import Cluster, workers_of
from zeropods.pods.processes import Process, descendants, send
from zeropods.train.checkpoints import POINTER

FAULT = "fault.json"
"""In the run folder: which pod was killed, and when."""
POLL_SECONDS = 0.05


class PodKilled:
    """SIGKILL for all that runs on a pod, as soon as a run has a complete checkpoint. A context manager.

    Nothing happens where the run is finished already.

        with PodKilled(cluster, "pod2", folder):
            launch(cluster, outputdir=folder, restarts=1, **flags)
    """

    def __init__(self, cluster: Cluster, pod: str, folder: Path) -> None:
        """`UserError` where the cluster's pods are no processes of this machine, or none has that name."""
        if cluster.backend != "local":
            raise UserError(f"cluster {cluster.name}: on {cluster.backend}; only local pods are killed")
        if pod not in {each.name for each in cluster.pods}:
            raise UserError(f"pod {pod!r}; expected {', '.join(each.name for each in cluster.pods)}")
        self._cluster, self._pod, self._folder = cluster, pod, folder
        self._before: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PodKilled:
        self._before = self._newest()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            if self._newest() != self._before:
                now = time.time()
                kill_pod(self._cluster, self._pod)
                files.write_json(self._folder / FAULT, {"pod": self._pod, "killed_unix_seconds": now})
                return

    def _newest(self) -> str | None:
        path = self._folder / "checkpoints" / POINTER
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
    records = workers_of(cluster).processes()
    return next(record for record in records if record.id == worker).find()


def left_over(folder: Path) -> int:
    """How many processes of this machine name a run folder on their command lines: launchers, ssh, ranks."""
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return sum(str(folder) in line for line in lines)
