"""A pod of this machine lost in mid-run, on purpose: to see that the run goes on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def pod_killed(cluster: Cluster, pod: str, folder: Path) -> Iterator[None]:
    """SIGKILL for all that runs on a local pod, as soon as a run has a complete checkpoint.

    Nothing happens where the run is finished already.

        with pod_killed(cluster, "pod2", folder):
            launch(cluster, outputdir=folder, restarts=1, **flags)
    """
    names = [each.name for each in cluster.pods]
    if cluster.backend != "local" or pod not in names:
        raise UserError(f"pod {pod!r} of {cluster.name}, on {cluster.backend}; expected a local one: {names}")
    pointer, over = folder / "checkpoints" / POINTER, threading.Event()

    def newest() -> str | None:
        return pointer.read_text(encoding="utf-8") if pointer.is_file() else None

    before = newest()

    def kill_after_a_checkpoint() -> None:
        while not over.wait(POLL_SECONDS):
            if newest() != before:
                now = time.time()
                kill_pod(cluster, pod)
                files.write_json(folder / FAULT, {"pod": pod, "killed_unix_seconds": now})
                return

    thread = threading.Thread(target=kill_after_a_checkpoint, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
