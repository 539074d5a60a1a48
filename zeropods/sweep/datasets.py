"""The prepared data sets of a sweep: made, or checked to be what the matrix says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zeropods.data.byte_tokenizer import GPT_TINY
from zeropods.data.causal import CausalPreparation, prepare_causal
from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, prepare
from zeropods.errors import UserError
from zeropods.report.progress import progress
from zeropods.sweep.checks import CAUSAL_TINY, EACH
from zeropods.sweep.matrix import Matrix
from zeropods.sweep.trial import dataset_of
from zeropods.train.causal_arguments import MAX_SEQ_LENGTH, CausalArguments
from zeropods.train.scripts import arguments_of


def provide_datasets(matrix: Matrix, out: Path, say: Callable[[str], object]) -> None:
    """Make the set of each model and prompt that is not there yet, or look at those that the matrix names."""
    seen = {(cell.model, cell.prompt): cell for cell in matrix.cells}
    for cell in seen.values():
        folder = dataset_of(matrix, cell, out)
        if folder is not None and matrix.data is not None:
            _prepare(matrix, cell.model, cell.prompt, folder, say)
        elif folder is not None and arguments_of(matrix.script) is not None:
            _check(folder, cell.prompt)


def _prepare(matrix: Matrix, model: str, prompt: str, folder: Path, say: Callable[[str], object]) -> None:
    assert matrix.data is not None
    tokenizer = matrix.tokenizer.get(model, matrix.tokenizer.get(EACH, model))
    with progress("prepare", "rows") as bar:
        if arguments_of(matrix.script) is CausalArguments:
            _, made = prepare_causal(_causal(matrix, tokenizer, prompt), folder, bar.update)
        else:
            wanted = Preparation(data=Path(matrix.data), tokenizer=tokenizer, prompt=prompt)
            _, made = prepare(wanted, folder, bar.update)
    if made:
        say(f"prepared {folder}")


def _causal(matrix: Matrix, tokenizer: str, task: str) -> CausalPreparation:
    """What a causal run would make of the raw data itself, once for all cells."""
    given = {name: matrix.flags[name] for name in ("loss_on", "dataset_config", "text_field") if name in matrix.flags}
    tiny = matrix.flags.get("init") == "random" and tokenizer in CAUSAL_TINY
    return CausalPreparation(
        task=task,
        data=Path(str(matrix.data)),
        tokenizer=GPT_TINY if tiny else tokenizer,
        max_seq_length=int(matrix.flags.get("max_seq_length", MAX_SEQ_LENGTH)),
        limit=matrix.flags.get("subset"),
        **given,
    )


def _check(folder: Path, prompt: str) -> None:
    prepared = read_manifest(folder).prompt
    if prepared != prompt:
        raise UserError(f"{folder}: was prepared with prompt {prepared}, the matrix says {prompt}; name another set")
