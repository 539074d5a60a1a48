"""A run that trains over local pods, as a fault finds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from zeropods.pods.cluster import Cluster


@dataclass(frozen=True)
class Scene:
    """A run that trains."""

    cluster: Cluster
    used: tuple[str, ...]
    """Names of the pods on which it runs, in the order of ranks."""
    folder: Path
    """The run folder, on a disk of its own."""
    launch: int
    """The process of `zeropods launch`."""
    random: Random

    def address(self, pod: str) -> str:
        """Of a pod, by its name."""
        return next(each.address for each in self.cluster.pods if each.name == pod)
