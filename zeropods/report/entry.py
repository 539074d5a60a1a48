"""A run folder as the summary sees it: its record, or in one line why there is none to show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.records import read_json, read_record
from zeropods.measure.run_folder import CONFIG, LAUNCH_LOCK, LOCK, RECORD, is_held

SCORED_SPLITS = ("test", "dev")
"""The first that has a score is shown."""
Facts = dict[str, Any]

_NUMBER = (int, float)
_ABSENT = type(None)
RECORD_TYPES: dict[str, tuple[type, ...]] = {
    "run_id": (str,),
    "model_id": (str,),
    "init": (str,),
    "technique": (str,),
    "pods": (int,),
    "prompt": (str, _ABSENT),
    "precision": (str,),
    "effective_batch_size": (int,),
    "steps": (int,),
    "train_seconds": (*_NUMBER, _ABSENT),
    "samples_per_second": (*_NUMBER, _ABSENT),
    "losses": (list,),
    "eval_losses": (list,),
    "ranks": (list,),
}
LOSS_TYPES: dict[str, tuple[type, ...]] = {"step": _NUMBER, "loss": _NUMBER}
RANK_TYPES: dict[str, tuple[type, ...]] = {
    "peak_resident_bytes": (int, _ABSENT),
    "peak_allocated_bytes": (int, _ABSENT),
}
SCORE_TYPES: dict[str, tuple[type, ...]] = {
    "examples": (int,),
    "executable": (int,),
    "exact_match": _NUMBER,
    "logical_form_accuracy": _NUMBER,
    "execution_accuracy": (*_NUMBER, _ABSENT),
    "intervals": (dict,),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run of a summary."""

    name: str
    status: str
    """The record's; without one `running`, `killed` or `broken`."""
    reason: str | None = None
    """One line."""
    facts: Facts = field(default_factory=dict)
    """The record; the configuration where there is no record yet; nothing where it is broken."""
    split: str | None = None
    score: Facts | None = None
    tables: str = "all"
    """Which tables the score is about: `all`, `known` or `unseen`."""

    @property
    def losses(self) -> list[dict[str, float]]:
        return self.facts.get("losses", [])

    @property
    def eval_losses(self) -> list[dict[str, float]]:
        return self.facts.get("eval_losses", [])

    def by_tables(self) -> Iterator[Entry]:
        """The entry, then once for each group of tables that its score has."""
        yield self
        for group, score in ((self.score or {}).get("groups") or {}).items():
            yield replace(self, score=score, tables=group.removesuffix("_tables"))


def read_entry(folder: Path, name: str) -> Entry:
    """Read a run folder; what is wrong with it becomes a status and a reason."""
    try:
        entry = _entry(folder, name)
    except (UserError, OSError) as error:
        return Entry(name=name, status="broken", reason=_one_line(error, folder))
    try:
        split, score = _score(folder)
    except (UserError, OSError) as error:
        return replace(entry, reason=_one_line(error, folder))
    return replace(entry, split=split, score=score)


def _entry(folder: Path, name: str) -> Entry:
    if (folder / RECORD).is_file():
        record = read_record(folder)
        _check_record(folder / RECORD, record)
        reason = _one_line(record["reason"], folder) if record.get("reason") else None
        return Entry(name=name, status=record["status"], reason=reason, facts=record)
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if is_held(folder / LOCK) or is_held(folder / LAUNCH_LOCK):
        return Entry(name=name, status="running", reason="no record yet", facts=config)
    return Entry(name=name, status="killed", reason="ended without a record; the same command resumes it", facts=config)


def _score(folder: Path) -> tuple[str | None, Facts | None]:
    for split in SCORED_SPLITS:
        path = folder / f"score.{split}.json"
        if path.is_file():
            score = read_json(path)
            for part in (score, *(score.get("groups") or {}).values()):
                _check(path, part, SCORE_TYPES)
            return split, score
    return None, None


def _check_record(path: Path, record: Facts) -> None:
    _check(path, record, RECORD_TYPES)
    for key, types in (("losses", LOSS_TYPES), ("eval_losses", LOSS_TYPES), ("ranks", RANK_TYPES)):
        for part in record[key]:
            _check(path, part, types)


def _check(path: Path, document: Any, types: dict[str, tuple[type, ...]]) -> None:
    if not isinstance(document, dict):
        raise UserError(f"{path}: {document!r:.60}; expected an object with {', '.join(types)}")
    for key, expected in types.items():
        value = document.get(key, "missing")
        if key not in document or not isinstance(value, expected) or not _is_sound(value):
            names = " or ".join("null" if kind is _ABSENT else kind.__name__ for kind in expected)
            raise UserError(f"{path}: {key} is {value!r:.60}; expected {names}: measure again")


def _is_sound(value: object) -> bool:
    """JSON has no NaN, but Python's reader takes it; to Python, true is a number."""
    return not isinstance(value, bool) and (not isinstance(value, float) or math.isfinite(value))


def _one_line(what: object, folder: Path) -> str:
    """A reason without line breaks, and without the place where the run happens to lie."""
    return " ".join(str(what).replace(f"{folder}/", "").split())
