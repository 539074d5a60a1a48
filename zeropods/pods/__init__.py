"""Worker pods: start them, find them again, end them: `from zeropods import pods; cluster = pods.up(3)`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster as Cluster
    from zeropods.pods.cluster import clusters as clusters
    from zeropods.pods.cluster import find as find
    from zeropods.pods.rendezvous import Pod as Pod
    from zeropods.pods.start import up as up

_PLACES = {"up": "start", "find": "cluster", "clusters": "cluster", "Cluster": "cluster", "Pod": "rendezvous"}
"""Loaded when asked for: the agent, which imports this package too, has to stay small."""

__all__ = ["Cluster", "Pod", "clusters", "find", "up"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
