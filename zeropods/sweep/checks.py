"""What can be seen to be wrong with a matrix before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from zeropods.errors import UserError
from zeropods.plan.causal_shapes import CAUSAL_SHAPES, causal_shape
from zeropods.plan.shapes import t5_shape
from zeropods.sweep.cells import AXES, Cell, combinations, matches
from zeropods.sweep.flag_checks import A_PASS, EFFECTIVE, PASSES, flag_faults
from zeropods.sweep.matrix import Matrix
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.scripts import arguments_of

TINY = "t5-tiny"
CAUSAL_TINY = tuple(name for name in CAUSAL_SHAPES if name.endswith("-tiny"))
MOST_RUNS = 10_000
"""Of a matrix: a few years of them. More is a slip of the pen, and would be laid out in memory."""
EACH = "*"
"""In the place of a model or prompt: every one that is not named."""


def check_matrix(matrix: Matrix, place: str) -> None:
    """Refuse a matrix that cannot be run as it stands; `UserError` names the first fault."""
    fault = next(_faults(matrix), None)
    if fault is not None:
        raise UserError(f"{place}: {fault}")


def rows_of_a_pass(matrix: Matrix, cell: Cell) -> int | None:
    """Rows of one process and forward pass, by which a cell has the effective batch; None where it is not given.

    `UserError` where it does not divide.
    """
    effective = matrix.flags.get(EFFECTIVE)
    if effective is None:
        return None
    passes, processes = int(matrix.flags.get(PASSES, 1)), matrix.processes(cell)
    if effective % (passes * processes):
        raise UserError(
            f"flags.{EFFECTIVE}: {effective} rows do not divide over {processes} processes x {passes} passes of "
            f"{cell.name}; give a multiple of {passes * processes}, or exclude the cell"
        )
    return int(effective // (passes * processes))


def _faults(matrix: Matrix) -> Iterator[str]:
    yield from _axes(matrix)
    yield from _size(matrix)
    yield from _cells(matrix)
    yield from _repeats(matrix)
    yield from _batch(matrix)
    yield from flag_faults(matrix)
    yield from _models(matrix)
    yield from _data(matrix)


def _axes(matrix: Matrix) -> Iterator[str]:
    for entry in matrix.entries or ({},):
        for axis in AXES:
            if axis not in matrix.axes and axis not in entry:
                yield f"{axis}: is missing; give at least one value"


def _size(matrix: Matrix) -> Iterator[str]:
    cells = sum(prod(len(values) for values in {**matrix.axes, **entry}.values()) for entry in matrix.entries or ({},))
    if cells * matrix.repeats > MOST_RUNS:
        yield f"repeats: {matrix.repeats} of {cells} cells are more than {MOST_RUNS:,} runs; give fewer"


def _cells(matrix: Matrix) -> Iterator[str]:
    everything = list(combinations(matrix.axes, matrix.entries, ()))
    for number, part in enumerate(matrix.exclude, 1):
        if not any(matches(cell, part) for cell in everything):
            yield f"exclude[{number}]: {_shown(part)}: there is no such cell; mend it, or leave it out"
    names = [cell.name for cell in matrix.cells]
    if not names:
        why = matrix.left_out[0].reason if matrix.left_out else "exclude leaves out all of them"
        yield f"technique: no cell is left: {why}"
    for name in names:
        if names.count(name) > 1:
            yield f"cells: {name} is there twice; leave one of them out"


def _repeats(matrix: Matrix) -> Iterator[str]:
    if matrix.seeds and len(matrix.seeds) != matrix.repeats:
        yield f"seeds: {len(matrix.seeds)} for {matrix.repeats} repeats; give one for each"
    if matrix.seeds and "seed" in matrix.flags:
        yield "flags.seed: contradicts seeds; leave one of them out"


def _batch(matrix: Matrix) -> Iterator[str]:
    for name in (EFFECTIVE, PASSES):
        value = matrix.flags.get(name, 1)
        if type(value) is not int or value < 1:
            yield f"flags.{name}: {value!r}; expected a whole number, at least 1"
    if EFFECTIVE in matrix.flags and A_PASS in matrix.flags:
        yield f"flags.{A_PASS}: follows from {EFFECTIVE}; leave one of them out"
    try:
        for cell in matrix.cells:
            rows_of_a_pass(matrix, cell)
    except UserError as error:
        yield str(error)


def _models(matrix: Matrix) -> Iterator[str]:
    kind = arguments_of(matrix.script)
    if kind is None:
        return
    shape_of, tiny = (t5_shape, (TINY,)) if kind is TextToSQLArguments else (causal_shape, CAUSAL_TINY)
    for model in dict.fromkeys(cell.model for cell in matrix.cells):
        if matrix.flags.get("init") == "random":
            try:
                shape_of(model)
            except UserError as error:
                yield f"model: {error}"
        elif model in tiny:
            yield f"model: {model} has no pretrained weights; write flags: {{init: random}}"


def _data(matrix: Matrix) -> Iterator[str]:
    if matrix.data is not None and matrix.dataset_path:
        yield f"dataset_path: contradicts data {matrix.data!r}; leave one of them out"
    if arguments_of(matrix.script) is not None and matrix.data is None and not matrix.dataset_path:
        yield "data: is missing; name a folder with raw data, or a prepared one by dataset_path"
    if matrix.tokenizer and matrix.data is None:
        yield "tokenizer: is for data that is to be prepared; give data, or leave it out"
    yield from _names("tokenizer", matrix.tokenizer, {cell.model for cell in matrix.cells}, "model")
    prompts = {cell.prompt for cell in matrix.cells}
    yield from _names("dataset_path", matrix.dataset_path, prompts, "prompt")
    for prompt in sorted(prompts):
        if matrix.dataset_path and not {prompt, EACH} & set(matrix.dataset_path):
            yield f"dataset_path.{prompt}: is missing; name the set that was prepared with that prompt"
    if EACH in matrix.dataset_path and len(prompts) > 1:
        yield f"dataset_path: one set for prompts {', '.join(sorted(prompts))}; give one for each"


def _names(key: str, given: Any, known: set[str], what: str) -> Iterator[str]:
    for name in given:
        if name != EACH and name not in known:
            yield f"{key}.{name}: no {what} of this matrix; mend it, or leave it out"


def _shown(part: Any) -> str:
    return ", ".join(f"{axis} {'/'.join(map(str, values))}" for axis, values in part.items())
