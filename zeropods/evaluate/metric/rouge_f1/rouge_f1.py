"""ROUGE F1 for `evaluate.load`, from this folder and without a network.

The numbers are those of the hub's `rouge` metric (Lin, 2004; package rouge_score), but with plain
means: its bootstrap draws at random around the same value.
"""

from __future__ import annotations

from statistics import fmean

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class RougeF1(evaluate.Metric):
    """`compute(predictions=[text], references=[text], average=True)`: F1 by ROUGE type.

    F1 is a number from 0 to 1. With `average=False` each type has a list, with one value per pair.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean ROUGE F1 of texts.",
            citation="Lin, 2004: ROUGE: A Package for Automatic Evaluation of Summaries",
            inputs_description="predictions and references: texts",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(
        self, predictions: list[str], references: list[str], average: bool = True
    ) -> dict[str, float] | dict[str, list[float]]:
        scorer = RougeScorer(list(TYPES))
        lists: dict[str, list[float]] = {name: [] for name in TYPES}
        for reference, prediction in zip(references, predictions, strict=True):
            score = scorer.score(reference, prediction)
            for name in TYPES:
                lists[name].append(score[name].fmeasure)
        if not average:
            return lists
        return {name: fmean(values) for name, values in lists.items()}
