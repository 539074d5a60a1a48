"""Cables that are pulled, where each pod has a network of its own."""

from __future__ import annotations

import os
import shutil
import subprocess

from benchmarks.reliability.scene import Scene
from zeropods.pods.backends.namespaces import Namespaces

COMMAND_SECONDS = 10.0


def may_part() -> bool:
    """Whether each pod can have a network of its own."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def cut_pod(scene: Scene) -> str:
    pod = scene.random.choice(scene.used)
    Namespaces(scene.cluster.folder).cut(scene.address(pod))
    return pod


def restore_pods(scene: Scene) -> None:
    for pod in scene.cluster.pods:
        Namespaces(scene.cluster.folder).restore(pod.address)


def cut_between(scene: Scene) -> None:
    """Each rank's packets to the other come to nothing; the supervisor still reaches both agents."""
    _routes(scene, "add")


def restore_between(scene: Scene) -> None:
    _routes(scene, "del")


def _routes(scene: Scene, verb: str) -> None:
    here, there = (scene.address(pod) for pod in scene.used)
    for address, other in ((here, there), (there, here)):
        command = ["ip", "route", verb, "blackhole", f"{other}/32"]
        subprocess.run(
            Namespaces(scene.cluster.folder).command(address, command), timeout=COMMAND_SECONDS, check=verb == "add"
        )
