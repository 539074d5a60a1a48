"""One run of a sweep as data: a cell, a repeat, a folder, and the script's arguments."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zeropods.launch.command import Launch, find_script
from zeropods.launch.local import train_arguments
from zeropods.launch.planning import PROJECT
from zeropods.pods.hostfile import Host
from zeropods.sweep.matrix import PLAIN, Cell, Matrix
from zeropods.sweep.reading import A_PASS, EACH, EFFECTIVE, rows_of_a_pass
from zeropods.train.arguments import TextToSQLArguments, arguments_of

# In which order cells are run, so that a machine that becomes slower with time favours none of them.

T = TypeVar("T")


def balanced(cells: Sequence[T], repeats: int) -> list[tuple[int, T]]:
    """Repeats, counted from 1, with their cells, in the order in which they are run.

    Each repeat runs every cell once. Repeats come in pairs: a row of a Williams design (Williams 1949,
    Aust. J. Sci. Res. A 2, 149-168), and the same row backwards. After every pair, the mean place of all cells is
    the same, so that a steady drift cancels out. After as many repeats as there are cells (twice as many where
    their number is odd), each cell has had each place equally often, and has followed each other cell equally often.
    The order of a repeat does not depend on how many follow: more repeats go on where fewer have ended.
    """
    return [(repeat, cells[place]) for repeat in range(1, repeats + 1) for place in row(len(cells), repeat)]


def row(cells: int, repeat: int) -> tuple[int, ...]:
    """The order of the cells 0 ... cells - 1 in one repeat, counted from 1."""
    shift, backwards = divmod(repeat - 1, 2)
    forwards = tuple((place + shift) % cells for place in _first_row(cells))
    return forwards[::-1] if backwards else forwards


def _first_row(cells: int) -> tuple[int, ...]:
    """0, 1, n - 1, 2, n - 2 ...: all differences between neighbours are different, modulo n."""
    return tuple((place + 1) // 2 if place % 2 else -(place // 2) % cells for place in range(cells))


# One run of a sweep as data: a cell, a repeat, a folder, and the script's arguments.

OF_RAW_DATA = ("dataset_config", "text_field")
"""Flags that say how raw data are read: a sweep has read them by then."""
PREPARED = "prepared"
"""Folder of the sets that a sweep prepares, beside its cells."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A cell, once."""

    cell: Cell
    repeat: int
    """Counted from 1."""
    script: Path
    folder: Path
    """The run folder, `OUT/CELL/REPEAT`."""
    slots: int
    """Processes of each pod."""
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """As it is spoken of, and the run folder below OUT."""
        return f"{self.cell.name}/{self.repeat}"

    @property
    def launch(self) -> Launch:
        """What is launched, as far as it is known without pods: enough to know it again."""
        pods = 1 if self.cell.is_one_process else self.cell.pods
        slots = 1 if self.cell.is_one_process else self.slots
        return Launch(
            script=self.script,
            arguments=self.arguments,
            folder=self.folder,
            hosts=tuple(Host(f"pod{number}", slots) for number in range(1, pods + 1)),
            master_port=0,
            launcher="none" if self.cell.is_one_process else "pdsh",
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
    script = find_script(matrix.script, Path.cwd(), PROJECT)
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


def _arguments(matrix: Matrix, cell: Cell, repeat: int, out: Path) -> list[str]:
    config = None if cell.technique in PLAIN else PROJECT / "dsconfig" / f"{cell.technique}.json"
    left_out = (EFFECTIVE, *(OF_RAW_DATA if matrix.data is not None else ()))
    flags = {name: value for name, value in matrix.flags.items() if name not in left_out}
    rows = rows_of_a_pass(matrix, cell)
    if rows is not None:
        flags[A_PASS] = rows
    if matrix.seeds:
        flags["seed"] = matrix.seeds[repeat - 1]
    kind = arguments_of(matrix.script) or TextToSQLArguments
    named = {kind.model_flag: cell.model, "deepspeed": config, kind.data_flag: dataset_of(matrix, cell, out)}
    return train_arguments(
        **named,
        **flags,
        outputdir=out / cell.name / str(repeat),
    )
