"""The flags of a matrix against those of its script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeropods.errors import UserError
from zeropods.sweep.matrix import Matrix
from zeropods.train.flags import READERS, types_of
from zeropods.train.run_arguments import RunArguments
from zeropods.train.scripts import arguments_of, unknown_flag

SET_BY = {
    "model_id": "is the model axis",
    "model_name_or_path": "is the model axis",
    "deepspeed": "follows from the technique axis",
    "dataset_path": "is a key of its own, beside flags",
    "data": "is a key of its own, beside flags",
    "tokenizer_name": "is the key tokenizer, beside flags",
    "task": "is the prompt axis",
    "outputdir": "follows from --out",
    "local_rank": "is given by the launcher",
}
"""Flags that a matrix gives itself, and from what."""
EFFECTIVE, A_PASS, PASSES = "effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"


def flag_faults(matrix: Matrix) -> Iterator[str]:
    """What is wrong with the flags; those of a foreign script are its own business."""
    for name in matrix.flags:
        if name in SET_BY:
            yield f"flags.{name}: {SET_BY[name]}; leave it out"
    kind = arguments_of(matrix.script)
    if kind is not None:
        yield from _of_ours(matrix, kind)


def _of_ours(matrix: Matrix, kind: type[RunArguments]) -> Iterator[str]:
    types = types_of(kind)
    known = [name for name in types if name not in SET_BY] + [EFFECTIVE]
    values: dict[str, Any] = {}
    for name, value in matrix.flags.items():
        fault = unknown_flag(kind, name, known)
        if fault is not None:
            yield f"flags.{name}: {fault}"
        elif name != EFFECTIVE:
            try:
                values[name] = READERS[types[name]](str(value))
            except (KeyError, ValueError):
                yield f"flags.{name}: {value!r}; expected {types[name].__name__}"
    try:
        kind(**values)
    except UserError as error:
        yield f"flags: {error}"
    if values.get("max_train_seconds") and any(matrix.processes(cell) > 1 for cell in matrix.cells):
        yield f"flags.max_train_seconds: {values['max_train_seconds']:g}; clocks of processes differ; give max_steps"
