"""Exact match and F1 of SQuAD's answers for `evaluate.load`, from this folder and without a network.

The rules are those of SQuAD's official evaluator, version 1.1 (`evaluate-v1.1.py`; Rajpurkar et al. 2016,
arXiv:1606.05250); the numbers range from 0 to 1, not to 100.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from statistics import fmean

import datasets
import evaluate

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class SquadAccuracy(evaluate.Metric):
    """`compute(predictions=[text], references=[[right answers]], average=True)`: `exact_match` and `f1`, from 0 to 1.

    Each prediction is scored against its best-matching right answer. With `average=False` each result is a list, with
    one value per prediction.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Exact match and F1 by SQuAD's official rules.",
            citation="Rajpurkar et al., 2016: SQuAD: 100,000+ Questions for Machine Comprehension of Text",
            inputs_description="predictions: texts; references: lists of right answers",
            features=datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
        )

    def _compute(
        self, predictions: list[str], references: list[list[str]], average: bool = True
    ) -> dict[str, float] | dict[str, list[float]]:
        words = [normalized(prediction).split() for prediction in predictions]
        answers = [[normalized(answer).split() for answer in right] for right in references]
        lists = {
            "exact_match": [float(mine in right) for mine, right in zip(words, answers, strict=True)],
            "f1": [
                max((word_f1(mine, gold) for gold in right), default=0.0)
                for mine, right in zip(words, answers, strict=True)
            ],
        }
        return {name: fmean(values) for name, values in lists.items()} if average else lists


def normalized(text: str) -> str:
    """The text as it is compared: lower case, without ASCII punctuation and articles, words one space apart."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def word_f1(predicted: list[str], gold: list[str]) -> float:
    """F1 of words; one counts as often as both texts have it. Without words F1 is 0, as in the official evaluator."""
    shared = sum((Counter(predicted) & Counter(gold)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(gold)
    return 2 * precision * recall / (precision + recall)
