"""The prepared data sets of a sweep: made, or checked to be what the matrix says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, prepare
from zeropods.errors import UserError
from zeropods.report.progress import progress
from zeropods.sweep.checks import EACH
from zeropods.sweep.matrix import SCRIPT, Matrix
from zeropods.sweep.trial import dataset_of


def provide_datasets(matrix: Matrix, out: Path, say: Callable[[str], object]) -> None:
    """Make the set of each model and prompt that is not there yet, or look at those that the matrix names."""
    seen = {(cell.model, cell.prompt): cell for cell in matrix.cells}
    for cell in seen.values():
        folder = dataset_of(matrix, cell, out)
        if folder is not None and matrix.data is not None:
            _prepare(matrix, cell.model, cell.prompt, folder, say)
        elif folder is not None and matrix.script == SCRIPT:
            _check(folder, cell.prompt)


def _prepare(matrix: Matrix, model: str, prompt: str, folder: Path, say: Callable[[str], object]) -> None:
    assert matrix.data is not None
    tokenizer = matrix.tokenizer.get(model, matrix.tokenizer.get(EACH, model))
    wanted = Preparation(data=Path(matrix.data), tokenizer=tokenizer, prompt=prompt)
    with progress("prepare", "rows") as bar:
        _, made = prepare(wanted, folder, bar.update)
    if made:
        say(f"prepared {folder}")


def _check(folder: Path, prompt: str) -> None:
    prepared = read_manifest(folder).prompt
    if prepared != prompt:
        raise UserError(f"{folder}: was prepared with prompt {prepared}, the matrix says {prompt}; name another set")
