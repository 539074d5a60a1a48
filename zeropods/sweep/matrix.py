"""A matrix of runs as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeropods import atomic
from zeropods.sweep.cells import AXES, Axes, Cell, LeftOut, combinations, sorted_out

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

    atomic.write_text(path, yaml.safe_dump(matrix.to_json(), sort_keys=False, allow_unicode=True))


def _lists(axes: Axes) -> dict[str, list[Any]]:
    return {axis: list(axes[axis]) for axis in AXES if axis in axes}
