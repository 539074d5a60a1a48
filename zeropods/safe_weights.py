"""Weights are read from safetensors files only: any other format may run a program when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

SUFFIX = ".safetensors"


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weights that may be read."""
    return bool(list(folder.glob(f"*{SUFFIX}")))


def refuse_other_weights(folder: Path) -> None:
    """Refuse a model folder whose index or configuration names a weight file of another format.

    transformers takes such a file even where it was asked for safetensors.
    """
    for place, name in _named(folder):
        if not name.endswith(SUFFIX):
            raise UserError(f"{place}: names {name!r} as weights; expected *{SUFFIX}: convert the model first")


def _named(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.glob("*.index.json")):
        weights = _object(path).get("weight_map")
        if isinstance(weights, dict):
            yield from ((path, str(name)) for name in weights.values())
    named = _object(folder / "config.json").get("transformers_weights")
    if named is not None:
        yield folder / "config.json", str(named)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none: what cannot be read is refused by whoever loads it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
