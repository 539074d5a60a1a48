"""Flags as the fields of a dataclass: declared with their help, read strictly, checked."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from typing import Any, TypeVar, get_args, get_type_hints

from zeropods.errors import UserError

Flags = TypeVar("Flags")
READERS: dict[type, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"True": True, "False": False}[text],
}


def flag(default: Any, text: str) -> Any:
    """A field with its help."""
    return field(default=default, metadata={"help": text})


def parse_flags(kind: type[Flags], argv: Sequence[str], *, script: str, description: str) -> Flags:
    """Read flags strictly: no abbreviation, no unknown flag; argparse ends with status 2 on either."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(kind, prog=script, allow_abbrev=False, description=description)
    arguments, unknown = parser.parse_args_into_dataclasses(
        list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; --help lists the flags")
    return arguments


def read_flags(kind: type[Any], argv: Sequence[str]) -> dict[str, Any]:
    """The flags of a call with their defaults, by name and typed, without loading transformers.

    For a check before launching: what cannot be read is left out, and refused by the script itself.
    """
    words = [word for text in argv for word in (text.split("=", 1) if text.startswith("--") else [text])]
    types = types_of(kind)
    read = {f.name: f.default for f in fields(kind)}
    for word, value in itertools.pairwise(words):
        name = word.removeprefix("--")
        if word.startswith("--") and name in types:
            read.pop(name, None)
            with contextlib.suppress(KeyError, ValueError):
                read[name] = READERS[types[name]](value)
    return read


def types_of(kind: type[Any]) -> dict[str, type]:
    """The type of each flag's value: that of `X | None` is X."""
    hints = get_type_hints(kind)
    return {f.name: (get_args(hints[f.name]) or (hints[f.name],))[0] for f in fields(kind)}


def one_of(name: str, value: str | None, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices; None is not given, and passes."""
    if value is not None and value not in choices:
        raise UserError(f"--{name} {value!r}; expected {', '.join(choices)}")


def at_least(name: str, value: float | None, least: float) -> None:
    """Refuse what is less, or not a number; None is not given, and passes."""
    if value is not None and not value >= least:
        raise UserError(f"--{name} {value}; expected at least {least}")


def within(name: str, value: float | None, least: float, most: float) -> None:
    """Refuse what is less or more, or not a number; None is not given, and passes."""
    if value is not None and not least <= value <= most:
        raise UserError(f"--{name} {value}; expected {least} to {most}")


def finite(name: str, value: float) -> None:
    """Refuse what is negative, infinite or not a number."""
    if not 0 <= value < math.inf:
        raise UserError(f"--{name} {value}; expected a number of at least 0")


def amount(steps_flag: str, steps: int, epochs_flag: str, epochs: float) -> None:
    """Refuse a run of no length: steps, or where these are -1, epochs."""
    if steps != -1:
        at_least(steps_flag, steps, 1)
    elif not 0 < epochs < math.inf:
        raise UserError(f"--{epochs_flag} {epochs}; expected more than 0")


def below_one(name: str, value: float | None) -> None:
    """Refuse what is not at least 0 and less than 1; None is not given, and passes."""
    if value is not None and not 0 <= value < 1:
        raise UserError(f"--{name} {value}; expected 0 or more, and less than 1")
