"""A matrix of runs: read strictly from YAML, and its cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeropods import files

# The cells of a matrix: every combination of its axes that can be.

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


# A matrix of runs as data.

SCRIPT = "textsql_train.py"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What a file says, read and checked. Paths are relative to the working folder, as in the script's flags."""

    axes: Axes
    """Values of each axis for all cells: `model`, `technique`, `pods`, `prompt`."""
    entries: tuple[Axes, ...] = ()
    """`cells` of the file: each is a matrix of its own, whose axes win over the common ones."""
    exclude: tuple[Axes, ...] = ()
    """Cells that have these values are left out."""
    repeats: int = 1
    seeds: tuple[int, ...] = ()
    """One for each repeat; the script's own for all where there are none."""
    slots: int = 1
    """Processes of a pod."""
    script: str = SCRIPT
    data: str | None = None
    """Raw data, prepared for each model and prompt."""
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    """By model, for `data`; the model's own where it is not named."""
    dataset_path: Mapping[str, str] = field(default_factory=dict)
    """A prepared set by prompt, in the place of `data`."""
    timeout_seconds: float | None = None
    """A run that takes longer is ended."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Of the script, the same for all cells. `effective_batch_size` is divided over the processes of a cell."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Combinations that can be, in the order of the file."""
        return self._sorted_out()[0]

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Combinations that cannot be."""
        return self._sorted_out()[1]

    def processes(self, cell: Cell) -> int:
        """Ranks of a run of a cell."""
        return 1 if cell.is_one_process else cell.pods * self.slots

    def to_json(self) -> dict[str, Any]:
        """The document that is read as this matrix: `matrix_of(matrix.to_json())` equals it."""
        document: dict[str, Any] = {
            "script": self.script,
            **_lists(self.axes),
            "cells": [_lists(entry) for entry in self.entries],
            "exclude": [_lists(part) for part in self.exclude],
            "repeats": self.repeats,
            "seeds": list(self.seeds),
            "slots": self.slots,
            "data": self.data,
            "tokenizer": dict(self.tokenizer),
            "dataset_path": dict(self.dataset_path),
            "timeout_seconds": self.timeout_seconds,
            "flags": dict(self.flags),
        }
        return {key: value for key, value in document.items() if value not in (None, [], {})}

    def _sorted_out(self) -> tuple[tuple[Cell, ...], tuple[LeftOut, ...]]:
        return sorted_out(combinations(self.axes, self.entries, self.exclude), self.slots)


def write_matrix(matrix: Matrix, path: Path) -> None:
    """Write a matrix so that reading the file gives an equal one."""
    import yaml

    files.write_text(path, yaml.safe_dump(matrix.to_json(), sort_keys=False, allow_unicode=True))


def _lists(axes: Axes) -> dict[str, list[Any]]:
    return {axis: list(axes[axis]) for axis in AXES if axis in axes}
