"""How good a run's model is, and its answers beside what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from zeropods.evaluate.score_file import LM, SQUAD, TEXT2SQL
from zeropods.report.entry import Entry
from zeropods.report.figures import Score, inference_result

MEASURES: dict[str, tuple[str, ...]] = {
    TEXT2SQL: ("exact_match", "logical_form_accuracy", "execution_accuracy"),
    SQUAD: ("exact_match", "f1"),
    LM: ("text_loss", "perplexity"),
}
"""Of each task; `text_loss` is `loss` in the score file."""
COUNTS: dict[str, tuple[str, ...]] = {
    TEXT2SQL: ("examples", "executable"),
    SQUAD: ("examples",),
    LM: ("text_tokens",),
}
"""`text_tokens` is `tokens` in the score file."""
IN_FILE = {"text_loss": "loss", "text_tokens": "tokens"}
"""Names that would say too little beside those of a run."""
FIGURES = tuple(dict.fromkeys(name for of in (COUNTS, MEASURES) for names in of.values() for name in names))
KEYS = ("split", "tables", *FIGURES, "inference_kind", "inference_result")
OF_RESULT = {"execution": "execution_accuracy", "logical form": "logical_form_accuracy", "F1": "f1"}
"""The measure that an inference result is, by its kind."""
OWN = "own_metrics."
"""Before the name of a metric of the user's own."""


def accuracy(entries: Sequence[Entry]) -> dict[str, Any]:
    """Accuracy over all tables, by key; every key of `KEYS`, with None where nothing was scored.

    Of repeats: the mean of each share. The ends of its interval are the means of theirs: it comes from the choice of
    questions, which is the same in each repeat. Those with another task, split or number of examples than the first
    are left out.
    """
    split, scores = _scores(entries)
    return _values(split, "all", _mean_score(scores)) if scores else dict.fromkeys(KEYS)


def accuracy_lines(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """`accuracy`, then once more for each group of tables that all the scores have: `known`, `unseen`."""
    split, scores = _scores(entries)
    if scores:
        yield from score_lines(split, scores)
    else:
        yield dict.fromkeys(KEYS)


def score_lines(split: str | None, scores: Sequence[Score]) -> Iterator[dict[str, Any]]:
    """Accuracy by key of scores of one task and split, over all tables, then for each group of them."""
    yield _values(split, "all", _mean_score(scores))
    for group in scores[0].get("groups") or {}:
        parts = [(score.get("groups") or {}).get(group) for score in scores]
        if all(parts):
            yield _values(split, group.removesuffix("_tables"), _mean_score([part for part in parts if part]))


def task_of(score: Score) -> str:
    """What a score is of; the groups of one, and files from before there were other tasks, do not say it."""
    return str(score.get("task", TEXT2SQL))


def _scores(entries: Sequence[Entry]) -> tuple[str | None, list[Score]]:
    scored = [(entry.split, entry.score) for entry in entries if entry.score is not None]
    if not scored:
        return None, []
    first = scored[0]
    return first[0], [score for split, score in scored if _extent(split, score) == _extent(*first)]


def _extent(split: str | None, score: Score) -> tuple[Any, ...]:
    return task_of(score), split, score.get("examples", score.get("tokens"))


def _mean_score(scores: Sequence[Score]) -> Score:
    task = task_of(scores[0])
    own = [name for name in scores[0].get("own_metrics") or {} if all(name in s.get("own_metrics", {}) for s in scores)]
    spans = {key: [score.get("intervals", {}).get(key) for score in scores] for key in (*MEASURES[task], *own)}
    means = {key: _mean([score[IN_FILE.get(key, key)] for score in scores]) for key in MEASURES[task]}
    if task == LM and means["text_loss"] is not None:
        # Perplexities are powers: their mean would not be that of the losses.
        means["perplexity"] = math.exp(means["text_loss"])
    return {
        "task": task,
        **{key: scores[0][IN_FILE.get(key, key)] for key in COUNTS[task]},
        **means,
        "own_metrics": {name: mean(score["own_metrics"][name] for score in scores) for name in own},
        "intervals": {
            key: [mean(ends) for ends in zip(*found, strict=True)] for key, found in spans.items() if all(found)
        },
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _values(split: str | None, tables: str, score: Score) -> dict[str, Any]:
    kind, value = inference_result(score) or (None, None)
    intervals, own = score["intervals"], score["own_metrics"]
    return {
        "split": split,
        "tables": tables if task_of(score) == TEXT2SQL else None,
        **{key: score.get(key) for key in FIGURES},
        **{f"{key}_interval": intervals.get(key) for key in MEASURES[task_of(score)]},
        "inference_kind": kind,
        "inference_result": value,
        "inference_result_interval": intervals.get(OF_RESULT.get(str(kind))),
        **{f"{OWN}{name}": mean_ for name, mean_ in own.items()},
        **{f"{OWN}{name}_interval": intervals.get(name) for name in own},
    }
