"""Exact match and F1 of SQuAD's answers for `evaluate.load`.

They are computed from this folder and without a network. The rules are those of SQuAD's official
evaluator, version 1.1 (`evaluate-v1.1.py`; Rajpurkar et al. 2016, arXiv:1606.05250); the numbers
range from 0 to 1, not to 100.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from statistics import fmean

import datasets
import evaluate

ENGLISH_ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class SquadAccuracy(evaluate.Metric):
    """`compute(predictions=[text], references=[[right answers]], average=True)`.

    The result holds `exact_match` and `f1`, from 0 to 1. Each prediction is scored against its
    best-matching right answer. With `average=False` each result is a list, with one value per
    prediction.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Exact match and F1 by SQuAD's official rules.",
            citation=(
                "Rajpurkar et al., 2016: SQuAD: 100,000+ Questions for Machine Comprehension of "
                "Text"
            ),
            inputs_description="predictions: texts; references: lists of right answers",
            features=datasets.Features(
                {"predictions": text, "references": datasets.Sequence(text)}
            ),
        )

    def _compute(
        self, predictions: list[str], references: list[list[str]], average: bool = True
    ) -> dict[str, float] | dict[str, list[float]]:
        exact_match = []
        f1 = []
        for prediction, right in zip(predictions, references, strict=True):
            words = normalized(prediction).split()
            right_words = [normalized(answer).split() for answer in right]
            exact_match.append(float(words in right_words))
            f1.append(max((word_f1(words, gold) for gold in right_words), default=0.0))
        lists = {"exact_match": exact_match, "f1": f1}
        if not average:
            return lists
        return {name: fmean(values) for name, values in lists.items()}


def normalized(text: str) -> str:
    """The text as it is compared: lower case, words one space apart.

    ASCII punctuation and articles are left out.
    """
    letters = text.lower().translate(NO_PUNCTUATION)
    words = ENGLISH_ARTICLES.sub(" ", letters).split()
    return " ".join(words)


def word_f1(predicted: list[str], gold: list[str]) -> float:
    """F1 of words; a word that both texts have several times counts as often as both have it.

    If no word is shared, F1 is 0, also where both texts are empty, as in the official evaluator.
    """
    common = Counter(predicted) & Counter(gold)
    shared = sum(common.values())
    if not shared:
        return 0.0
    precision = shared / len(predicted)
    recall = shared / len(gold)
    return 2 * precision * recall / (precision + recall)
