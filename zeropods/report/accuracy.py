"""How good the models of runs are: the figures of their scores, by key, and their means over repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from zeropods.evaluate.score_file import LM, SQUAD, TEXT2SQL, QueryScore, Score
from zeropods.report.entry import Entry
from zeropods.report.figures import Values

FIGURES = (
    *("examples", "executable", "text_tokens"),
    *("exact_match", "logical_form_accuracy", "execution_accuracy", "f1", "text_loss", "perplexity"),
)
"""Counts, then measures; a task has some of them."""
MEASURES: dict[str, tuple[str, ...]] = {
    TEXT2SQL: ("exact_match", "logical_form_accuracy", "execution_accuracy"),
    SQUAD: ("exact_match", "f1"),
    LM: ("text_loss", "perplexity"),
}
"""Measures of each task, which may have an interval."""
IN_FILE = {"text_loss": "loss", "text_tokens": "tokens"}
"""Names in a score file that would say too little beside those of a run."""
KEYS = ("split", "tables", *FIGURES, "inference_kind", "inference_result")
OWN = "own_metrics."
"""Prefix of a custom metric's key."""
ROUGE = ("rouge1", "rouge2", "rougeL")
"""Of a score that was asked for them; a query is one line, so that rougeLsum is rougeL."""


def accuracy(entries: Sequence[Entry]) -> Values:
    """Accuracy over all tables, by key; every key of `KEYS`, with None where nothing was scored.

    Of repeats: the mean of each share. The ends of its interval are the means of theirs: it comes from the choice of
    questions, which is the same in each repeat. Those with another task, split or number of examples than the first
    are left out.
    """
    return next(accuracy_lines(entries))


def accuracy_lines(entries: Sequence[Entry]) -> Iterator[Values]:
    """`accuracy`, then once more for each group of tables that all the scores have: `known`, `unseen`."""
    scored = [(entry.split, entry.score) for entry in entries if entry.score is not None]
    if not scored:
        return iter([dict.fromkeys(KEYS)])
    first = scored[0]
    return score_lines(first[0], [score for split, score in scored if _extent(split, score) == _extent(*first)])


def score_lines(split: str | None, scores: Sequence[Score]) -> Iterator[Values]:
    """Accuracy by key of scores of one task and split, over all tables, then for each group of them."""
    yield _line(split, "all", scores)
    queries = [score for score in scores if isinstance(score, QueryScore)]
    for group in (queries[0].groups or {}) if queries else ():
        parts = [(score.groups or {}).get(group) for score in queries]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            yield _line(split, group.removesuffix("_tables"), known)


def _extent(split: str | None, score: Score) -> tuple[Any, ...]:
    return score.task, split, getattr(score, "examples", None), getattr(score, "tokens", None)


def _line(split: str | None, tables: str, scores: Sequence[Score]) -> Values:
    task, found = scores[0].task, [_figures(score) for score in scores]
    values = {key: _mean([one[key] for one in found]) for key in found[0] if all(key in one for one in found)}
    if values["text_loss"] is not None:
        # Perplexities are powers: their mean would not be that of the losses.
        values["perplexity"] = math.exp(values["text_loss"])
    kind, key = _judged_by(task, values)
    return {
        "split": split,
        "tables": tables if task == TEXT2SQL else None,
        **values,
        "inference_kind": kind,
        "inference_result": values[key],
        "inference_result_interval": values[f"{key}_interval"],
    }


def _figures(score: Score) -> Values:
    """The figures of one score, and the intervals of its measures."""
    intervals, own = getattr(score, "intervals", {}), getattr(score, "own_metrics", {})
    rouge = getattr(score, "rouge", None) or {}
    return {
        **{key: getattr(score, IN_FILE.get(key, key), None) for key in FIGURES},
        **{f"{key}_interval": intervals.get(key) for key in MEASURES[score.task]},
        **{name: rouge[name] for name in ROUGE if name in rouge},
        **{f"{OWN}{name}": value for name, value in own.items()},
        **{f"{OWN}{name}_interval": intervals.get(name) for name in own},
    }


def _judged_by(task: str, values: Values) -> tuple[str, str]:
    """What people call the measure that a run is judged by, and its key: logical form where no query could be run."""
    if task == SQUAD:
        return "F1", "f1"
    if task == LM:
        return "perplexity", "perplexity"
    executed = values["execution_accuracy"] is not None
    return ("execution", "execution_accuracy") if executed else ("logical form", "logical_form_accuracy")


def _mean(values: Sequence[Any]) -> Any:
    """Mean of numbers, of intervals the mean of their ends; None where one is missing."""
    if any(value is None for value in values):
        return None
    return [mean(ends) for ends in zip(*values, strict=True)] if isinstance(values[0], tuple) else mean(values)
