"""What a checkpoint belongs to: a run, its settings, its model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from zeropods.measure.rank import STRICT


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Of a manifest: who saved it. Of a run: what it may go on from."""

    __pydantic_config__ = STRICT

    run_id: str
    settings: str
    """`digest` of everything that must be equal for two calls to mean the same run."""
    model: dict[str, int | str | bool | None]
    """What must be equal for the files to fit at all: shape, precision, technique."""
    world_size: int
    """Ranks that wrote it."""

    def other_model(self, wanted: Origin) -> str | None:
        """Why a checkpoint of this origin does not fit the wanted model; None where it does."""
        keys = sorted(self.model.keys() | wanted.model.keys())
        for key in keys:
            if self.model.get(key) != wanted.model.get(key):
                return f"of another model: {key} {self.model.get(key)}, expected {wanted.model.get(key)}"
        return None

    def other_run(self, wanted: Origin) -> str | None:
        """Why it is none of the wanted run; None where settings and model are the same."""
        if self.settings != wanted.settings:
            return self.other_model(wanted) or f"of run {self.run_id}, which has other settings"
        return self.other_model(wanted)


def digest(document: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
