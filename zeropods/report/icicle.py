"""A tree of modules as rectangles: each as wide as its share, its parts below it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zeropods.measure.profile.report import Module, total

NARROWEST = 0.001
"""Share of the whole below which nothing is drawn."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A rectangle; the whole is 1 wide."""

    label: str
    class_name: str
    depth: int
    left: float
    width: float


def cells(root: Module, figure: str) -> Iterator[Cell]:
    """The rectangles of a tree by `macs` or `latency_seconds`, a parent before its parts.

    A list of modules is left out: its modules stand below what holds it, as `block.0`. What a module has beyond its
    parts stays empty at its right.
    """
    whole = total(root, figure)
    if whole > 0:
        yield from _cells(root, root.class_name, figure, whole, 0, 0.0)


def _cells(module: Module, label: str, figure: str, whole: float, depth: int, left: float) -> Iterator[Cell]:
    width = total(module, figure) / whole
    if width < NARROWEST:
        return
    yield Cell(label=label, class_name=module.class_name, depth=depth, left=left, width=width)
    for name, child in _parts(module):
        yield from _cells(child, name, figure, whole, depth + 1, left)
        left += total(child, figure) / whole


def _parts(module: Module) -> Iterator[tuple[str, Module]]:
    for child in module.children:
        if child.class_name in ("ModuleList", "ModuleDict"):
            yield from ((f"{child.name}.{name}", below) for name, below in _parts(child))
        else:
            yield child.name, child
