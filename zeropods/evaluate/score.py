"""A prediction file against its split: accuracy, its intervals, and ROUGE if asked for."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from zeropods.data.wikisql import Example, read_split, read_tables
from zeropods.errors import UserError
from zeropods.evaluate.intervals import Interval, interval, mean_interval
from zeropods.evaluate.predictions import Prediction, read_predictions
from zeropods.files import write_json
from zeropods.sql.execute import Execution, is_usable
from zeropods.sql.query import Query
from zeropods.sql.text import format_query

# Each prediction against its example, by the rules of WikiSQL's official evaluator.
#
# `evaluate.py` and `lib/query.py` of github.com/salesforce/WikiSQL.

Pair = tuple[Prediction, Example]


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What is right about one prediction."""

    table_id: str
    predicted_text: str
    """The model's own text; in the official form, which has none, the query's text or nothing."""
    gold_text: str
    parsed: bool
    logical_form: bool
    execution: bool | None
    """None where the gold query finds nothing on the rows at hand."""
    rouge: dict[str, float] | None = None
    """F1 by name; None where it was not asked for."""


def grades(pairs: Iterable[Pair]) -> Iterator[Grade]:
    """Grade predictions table by table, so that each table is loaded once."""
    ordered = sorted(pairs, key=lambda pair: pair[1].table.id)
    for _, group in groupby(ordered, key=lambda pair: pair[1].table.id):
        yield from _grades_on_one_table(list(group))


def same_logical_form(predicted: Query | None, gold: Query) -> bool:
    """Whether column, aggregate and the set of conditions agree; values as text in lower case."""
    return predicted is not None and _logical_form(predicted) == _logical_form(gold)


def _logical_form(query: Query) -> tuple[int, int, frozenset[tuple[int, int, str]]]:
    conditions = frozenset((column, operator, value.lower()) for column, operator, value in query.conds)
    return query.sel, query.agg, conditions


def _grades_on_one_table(pairs: list[Pair]) -> Iterator[Grade]:
    table = pairs[0][1].table
    with closing(Execution(table)) if table.rows else nullcontext() as execution:
        for prediction, example in pairs:
            yield Grade(
                table_id=example.table.id,
                predicted_text=_predicted_text(prediction, example),
                gold_text=format_query(example.query, example.table.header),
                parsed=prediction.query is not None,
                logical_form=same_logical_form(prediction.query, example.query),
                execution=_same_result(prediction.query, example, execution),
            )


def _predicted_text(prediction: Prediction, example: Example) -> str:
    if prediction.text is not None:
        return prediction.text
    try:
        return format_query(prediction.query, example.table.header) if prediction.query else ""
    except IndexError:
        return ""


def _same_result(predicted: Query | None, example: Example, execution: Execution | None) -> bool | None:
    if execution is None:
        return None
    gold = execution.execute(example.query)
    if not is_usable(example.query, gold):
        return None
    return predicted is not None and execution.execute(predicted) == gold


# A metric of one's own: one function, in one place, named on the command line.
#
#     # lengths.py
#     def short(prediction: str, answers: Sequence[str]) -> float:
#         "1 for an answer of at most three words, else 0."
#         return float(len(prediction.split()) <= 3)
#
#     zeropods score predictions.dev.jsonl --data squad --split dev --metric lengths:short
#
# It is called once for each example, with the model's text and every right answer (of text-to-SQL: the gold query's
# text). The mean of what it returns stands in the score file under the function's name, with its 95 % interval.

Metric = Callable[[str, Sequence[str]], float]
Answered = tuple[str, Sequence[str]]
"""A prediction and the right answers."""


@dataclass(frozen=True)
class OwnMetric:
    """A metric by its name."""

    name: str
    function: Metric

    def values(self, answered: Sequence[Answered]) -> list[float]:
        """Its value for each example; `UserError` names the first that is no finite number."""
        found = []
        for number, (prediction, answers) in enumerate(answered):
            value = self.function(prediction, answers)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(
                    f"--metric {self.name}: {value!r:.60} for prediction {number}, {prediction!r:.40}; "
                    "expected a finite number"
                )
            found.append(float(value))
        return found


def own_metric(named: str) -> OwnMetric:
    """The metric that `module:function` names; modules are also looked for in the working folder.

    Raises:
        UserError: another form, a module that is not there, or no function of that name in it.
    """
    module_name, _, name = named.partition(":")
    if not module_name or not name.isidentifier():
        raise UserError(f"--metric {named!r}; expected module:function, as in lengths:short")
    with _working_folder_first():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UserError(f"--metric {named}: {error}; expected a module here or in the environment") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"--metric {named}: {module_name} has no function {name}; expected one (prediction, answers)")
    return OwnMetric(name, function)


def own_scores(
    metrics: Sequence[OwnMetric], answered: Sequence[Answered]
) -> tuple[dict[str, float], dict[str, Interval | None]]:
    """Means and their intervals by name; two metrics of one name are refused."""
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--metric: two functions are called {twice}; rename one")
    values = {metric.name: metric.values(answered) for metric in metrics}
    means = {name: fmean(of_all) for name, of_all in values.items()}
    return means, {name: mean_interval(of_all) for name, of_all in values.items()}


@contextmanager
def _working_folder_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


# A prediction file against its split: accuracy, its intervals, and ROUGE if asked for.
#
# `exact_match` compares the text, `logical_form_accuracy` the parts, `execution_accuracy` the results, the last
# over the `executable` examples: those whose gold query finds something on the rows at hand.


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
