"""The project's own training scripts and their flags, so that a call can be checked before anything is launched."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.causal_arguments import CausalArguments
from zeropods.train.run_arguments import RunArguments

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS: dict[str, type[RunArguments]] = {kind.script: kind for kind in (TextToSQLArguments, CausalArguments)}
"""By the file's name, at the top of the project."""


def arguments_of(script: str | Path) -> type[RunArguments] | None:
    """The flags of one of our scripts, by its name or its place; None for another one."""
    path = Path(script)
    ours = path == Path(path.name) or path == PROJECT / path.name
    return SCRIPTS.get(path.name) if ours else None


def unknown_flag(kind: type[RunArguments], name: str, known: list[str]) -> str | None:
    """What is wrong with a flag's name, given without dashes, with the remedy; None where a script knows it."""
    if name in known:
        return None
    near = get_close_matches(name, known, 1)
    return f"no flag of {kind.script}; {f'{near[0]}?' if near else '--help lists them'}"
