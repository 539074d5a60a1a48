"""The flags of a matrix against those of its script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from zeropods.errors import UserError
from zeropods.sweep.matrix import SCRIPT, Matrix

SET_BY = {
    "model_id": "is the model axis",
    "deepspeed": "follows from the technique axis",
    "dataset_path": "is a key of its own, beside flags",
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
    if matrix.script == SCRIPT:
        yield from _of_ours(matrix)


def _of_ours(matrix: Matrix) -> Iterator[str]:
    from zeropods.train.arguments import READERS, TextToSQLArguments

    types = get_type_hints(TextToSQLArguments)
    known = [field.name for field in fields(TextToSQLArguments) if field.name not in SET_BY] + [EFFECTIVE]
    values: dict[str, Any] = {}
    for name, value in matrix.flags.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            yield f"flags.{name}: no flag of {SCRIPT}; {f'{near[0]}?' if near else '--help lists them'}"
        elif name != EFFECTIVE:
            kind = (get_args(types[name]) or (types[name],))[0]
            try:
                values[name] = READERS[kind](str(value))
            except (KeyError, ValueError):
                yield f"flags.{name}: {value!r}; expected {kind.__name__}"
    try:
        TextToSQLArguments(**values)
    except UserError as error:
        yield f"flags: {error}"
    if values.get("max_train_seconds") and any(matrix.processes(cell) > 1 for cell in matrix.cells):
        yield f"flags.max_train_seconds: {values['max_train_seconds']:g}; clocks of processes differ; give max_steps"
