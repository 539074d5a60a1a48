"""A matrix read from YAML, strictly: what is not understood is refused with its key and its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.sweep.cells import AXES, TECHNIQUES, Axes
from zeropods.sweep.checks import check_matrix
from zeropods.sweep.matrix import SCRIPT, Matrix
from zeropods.sweep.yaml_file import read_yaml
from zeropods.train.scripts import SCRIPTS, arguments_of


def read_matrix(path: Path) -> Matrix:
    """The matrix of a YAML file; `UserError` names the file, the key and the value."""
    return matrix_of(read_yaml(path), str(path))


def matrix_of(document: Mapping[str, Any], place: str) -> Matrix:
    """The matrix of a document, checked; `place` is where it came from, for messages."""
    _known(document, (*AXES, *READERS), place)
    axes = {axis: _axis(axis, document[axis], place) for axis in AXES if axis in document}
    read = {key: reader(document[key], f"{place}: {key}") for key, reader in READERS.items() if key in document}
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


READERS: dict[str, Callable[[Any, str], Any]] = {
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
