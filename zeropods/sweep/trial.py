"""One run of a sweep as data, and the order in which runs are made."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zeropods.launch.command import Launch, find_script, train_arguments
from zeropods.pods.hostfile import Host
from zeropods.sweep.matrix import EACH, EFFECTIVE, ROWS, Cell, Matrix
from zeropods.techniques import technique_named
from zeropods.train.arguments import TextToSQLArguments, arguments_of

T = TypeVar("T")
OF_RAW_DATA = ("dataset_config", "text_field")
"""Flags that say how raw data are read: a sweep has read them by then."""
PREPARED = "prepared"
"""Folder of the sets that a sweep prepares, beside its cells."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A cell, once."""

    cell: Cell
    repeat: int
    """Number of the repeat, counted from 1."""
    script: Path
    folder: Path
    """The run folder, `OUT/CELL/REPEAT`."""
    slots: int
    """Processes per pod."""
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run folder below OUT."""
        return f"{self.cell.name}/{self.repeat}"

    @property
    def launch(self) -> Launch:
        """What is launched, as far as it is known without pods: enough to recognise it."""
        alone = self.cell.is_one_process
        pods, slots = (1, 1) if alone else (self.cell.pods, self.slots)
        return Launch(
            script=self.script,
            arguments=self.arguments,
            folder=self.folder,
            hosts=tuple(Host(f"pod{number}", slots) for number in range(1, pods + 1)),
            master_port=0,
            launcher="none" if alone else "pdsh",
        )

    @property
    def command(self) -> str:
        """What somebody would type to get this run alone."""
        script = [str(self.script), *self.arguments]
        if self.cell.is_one_process:
            return shlex.join([sys.executable, *script])
        return shlex.join(["zeropods", "launch", "--num-pods", str(self.cell.pods), "--", *script])


def trials(matrix: Matrix, out: Path) -> list[Trial]:
    """All runs of a matrix in the order in which they are run; reads and starts nothing but finds the script."""
    script = find_script(matrix.script, Path.cwd())
    return [
        Trial(
            cell=cell,
            repeat=repeat,
            script=script,
            folder=out / cell.name / str(repeat),
            slots=matrix.slots,
            arguments=tuple(_arguments(matrix, cell, repeat, out)),
        )
        for repeat, cell in balanced(matrix.cells, matrix.repeats)
    ]


def dataset_of(matrix: Matrix, cell: Cell, out: Path) -> Path | None:
    """The prepared set of a cell, made already or not; None for a script that needs none."""
    if matrix.data is not None:
        return out / PREPARED / f"{Path(matrix.data).name}-{Path(cell.model).name}-{cell.prompt}"
    named = matrix.dataset_path.get(cell.prompt, matrix.dataset_path.get(EACH))
    return None if named is None else Path(named).resolve()


def balanced(cells: Sequence[T], repeats: int) -> list[tuple[int, T]]:
    """Repeats, counted from 1, with their cells, in an order in which a machine that slows down favours no cell.

    Each repeat runs every cell once. Repeats come in pairs: a row of a Williams design (Williams 1949,
    Aust. J. Sci. Res. A 2, 149-168), and the same row backwards. After every pair, the mean place of all cells is
    the same, so that a steady drift cancels out. After as many repeats as there are cells (twice as many where
    their number is odd), each cell has had each place equally often, and has followed each other cell equally often.
    The order of a repeat does not depend on how many follow: more repeats go on where fewer have ended.
    """
    return [(repeat, cells[place]) for repeat in range(1, repeats + 1) for place in order_of(len(cells), repeat)]


def order_of(cells: int, repeat: int) -> tuple[int, ...]:
    """The order of the cells 0 ... cells - 1 in one repeat, counted from 1."""
    shift, backwards = divmod(repeat - 1, 2)
    # 0, 1, n - 1, 2, n - 2 ...: all differences between neighbours are different, modulo n.
    first = ((place + 1) // 2 if place % 2 else -(place // 2) for place in range(cells))
    forwards = tuple((place + shift) % cells for place in first)
    return forwards[::-1] if backwards else forwards


def _arguments(matrix: Matrix, cell: Cell, repeat: int, out: Path) -> list[str]:
    kind = arguments_of(matrix.script) or TextToSQLArguments
    left_out = (EFFECTIVE, *(OF_RAW_DATA if matrix.data is not None else ()))
    given = {
        kind.model_flag: cell.model,
        "deepspeed": technique_named(cell.technique).file,
        kind.data_flag: dataset_of(matrix, cell, out),
        **{name: value for name, value in matrix.flags.items() if name not in left_out},
    }
    rows = matrix.rows(cell)
    if rows is not None:
        given[ROWS] = rows
    if matrix.seeds:
        given["seed"] = matrix.seeds[repeat - 1]
    return train_arguments(**given, outputdir=out / cell.name / str(repeat))
