"""Cables that are pulled, where each pod has a network of its own."""

from __future__ import annotations

import subprocess

from benchmarks.reliability.scene import Scene
from tests.namespaces import Namespaces

COMMAND_SECONDS = 10.0


def cut_pod(scene: Scene) -> str:
    pod = scene.random.choice(scene.used)
    _network(scene).cut(scene.address(pod))
    return pod


def restore_pods(scene: Scene) -> None:
    for pod in scene.cluster.pods:
        _network(scene).restore(pod.address)


def cut_between(scene: Scene) -> None:
    """Each rank's packets to the other come to nothing; the supervisor still reaches both agents."""
    _routes(scene, "add")


def restore_between(scene: Scene) -> None:
    _routes(scene, "del")


def _routes(scene: Scene, verb: str) -> None:
    here, there = (scene.address(pod) for pod in scene.used)
    for address, other in ((here, there), (there, here)):
        command = ["ip", "route", verb, "blackhole", f"{other}/32"]
        subprocess.run(_network(scene).command(address, command), timeout=COMMAND_SECONDS, check=verb == "add")


def _network(scene: Scene) -> Namespaces:
    return Namespaces(scene.cluster.folder, scene.cluster.settings)
