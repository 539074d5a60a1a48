"""Signals for what a run consists of."""

from __future__ import annotations

import os
import signal

from benchmarks.reliability.scene import Scene
from zeropods.launch import notebook
from zeropods.launch.notebook import worker_of
from zeropods.measure.heartbeat import read_beats
from zeropods.pods.processes import descendants, send


def kill_rank(scene: Scene) -> str:
    """SIGKILL for one of the ranks."""
    rank, beat = scene.random.choice(sorted(read_beats(scene.folder).items()))
    os.kill(beat.pid, signal.SIGKILL)
    return f"rank {rank}"


def stop_rank(scene: Scene) -> str:
    """SIGSTOP for one of them."""
    rank, beat = scene.random.choice(sorted(read_beats(scene.folder).items()))
    os.kill(beat.pid, signal.SIGSTOP)
    return f"rank {rank}"


def kill_agent(scene: Scene) -> str:
    """SIGKILL for the agent of a pod that is in use."""
    pod = scene.random.choice(scene.used)
    warden = worker_of(scene.cluster, pod)
    assert warden is not None
    os.kill(warden.children()[0].pid, signal.SIGKILL)
    return pod


def kill_warden(scene: Scene) -> str:
    """SIGKILL for its warden."""
    pod = scene.random.choice(scene.used)
    warden = worker_of(scene.cluster, pod)
    assert warden is not None
    os.kill(warden.pid, signal.SIGKILL)
    return pod


def kill_pod(scene: Scene) -> str:
    """SIGKILL for all of its processes, as by a power cut."""
    pod = scene.random.choice(scene.used)
    notebook.kill_pod(scene.cluster, pod)
    return pod


def kill_supervisor(scene: Scene) -> None:
    """SIGKILL for the launch."""
    os.kill(scene.launch, signal.SIGKILL)


def kill_pdsh(scene: Scene) -> None:
    """SIGKILL for pdsh alone."""
    for process in descendants(scene.launch):
        # Debian's `pdsh` is a script that becomes `pdsh.bin`.
        if process.name().startswith("pdsh"):
            send(process, signal.SIGKILL)
