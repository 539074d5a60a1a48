"""Names of checkpoints in the `checkpoints/` of a run folder."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"checkpoint-(\d{1,18})(\.previous)?", re.ASCII)


def name_of(step: int) -> str:
    """The folder that a step is saved in: the name that transformers gives it."""
    return f"checkpoint-{step}"


def previous_of(step: int) -> str:
    """Where a complete checkpoint of the same step waits until its successor is complete."""
    return f"checkpoint-{step}.previous"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None where it is no such name."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else None


def names_of(folder: Path) -> set[str]:
    """Names of all that look like checkpoints; none where the folder is not there."""
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if step_of(path.name) is not None}


def newest_first(names: set[str]) -> list[str]:
    """By step; what was saved again comes before what it replaces."""
    return sorted(names, key=lambda name: (-(step_of(name) or 0), len(name), name))
