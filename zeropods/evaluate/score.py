"""A prediction file against its split: accuracy, its intervals, and ROUGE if asked for.

`exact_match` compares the text, `logical_form_accuracy` the parts, `execution_accuracy` the results, the last
over the `executable` examples: those whose gold query finds something on the rows at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from zeropods.atomic import write_json
from zeropods.data.wikisql import read_split, read_tables
from zeropods.errors import UserError
from zeropods.evaluate.grade import Grade, Pair, grades
from zeropods.evaluate.interval import Interval, interval
from zeropods.evaluate.own_metric import OwnMetric, own_scores
from zeropods.evaluate.predictions import read_predictions


@dataclass(frozen=True, kw_only=True)
class Score:
    """Shares are of 1, not per cent; what could not be measured is None."""

    examples: int
    exact_match: float
    logical_form_accuracy: float
    execution_accuracy: float | None
    executable: int
    unparseable: int
    intervals: dict[str, Interval | None]
    """Of the three accuracies: 95 %, by `interval`; of metrics of one's own: by `mean_interval`."""
    rouge: dict[str, float] | None
    """Mean F1 of rouge1, rouge2, rougeL, rougeLsum."""
    groups: dict[str, Score] | None = None
    """`known_tables` and `unseen_tables`: examples whose table is in train.tables.jsonl, and the others."""
    own_metrics: dict[str, float] = field(default_factory=dict)
    """Means of metrics of one's own, by name; of all examples, not of groups."""

    def to_json(self) -> dict[str, Any]:
        return {"task": "text2sql", **asdict(self)}


def score_predictions(
    predictions: Path, data_folder: Path, split: str, *, rouge: bool = False, own: Sequence[OwnMetric] = ()
) -> Score:
    """Score a file and write `score.SPLIT.json` beside it; `UserError` where the two do not fit together."""
    graded = list(grades(_pairs(predictions, data_folder, split)))
    if rouge:
        graded = list(_with_rouge(graded))
    score = replace(_with_own(_score(graded), graded, own), groups=_groups(graded, data_folder, split))
    write_json(predictions.parent / f"score.{split}.json", score.to_json())
    return score


def _pairs(path: Path, data_folder: Path, split: str) -> Iterator[Pair]:
    examples = {example.index: example for example in read_split(data_folder, split)}
    for number, prediction in enumerate(read_predictions(path), 1):
        example = examples.get(prediction.index)
        place = f"{path}:{number}"
        if example is None:
            last = len(examples) - 1
            raise UserError(f"{place}: index {prediction.index}; the examples of {split} are 0 to {last}")
        if prediction.question not in (None, example.question):
            raise UserError(
                f"{place}: question {prediction.question!r}, but example {example.index} of {split} asks "
                f"{example.question!r}; score the file against the split and data it was made from"
            )
        yield prediction, example


def _score(graded: Sequence[Grade]) -> Score:
    executed = [grade.execution for grade in graded if grade.execution is not None]
    exact = sum(grade.predicted_text == grade.gold_text for grade in graded)
    logical_form = sum(grade.logical_form for grade in graded)
    return Score(
        examples=len(graded),
        exact_match=exact / len(graded),
        logical_form_accuracy=logical_form / len(graded),
        execution_accuracy=fmean(executed) if executed else None,
        executable=len(executed),
        unparseable=sum(not grade.parsed for grade in graded),
        intervals={
            "exact_match": interval(exact, len(graded)),
            "logical_form_accuracy": interval(logical_form, len(graded)),
            "execution_accuracy": interval(sum(executed), len(executed)),
        },
        rouge=_mean_rouge([grade.rouge for grade in graded if grade.rouge is not None]),
    )


def _with_own(score: Score, graded: Sequence[Grade], own: Sequence[OwnMetric]) -> Score:
    means, intervals = own_scores(own, [(grade.predicted_text, (grade.gold_text,)) for grade in graded])
    return replace(score, intervals={**score.intervals, **intervals}, own_metrics=means)


def _groups(graded: Sequence[Grade], data_folder: Path, split: str) -> dict[str, Score] | None:
    """Scores by whether train has the table; None where there is no train file, or only one kind."""
    tables = Path(data_folder) / "train.tables.jsonl"
    if split == "train" or not tables.is_file():
        return None
    known = read_tables(tables).keys()
    parts = {
        "known_tables": [grade for grade in graded if grade.table_id in known],
        "unseen_tables": [grade for grade in graded if grade.table_id not in known],
    }
    return {name: _score(part) for name, part in parts.items()} if all(parts.values()) else None


def _with_rouge(graded: Sequence[Grade]) -> Iterator[Grade]:
    import evaluate

    metric = evaluate.load(str(Path(__file__).parent / "metric" / "rouge_f1"), keep_in_memory=True)
    predicted, gold = [grade.predicted_text for grade in graded], [grade.gold_text for grade in graded]
    lists = metric.compute(predictions=predicted, references=gold, average=False)
    for grade, *values in zip(graded, *lists.values(), strict=True):
        yield replace(grade, rouge=dict(zip(lists, values, strict=True)))


def _mean_rouge(rouges: Sequence[dict[str, float]]) -> dict[str, float] | None:
    return {name: fmean(rouge[name] for rouge in rouges) for name in rouges[0]} if rouges else None
