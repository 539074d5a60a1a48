"""A matrix read from YAML, strictly, and what can be seen to be wrong with it before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.plan.shapes import CAUSAL_SHAPES, causal_shape, t5_shape
from zeropods.sweep.matrix import AXES, SCRIPT, TECHNIQUES, Axes, Cell, Matrix, combinations, matches
from zeropods.train.arguments import SCRIPTS, RunArguments, TextToSQLArguments, arguments_of, parse_flags

if TYPE_CHECKING:
    from yaml import Node


# A YAML file as plain values; where it is wrong, its line is named.


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping that a YAML file holds.

    Raises:
        UserError: it is not there, is no YAML, holds no mapping, or holds a key twice, of which YAML's own
            reader would silently take the last.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        document = yaml.safe_load(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a matrix like matrices/demo.yaml") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}: line {line}: {error.problem}; mend the YAML") from None
    except RecursionError:
        raise UserError(f"{path}: lists in lists, deeper than a matrix can be; mend the YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; mend the YAML") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: {type(document).__name__}; expected keys with values, like repeats: 2")
    for key, line in _twice(node):
        raise UserError(f"{path}: line {line}: {key}: is there twice; leave one of them out")
    return document


def _twice(top: Node | None) -> Iterator[tuple[str, int]]:
    """Keys that a mapping holds more than once, with their lines; an alias may lead back to where it stands."""
    import yaml

    waiting, seen = [top], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            for place, (key, _) in enumerate(node.value):
                if keys[place] in keys[:place]:
                    yield keys[place], key.start_mark.line + 1
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


# The flags of a matrix against those of its script.

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
    words = [word for name, value in matrix.flags.items() if name != EFFECTIVE for word in (f"--{name}", str(value))]
    try:
        flags = parse_flags(kind, words)
    except UserError as error:
        yield f"flags: {error}"
        return
    if flags.max_train_seconds and any(matrix.processes(cell) > 1 for cell in matrix.cells):
        yield f"flags.max_train_seconds: {flags.max_train_seconds:g}; clocks of processes differ; give max_steps"


# What can be seen to be wrong with a matrix before anything starts.

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


# A matrix read from YAML, strictly: what is not understood is refused with its key and its value.


def read_matrix(path: Path) -> Matrix:
    """The matrix of a YAML file; `UserError` names the file, the key and the value."""
    return matrix_of(read_yaml(path), str(path))


def matrix_of(document: Mapping[str, Any], place: str) -> Matrix:
    """The matrix of a document, checked; `place` is where it came from, for messages."""
    _known(document, (*AXES, *KEY_READERS), place)
    axes = {axis: _axis(axis, document[axis], place) for axis in AXES if axis in document}
    read = {key: reader(document[key], f"{place}: {key}") for key, reader in KEY_READERS.items() if key in document}
    prompts = _prompts(read.get("script", SCRIPT))
    named = {FIELDS.get(key, key): value for key, value in read.items()}
    matrix = Matrix(axes={"prompt": prompts[:1], **axes}, **named)
    for given in (matrix.axes, *matrix.entries, *matrix.exclude):
        for prompt in given.get("prompt", ()):
            if prompt not in prompts:
                raise UserError(f"{place}: prompt: {prompt!r}; expected one of {', '.join(sorted(prompts))}")
    check_matrix(matrix, place)
    return matrix


def _prompts(script: str) -> tuple[str, ...]:
    """The prompts of a script, the usual one first; another's are those of the first of ours."""
    return (arguments_of(script) or SCRIPTS[SCRIPT]).prompts


def _axis(axis: str, value: Any, place: str) -> tuple[Any, ...]:
    """The values of an axis; one alone needs no list."""
    values = value if isinstance(value, list) else [value]
    where = f"{place}: {axis}"
    if not values:
        raise UserError(f"{where}: empty; give at least one value")
    read = _count if axis == "pods" else _text
    found = tuple(read(each, where) for each in values)
    for each in found:
        if axis == "technique" and each not in TECHNIQUES:
            raise UserError(f"{where}: {each!r}; expected one of {', '.join(TECHNIQUES)}")
        if found.count(each) > 1:
            raise UserError(f"{where}: {each!r} is there twice; leave one of them out")
    return found


def _parts(value: Any, where: str) -> tuple[Axes, ...]:
    """A list of mappings from axes to values."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {value!r:.60}; expected a list of cells, like - {{technique: zero1, pods: 3}}")
    return tuple(_part(each, f"{where}[{number}]") for number, each in enumerate(value, 1))


def _part(value: Any, where: str) -> Axes:
    if not isinstance(value, dict) or not value:
        raise UserError(f"{where}: {value!r:.60}; expected axes with values, like {{technique: zero1, pods: 3}}")
    _known(value, AXES, where)
    return {axis: _axis(axis, value[axis], where) for axis in AXES if axis in value}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {value!r:.60}; expected text")
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        raise UserError(f"{where}: {value!r:.60}; expected a whole number, at least 1")
    return value


def _seconds(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{where}: {value!r:.60}; expected seconds, more than 0")
    return float(value)


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(seed) is not int or seed < 0 for seed in value):
        raise UserError(f"{where}: {value!r:.60}; expected a list of whole numbers, one a repeat")
    return tuple(value)


def _texts(value: Any, where: str) -> dict[str, str]:
    """A mapping from text to text, or one text for all."""
    if isinstance(value, dict):
        return {_text(key, where): _text(each, f"{where}.{key}") for key, each in value.items()}
    return {"*": _text(value, where)}


def _flags(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: {value!r:.60}; expected flags of the script with values, like max_steps: 30")
    for name, each in value.items():
        if not isinstance(name, str) or not isinstance(each, str | int | float | bool | None):
            raise UserError(f"{where}.{name}: {each!r:.60}; expected text, a number or a truth value")
    return {name: each for name, each in value.items() if each is not None}


KEY_READERS: dict[str, Callable[[Any, str], Any]] = {
    "cells": _parts,
    "exclude": _parts,
    "repeats": _count,
    "seeds": _seeds,
    "slots": _count,
    "script": _text,
    "data": _text,
    "tokenizer": _texts,
    "dataset_path": _texts,
    "timeout_seconds": _seconds,
    "flags": _flags,
}
FIELDS = {"cells": "entries"}
"""Where a key is not the name of its field."""


def _known(document: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in document:
        if key not in keys:
            near = get_close_matches(str(key), keys, 1)
            remedy = f"{near[0]}?" if near else f"known are {', '.join(keys)}"
            raise UserError(f"{where}: {key}: no such key; {remedy}")
