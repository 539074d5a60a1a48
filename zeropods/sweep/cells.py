"""The cells of a matrix: every combination of its axes that can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AXES = ("model", "technique", "pods", "prompt")
PLAIN = ("none", "ddp")
"""Techniques without a DeepSpeed configuration."""
TECHNIQUES = (*PLAIN, "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")

Axes = Mapping[str, tuple[Any, ...]]
"""Values by axis."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination: what is compared."""

    model: str
    technique: str
    pods: int
    prompt: str

    @property
    def name(self) -> str:
        """Of its folder: `t5-tiny-zero1-3-pods-schema`."""
        pods = "1-pod" if self.pods == 1 else f"{self.pods}-pods"
        return f"{Path(self.model).name}-{self.technique}-{pods}-{self.prompt}"

    @property
    def is_one_process(self) -> bool:
        """Whether it runs in one process of this machine, without pods."""
        return self.technique == "none"


@dataclass(frozen=True)
class LeftOut:
    """A combination that cannot be, and why."""

    cell: Cell
    reason: str


def combinations(axes: Axes, entries: Sequence[Axes], exclude: Sequence[Axes]) -> Iterator[Cell]:
    """Every cell in the order of the file, also those that cannot be; an entry's axes win over the common ones."""
    for entry in entries or ({},):
        values = {**axes, **entry}
        for chosen in itertools.product(*(values[axis] for axis in AXES)):
            cell = Cell(**dict(zip(AXES, chosen, strict=True)))
            if not any(matches(cell, excluded) for excluded in exclude):
                yield cell


def matches(cell: Cell, part: Axes) -> bool:
    """Whether a cell has one of the given values on each of the given axes."""
    return all(getattr(cell, axis) in values for axis, values in part.items())


def sorted_out(cells: Iterable[Cell], slots: int) -> tuple[tuple[Cell, ...], tuple[LeftOut, ...]]:
    """The cells that can be, and those that cannot."""
    found = [(cell, _impossible(cell, slots)) for cell in cells]
    possible = tuple(cell for cell, reason in found if reason is None)
    return possible, tuple(LeftOut(cell, reason) for cell, reason in found if reason is not None)


def _impossible(cell: Cell, slots: int) -> str | None:
    if cell.technique == "none" and cell.pods > 1:
        return "none is one process; on several pods ddp is the control"
    if cell.technique == "ddp" and cell.pods * slots == 1:
        return "one process shares with nobody: that is none"
    return None
