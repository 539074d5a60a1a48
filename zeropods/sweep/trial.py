"""One run of a sweep as data: a cell, a repeat, a folder, and the script's arguments."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from zeropods.launch.command import Launch
from zeropods.launch.flags import find_script
from zeropods.launch.planning import PROJECT
from zeropods.launch.process import train_arguments
from zeropods.pods.hostfile import Host
from zeropods.sweep.cells import PLAIN, Cell
from zeropods.sweep.checks import EACH, rows_of_a_pass
from zeropods.sweep.flag_checks import A_PASS, EFFECTIVE
from zeropods.sweep.matrix import Matrix
from zeropods.sweep.order import balanced
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.scripts import arguments_of

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
