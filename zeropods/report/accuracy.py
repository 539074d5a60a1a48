"""The accuracy of a run, or of repeats: as values by name, and as lines of a table for each group of tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from zeropods.report.entry import Entry
from zeropods.report.figures.outcome import Score, inference_result

SHARES = ("exact_match", "logical_form_accuracy", "execution_accuracy")
KEYS = ("split", "tables", "examples", *SHARES, "executable", "inference_kind", "inference_result")


def accuracy(entries: Sequence[Entry]) -> dict[str, Any]:
    """Accuracy over all tables, by key; every key of `KEYS`, with None where nothing was scored.

    Of repeats: the mean of each share. The ends of its interval are the means of theirs: it comes from the choice of
    questions, which is the same in each repeat. Those with another split or number of examples than the first are
    left out.
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
    """Accuracy by key of scores of one split, over all tables, then for each group of them."""
    yield _values(split, "all", _mean_score(scores))
    for group in scores[0].get("groups") or {}:
        parts = [(score.get("groups") or {}).get(group) for score in scores]
        if all(parts):
            yield _values(split, group.removesuffix("_tables"), _mean_score([part for part in parts if part]))


def _scores(entries: Sequence[Entry]) -> tuple[str | None, list[Score]]:
    scored = [(entry.split, entry.score) for entry in entries if entry.score is not None]
    if not scored:
        return None, []
    split, first = scored[0]
    same = [score for of_split, score in scored if (of_split, score["examples"]) == (split, first["examples"])]
    return split, same


def _mean_score(scores: Sequence[Score]) -> Score:
    spans = {key: [score["intervals"].get(key) for score in scores] for key in SHARES}
    return {
        **{key: scores[0][key] for key in ("examples", "executable")},
        **{key: _mean([score[key] for score in scores]) for key in SHARES},
        "intervals": {
            key: [mean(ends) for ends in zip(*found, strict=True)] for key, found in spans.items() if all(found)
        },
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _values(split: str | None, tables: str, score: Score) -> dict[str, Any]:
    kind, value = inference_result(score) or (None, None)
    return {
        "split": split,
        "tables": tables,
        **{key: score[key] for key in ("examples", *SHARES, "executable")},
        **{f"{key}_interval": score["intervals"].get(key) for key in SHARES},
        "inference_kind": kind,
        "inference_result": value,
        "inference_result_interval": score["intervals"].get("execution_accuracy" if kind == "execution" else SHARES[1]),
    }
