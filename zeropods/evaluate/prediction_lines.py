"""What prediction files of every task have in common: one JSON object a line, each naming its example."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeropods.errors import UserError


def prediction_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place (`FILE:LINE`) and object of each line; `UserError` at the first that is none, and for an empty file."""
    empty = True
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            empty = False
            place = f"{path}:{number}"
            yield place, _document(place, line)
    if empty:
        raise UserError(f"{path}: the file is empty; expected one prediction a line")


def refuse_missing(place: str, document: dict[str, Any], keys: tuple[str, ...]) -> None:
    """`UserError` for keys that a line lacks."""
    missing = [key for key in keys if key not in document]
    if missing:
        raise UserError(f"{place}: {', '.join(missing)} missing; expected {', '.join(keys)} on every line")


def index_of(place: str, document: dict[str, Any]) -> int:
    """The example's index; `UserError` where it is none."""
    index = document["index"]
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UserError(f"{place}: index {shown(index)}; expected the example's line number, from 0")
    return index


def text_of(place: str, document: dict[str, Any], key: str) -> str:
    """A text of a line; `UserError` where it is none."""
    value = document[key]
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} {shown(value)}; expected text")
    return value


def refuse_twice(place: str, index: int, seen: set[int]) -> None:
    """Note an example's index; `UserError` where it was there before."""
    if index in seen:
        raise UserError(f"{place}: index {index} stands there twice; keep one of them")
    seen.add(index)


def shown(value: object) -> str:
    """A value as a message shows it."""
    return repr(value)[:80]


def _document(place: str, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        start = line[:60].decode("utf-8", "replace").strip()
        raise UserError(f"{place}: {start!r} is broken JSON ({error}); predict again") from None
    if not isinstance(document, dict):
        raise UserError(f"{place}: {shown(document)}; expected a JSON object")
    return document
