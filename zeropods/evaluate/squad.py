"""Answers to SQuAD's questions against their split: exact match and F1, with intervals."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from zeropods.data.squad import SquadExample, read_squad
from zeropods.errors import UserError
from zeropods.evaluate.intervals import Interval, interval, mean_interval
from zeropods.evaluate.predictions import SquadAnswer, read_answers
from zeropods.evaluate.score import OwnMetric, own_scores
from zeropods.files import write_json

# Exact match and F1 of answers by the rules of SQuAD's official evaluator, version 1.1.
#
# `evaluate-v1.1.py` of the data set's publishers (Rajpurkar et al. 2016, arXiv:1606.05250).

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """What is compared: lower case, without ASCII punctuation and articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether a prediction is one of the answers, normalized."""
    predicted = normalized(prediction)
    return any(predicted == normalized(answer) for answer in answers)


def f1(prediction: str, answers: Iterable[str]) -> float:
    """The best F1 of a prediction's words against one of the answers, 0 to 1."""
    predicted = normalized(prediction).split()
    return max((_word_f1(predicted, normalized(answer).split()) for answer in answers), default=0.0)


def _word_f1(predicted: list[str], gold: list[str]) -> float:
    """A word counts as often as both have it. Of no words F1 is 0, also against no words: so has the evaluator."""
    shared = sum((Counter(predicted) & Counter(gold)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


# Answers to SQuAD's questions against their split: exact match and F1, with intervals.


@dataclass(frozen=True, kw_only=True)
class SquadScore:
    """Means over the answered questions, of 1 and not of 100."""

    task: str = field(default="squad", init=False)
    examples: int
    exact_match: float
    f1: float
    intervals: dict[str, Interval | None]
    """95 %, by `interval` and `mean_interval`."""
    own_metrics: dict[str, float]
    """Means of metrics of one's own, by name."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def score_answers(predictions: Path, data_folder: Path, split: str, *, own: Sequence[OwnMetric] = ()) -> SquadScore:
    """Score a file and write `score.SPLIT.json` beside it; `UserError` where the two do not fit together.

    The file may answer a part of the split: questions without an answer are not counted.
    """
    score = squad_score(list(_pairs(predictions, data_folder, split)), own)
    write_json(predictions.parent / f"score.{split}.json", score.to_json())
    return score


def squad_score(pairs: Sequence[tuple[SquadAnswer, SquadExample]], own: Sequence[OwnMetric] = ()) -> SquadScore:
    """The score of answers to their questions; at least one."""
    exact = sum(exact_match(answer.text, example.answers) for answer, example in pairs)
    f1_scores = [f1(answer.text, example.answers) for answer, example in pairs]
    own_means, own_intervals = own_scores(own, [(answer.text, example.answers) for answer, example in pairs])
    return SquadScore(
        examples=len(pairs),
        exact_match=exact / len(pairs),
        f1=fmean(f1_scores),
        intervals={
            "exact_match": interval(exact, len(pairs)), "f1": mean_interval(f1_scores), **own_intervals,
        },
        own_metrics=own_means,
    )  # fmt: skip


def _pairs(path: Path, data_folder: Path, split: str) -> Iterator[tuple[SquadAnswer, SquadExample]]:
    examples = {example.id: example for example in read_squad(data_folder, split)}
    for number, answer in enumerate(read_answers(path), 1):
        example = examples.get(answer.id)
        if example is None:
            raise UserError(
                f"{path}:{number}: {split} has no question with the id {answer.id!r:.60}; "
                "score the file against the split and data it was made from"
            )
        if (answer.index, answer.question) != (example.index, example.question):
            raise UserError(
                f"{path}:{number}: index {answer.index} and {answer.question!r:.60}, but question {answer.id} is "
                f"number {example.index} of {split} and asks {example.question!r:.60}; score the file against its data"
            )
        yield answer, example
