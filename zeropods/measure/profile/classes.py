"""Where MACs and time go: all modules of the tree by their class, each figure counted once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeropods.measure.profile.report import Module, total
from zeropods.measure.profile.units import rounding


@dataclass(frozen=True, kw_only=True)
class ClassShare:
    """What the modules of one class do themselves, without the modules inside them. Sums to the root's figures."""

    class_name: str
    modules: int
    macs: float
    macs_percent: float | None
    latency_seconds: float
    latency_percent: float | None


def by_class(root: Module) -> list[ClassShare]:
    """The classes of a tree, most MACs first, then most time."""
    names = sorted({module.class_name for _, module in root.walk()})
    found = [_share(name, [m for _, m in root.walk() if m.class_name == name], root) for name in names]
    return sorted(found, key=lambda share: (share.macs, share.latency_seconds), reverse=True)


def _share(name: str, modules: list[Module], root: Module) -> ClassShare:
    macs, seconds = _own(modules, "macs"), _own(modules, "latency_seconds")
    return ClassShare(
        class_name=name,
        modules=len(modules),
        macs=macs,
        macs_percent=_percent(macs, root.macs),
        latency_seconds=seconds,
        latency_percent=_percent(seconds, root.latency_seconds),
    )


def _own(modules: Iterable[Module], figure: str) -> float:
    """What modules have beyond their children."""
    return sum(_rest(module, figure) for module in modules)


def _rest(module: Module, figure: str) -> float:
    """What a module has beyond its children; nothing where that is what rounding has left."""
    parts = [total(child, figure) for child in module.children]
    rest = total(module, figure) - sum(parts)
    return rest if rest > rounding(total(module, figure)) + sum(map(rounding, parts)) else 0.0


def _percent(part: float, whole: float | None) -> float | None:
    return 100 * part / whole if whole else None
