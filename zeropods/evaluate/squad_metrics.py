"""Exact match and F1 of answers by the rules of SQuAD's official evaluator, version 1.1.

`evaluate-v1.1.py` of the data set's publishers (Rajpurkar et al. 2016, arXiv:1606.05250).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

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
