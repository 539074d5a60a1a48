"""JSON objects, one a line; what is wrong with a line is said with its number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeropods.errors import UserError


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and object of every line; an empty file raises `UserError` too."""
    number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield number, json_object(f"{path}:{number}", line)
    if number == 0:
        raise UserError(f"{path}: the file is empty; expected one JSON object a line")


def json_object(place: str, line: bytes) -> dict[str, Any]:
    """The object that a text in UTF-8 holds."""
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: byte {line[error.start]:#04x} is not UTF-8; convert the file") from None
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{place}: broken JSON at {at}: {error.msg}; fetch the file again") from None
    except RecursionError:
        raise UserError(f"{place}: nested too deeply to be an example or a table; fetch the file again") from None
    except ValueError as error:  # An integer of thousands of digits.
        raise UserError(f"{place}: {error}; fetch the file again") from None
    if not isinstance(document, dict):
        raise UserError(f"{place}: {type(document).__name__}; expected a JSON object")
    return document


def text_of(place: str, document: dict[str, Any], key: str) -> str:
    """A text that is there, is more than spaces, and can be encoded."""
    value = document.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: {key} is {value!r}; expected text")
    return encodable(place, key, value)


def encodable(place: str, key: str, value: str) -> str:
    r"""`value`, unless it holds half of a surrogate pair, as `"\ud800"` in JSON, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise UserError(f"{place}: {key} holds {half!r}, half a character; correct it") from None
    return value
