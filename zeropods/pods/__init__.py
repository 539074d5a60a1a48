"""Worker pods: start them, find them again, end them: `from zeropods import pods; cluster =
pods.up(3)`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster as Cluster
    from zeropods.pods.cluster import clusters as clusters
    from zeropods.pods.cluster import find as find
    from zeropods.pods.cluster import known_cluster as known_cluster
    from zeropods.pods.start import up as up

__all__ = ["Cluster", "clusters", "find", "known_cluster", "up"]


def __getattr__(name: str) -> Any:
    # Imported only when it is used, because the agent, which imports this package too, has to stay
    # small.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "start" if name == "up" else "cluster"
    return getattr(import_module(f"{__name__}.{module}"), name)
