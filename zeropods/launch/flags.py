"""A script's flags, read from its arguments without loading the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from zeropods.errors import UserError


def flag_values(arguments: Sequence[str]) -> dict[str, str]:
    """Values by flag name, without dashes: of `--name value` and of `--name=value`; the last one wins."""
    values: dict[str, str] = {}
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument[2:].partition("=")
        values[name] = value if equals else ("" if following.startswith("--") else following)
    return values


def typed(values: Mapping[str, str]) -> dict[str, Any]:
    """The values as what they look like: numbers, truth values, text."""
    return {name: _value(text) for name, text in values.items()}


def _value(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def run_folder_of(arguments: Sequence[str], working_folder: Path, script: str | Path = "textsql_train.py") -> Path:
    """The run folder that a script's arguments name; where they name none, the script's own default if it is ours."""
    from zeropods.train.arguments import TextToSQLArguments
    from zeropods.train.scripts import arguments_of

    kind = arguments_of(script) or TextToSQLArguments
    return (working_folder / flag_values(arguments).get("outputdir", kind.outputdir)).resolve()


def find_script(name: str | Path, working_folder: Path, project: Path) -> Path:
    """A script of the working folder, else one of the project."""
    for folder in (working_folder, project):
        path = (folder / name).resolve()
        if path.is_file():
            return path
    raise UserError(f"{name}: no such script, neither in {working_folder} nor in {project}")
