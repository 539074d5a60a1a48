"""Score files of every task, read strictly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.record import read_json

ScoreFacts = dict[str, Any]

TEXT2SQL, SQUAD, LM = "text2sql", "squad", "lm"
_NUMBER = (int, float)
_ABSENT = type(None)
KINDS: dict[str, dict[str, tuple[type, ...]]] = {
    TEXT2SQL: {
        "examples": (int,),
        "executable": (int,),
        "exact_match": _NUMBER,
        "logical_form_accuracy": _NUMBER,
        "execution_accuracy": (*_NUMBER, _ABSENT),
        "intervals": (dict,),
    },
    SQUAD: {"examples": (int,), "exact_match": _NUMBER, "f1": _NUMBER, "intervals": (dict,)},
    LM: {"tokens": (int,), "loss": _NUMBER, "perplexity": _NUMBER},
}
"""What a score of each task holds, and of which kinds; a file may hold more."""


def read_score(path: Path) -> ScoreFacts:
    """The score in `score.SPLIT.json`. One without `task` is of text-to-SQL: files were written so before there were
    other tasks.

    Raises:
        UserError: a file that is damaged, or the first value that is missing or of another kind.
    """
    score = read_json(path)
    task = score.setdefault("task", TEXT2SQL)
    if task not in KINDS:
        raise UserError(f"{path}: task is {task!r:.60}; expected one of {', '.join(KINDS)}: measure again")
    groups = score.get("groups") or {}
    if not isinstance(groups, dict):
        raise UserError(f"{path}: groups is {groups!r:.60}; expected an object: measure again")
    for part in (score, *groups.values()):
        _check(path, task, part)
    _check_own(path, score.get("own_metrics") or {})
    return score


def _check(path: Path, task: str, score: Any) -> None:
    kinds = KINDS[task]
    if not isinstance(score, dict):
        raise UserError(f"{path}: {score!r:.60}; expected an object with {', '.join(kinds)}")
    for key, expected in kinds.items():
        value = score.get(key, "missing")
        if key not in score or not isinstance(value, expected) or not _is_sound(value):
            names = " or ".join("null" if kind is _ABSENT else kind.__name__ for kind in expected)
            raise UserError(f"{path}: {key} is {value!r:.60}; expected {names}: measure again")
    for key, span in score.get("intervals", {}).items():
        # Where nothing could be measured there is no interval either.
        if span is not None and not _is_interval(span):
            raise UserError(f"{path}: intervals.{key} is {span!r:.60}; expected two numbers: measure again")


def _check_own(path: Path, values: Any) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{path}: own_metrics is {values!r:.60}; expected an object: measure again")
    for name, value in values.items():
        if not isinstance(value, _NUMBER) or not _is_sound(value):
            raise UserError(f"{path}: own_metrics.{name} is {value!r:.60}; expected a number: measure again")


def _is_interval(span: object) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(isinstance(end, _NUMBER) for end in span)


def _is_sound(value: object) -> bool:
    """JSON has no NaN, but Python's reader takes it; to Python, true is a number."""
    return not isinstance(value, bool) and (not isinstance(value, float) or math.isfinite(value))
