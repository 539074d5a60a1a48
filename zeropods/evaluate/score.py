"""Prediction files, and their scores: accuracy through the metrics of `metric/`, with 95 % intervals."""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import Field

from zeropods.data.squad import SquadExample, read_squad
from zeropods.data.wikisql import Example, read_split, table_ids
from zeropods.errors import UserError
from zeropods.evaluate.score_json import Interval, QueryScore, SquadScore
from zeropods.files import validated_lines, write_text
from zeropods.measure.intervals import score_interval
from zeropods.sql.query import AGGREGATES, Query, format_query
from zeropods.tables import counted

if TYPE_CHECKING:
    from evaluate import EvaluationModule


AnyExample = TypeVar("AnyExample", Example, SquadExample)
Metric = Callable[[str, Sequence[str]], float]
"""A custom metric: a function of a prediction and the right answers."""
Graded = dict[str, list[Any]]
"""Lists by name of a metric's result, with one value per prediction; None where it could not be measured."""
METRICS = Path(__file__).parent / "metric"


def score(
    predictions: Path, data: Path, split: str, *, rouge: bool = False, metrics: Sequence[str] = ()
) -> QueryScore | SquadScore:
    """Score a file of either task and write `score.SPLIT.json` beside it.

    The file may hold only a part of the split: examples without a prediction are not counted. A file in the form of
    WikiSQL's official evaluator holds a line for each example of the split.

    Args:
        metrics: custom metrics, each as `module:function`.

    Raises:
        UserError: predictions and data do not fit together, or `rouge` is requested for SQuAD's answers.
    """
    custom = custom_metrics(metrics)
    result: QueryScore | SquadScore
    if _line_type(predictions) is _AnswerLine:
        if rouge:
            raise UserError("--rouge: is for text2sql, but these predictions are for squad; leave it out")
        answers = _paired(predictions, split, read_predictions(predictions), read_squad(data, split))
        result = _squad_score(answers, custom)
    else:
        known = table_ids(data, "train") if split != "train" else set[str]()
        result = _query_score(_query_pairs(predictions, data, split), known, rouge, custom)
    result.write(Path(predictions).parent, split)
    return result


def right_queries(predictions: Path, data: Path, split: str) -> dict[int, bool]:
    """Whether each example of a text-to-SQL file is answered right, by index: executable ones are judged by what they
    find, the others by their logical form. Raises what `score` raises."""
    pairs = _query_pairs(predictions, data, split)
    graded = _graded_queries(pairs)
    each = zip(pairs, graded["execution_accuracy"], graded["logical_form_accuracy"], strict=True)
    return {example.index: bool(form if found is None else found) for (_, example), found, form in each}


def load_metric(name: str) -> EvaluationModule:
    """A metric of `zeropods/evaluate/metric/`, by `evaluate.load`.

    For its own pipelines, which are not used here, `evaluate` checks for transformers and loads torch with it: two
    thirds of the time of a score. Where transformers has not been loaded yet, it is hidden from `evaluate`.
    """
    hidden = "transformers" not in sys.modules
    if hidden:
        sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        import evaluate
    finally:
        if hidden:
            del sys.modules["transformers"]
    return evaluate.load(str(METRICS / name), keep_in_memory=True)


def _query_pairs(path: Path, data: Path, split: str) -> list[tuple[Prediction, Example]]:
    """Each query of a file paired with its example, whichever of the two forms the file has."""
    if _line_type(path) is _OfficialLine:
        return _official_pairs(path, split, list(read_split(data, split)))
    return _paired(path, split, read_predictions(path), read_split(data, split))


def _official_pairs(path: Path, split: str, examples: Sequence[Example]) -> list[tuple[Prediction, Example]]:
    """The lines of the official evaluator's file, each paired with the example in the same place of the split."""
    lines = []
    for place, line in validated_lines(_OfficialLine, path, MEND_OFFICIAL):
        if line.query is None and line.error is NO_ERROR_KEY:
            raise UserError(f"{place}: has neither a query nor an error; {MEND_OFFICIAL}")
        lines.append(line)
    if len(lines) != len(examples):
        raise UserError(
            f"{path}: {counted(len(lines), 'line')}, but {split} has {counted(len(examples), 'example')}; "
            "the official evaluator's file has one line for each example, in order"
        )
    pairs = []
    for line, example in zip(lines, examples, strict=True):
        has_failed = line.error is not NO_ERROR_KEY and bool(line.error)
        query = None if has_failed else line.query
        text = ""
        if query is not None and query.fits(len(example.table.header)):
            text = format_query(query, example.table.header)
        prediction = Prediction(index=example.index, question=example.question, text=text, query=query)
        pairs.append((prediction, example))
    return pairs


def _paired(
    path: Path, split: str, predictions: Sequence[Prediction], examples: Iterable[AnyExample]
) -> list[tuple[Prediction, AnyExample]]:
    """Each prediction paired with its example."""
    by_index = {example.index: example for example in examples}
    pairs = []
    for number, prediction in enumerate(predictions, 1):
        example, place = by_index.get(prediction.index), f"{path}:{number}"
        if example is None:
            last = len(by_index) - 1
            raise UserError(f"{place}: index {prediction.index}; the examples of {split} are 0 to {last}")
        if prediction.question != example.question or prediction.id != getattr(example, "id", None):
            named = "" if prediction.id is None else f" of id {prediction.id!r:.60}"
            raise UserError(
                f"{place}: question {prediction.question!r:.60}{named}, but example {example.index} of {split} asks "
                f"{example.question!r:.60}; score the file against the split and data it was made from"
            )
        pairs.append((prediction, example))
    return pairs


def _query_score(
    pairs: Sequence[tuple[Prediction, Example]], known: set[str], rouge: bool, custom: Mapping[str, Metric]
) -> QueryScore:
    """The score of text-to-SQL; `known` holds the ids of the tables of train."""
    texts = [prediction.text for prediction, _ in pairs]
    gold = [format_query(example.query, example.table.header) for _, example in pairs]
    graded = _graded_queries(pairs)
    if rouge:
        graded |= load_metric("rouge_f1").compute(predictions=texts, references=gold, average=False)
    groups, kinds = defaultdict(list), defaultdict(list)
    for i, (_, example) in enumerate(pairs):
        groups[example.table.id not in known].append(i)
        kinds[False, example.query.agg].append(i)
        kinds[True, len(example.query.conds)].append(i)
    whole = _accuracies(graded, range(len(pairs)))
    answered = [(text, (right,)) for text, right in zip(texts, gold, strict=True)]
    means, intervals = custom_scores(custom, answered, [prediction.index for prediction, _ in pairs])
    names = {False: "known_tables", True: "unseen_tables"}
    return replace(
        whole,
        intervals={**whole.intervals, **intervals},
        own_metrics=means,
        groups={name: _accuracies(graded, groups[new]) for new, name in names.items()} if len(groups) == 2 else None,
        kinds={
            counted(number, "condition") if is_count else AGGREGATES[number] or "no aggregate": _accuracies(
                graded, rows
            )
            for (is_count, number), rows in sorted(kinds.items())
        },
    )


def _graded_queries(pairs: Sequence[tuple[Prediction, Example]]) -> Graded:
    graded: Graded = load_metric("query_accuracy").compute(
        predictions=[prediction.text for prediction, _ in pairs],
        references=[{"query": json.dumps(e.query.to_json()), "header": e.table.header} for _, e in pairs],
        queries=[prediction.query for prediction, _ in pairs],
        tables=[example.table for _, example in pairs],
        average=False,
    )
    return graded


def _accuracies(graded: Graded, rows: Sequence[int]) -> QueryScore:
    """The score of some of the graded predictions, at least one."""
    chosen = {name: [values[i] for i in rows if values[i] is not None] for name, values in graded.items()}
    executed = chosen["execution_accuracy"]
    shares = ("exact_match", "logical_form_accuracy", "execution_accuracy")
    return QueryScore(
        examples=len(rows),
        exact_match=fmean(chosen["exact_match"]),
        logical_form_accuracy=fmean(chosen["logical_form_accuracy"]),
        execution_accuracy=fmean(executed) if executed else None,
        executable=len(executed),
        unparseable=sum(chosen["unparseable"]),
        intervals={name: score_interval(chosen[name]) for name in shares},
        rouge={name: fmean(values) for name, values in chosen.items() if name.startswith("rouge")} or None,
    )


def _squad_score(pairs: Sequence[tuple[Prediction, SquadExample]], custom: Mapping[str, Metric]) -> SquadScore:
    answered = [(answer.text, example.answers) for answer, example in pairs]
    graded: Graded = load_metric("squad_accuracy").compute(
        predictions=[text for text, _ in answered], references=[right for _, right in answered], average=False
    )
    means, intervals = custom_scores(custom, answered, [prediction.index for prediction, _ in pairs])
    return SquadScore(
        examples=len(pairs),
        exact_match=fmean(graded["exact_match"]),
        f1=fmean(graded["f1"]),
        intervals={**{name: score_interval(values) for name, values in graded.items()}, **intervals},
        own_metrics=means,
    )


# Custom metrics: one function each, named on the command line.
#
#     # lengths.py
#     def short(prediction: str, answers: Sequence[str]) -> float:
#         "1 for an answer of at most three words, else 0."
#         return float(len(prediction.split()) <= 3)
#
#     zeropods score predictions.dev.jsonl --data squad --split dev --metric lengths:short
#
# The function is called once per example, with the model's text and every right answer (for text-to-SQL: the gold
# query's text). The mean of what it returns is in the score file under the function's name, with its 95 % interval.


def custom_metrics(named: Sequence[str]) -> dict[str, Metric]:
    """Functions by name, given as `module:function`; modules are also searched for in the working folder.

    Raises:
        UserError: another form, a missing module, no function of that name in it, or two functions of one name.
    """
    found: dict[str, Metric] = {}
    for each in named:
        sys.path.insert(0, str(Path.cwd()))
        try:
            function = pkgutil.resolve_name(each)
        except (ValueError, ImportError, AttributeError) as error:
            raise UserError(f"--metric {each}: {error}; expected module:function, as in lengths:short") from None
        finally:
            del sys.path[0]
        name = each.rpartition(":")[2]
        if not callable(function):
            raise UserError(f"--metric {each}: is not a function; expected a function of (prediction, answers)")
        try:
            inspect.signature(function).bind("", ())
        except TypeError as error:
            raise UserError(f"--metric {each}: {error}; expected a function of (prediction, answers)") from None
        except ValueError:
            pass  # A function written in C may not tell its arguments.
        if name in found:
            raise UserError(f"--metric: two functions are called {name}; rename one")
        found[name] = function
    return found


def custom_scores(
    custom: Mapping[str, Metric], answered: Sequence[tuple[str, Sequence[str]]], indices: Sequence[int]
) -> tuple[dict[str, float], dict[str, Interval | None]]:
    """Means and their 95 % intervals by name, over predictions and right answers; `indices` are those of the examples.

    Raises:
        UserError: a value is not a finite number; the message names the index of its example.
    """
    values: dict[str, list[float]] = {}
    for name, function in custom.items():
        values[name] = []
        for index, (prediction, right) in zip(indices, answered, strict=True):
            try:
                value = function(prediction, right)
            except METRIC_ERRORS as error:
                *_, frame = traceback.extract_tb(error.__traceback__)
                fault = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
                raise UserError(
                    f"--metric {name}: index {index}: {fault}; expected a finite number for every prediction and its "
                    "right answers"
                ) from error
            values[name].append(value)
            # An integer may be too large for a float.
            if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
                raise UserError(f"--metric {name}: index {index}: {value!r:.60}; expected a finite number")
    return {name: fmean(v) for name, v in values.items()}, {name: score_interval(v) for name, v in values.items()}


METRIC_ERRORS = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""Errors by which a custom metric fails on a value that it did not expect."""


# Prediction files: one JSON object per line.
#
# Text-to-SQL: `{"index", "question", "prediction", "query": {"sel", "agg", "conds"} | null}`; SQuAD: `{"index", "id",
# "question", "prediction"}`. Each line names its example, so that a file may hold any part of a split.
#
# WikiSQL's official evaluator (`evaluate.py` of github.com/salesforce/WikiSQL) reads another form, and others publish
# their predictions in it: `{"query": {"sel", "agg", "conds"}}` or `{"query": null, "error": "why"}`, one line for each
# example, in the order of the split. Such a file is scored too; it is never written.


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model answered to one question."""

    index: Annotated[int, Field(strict=True, ge=0)]
    """The example's place in its split, from 0."""
    question: str
    text: Annotated[str, Field(alias="prediction")]
    query: Query | None = None
    """None where the answer could not be read as a query, and for SQuAD."""
    id: str | None = None
    """The question's id in SQuAD; None for text-to-SQL."""

    def to_json(self) -> dict[str, object]:
        """The JSON object of this prediction's line in a prediction file."""
        query = None if self.query is None else self.query.to_json()
        of_task = {"query": query} if self.id is None else {"id": self.id}
        return {"index": self.index, "question": self.question, "prediction": self.text, **of_task}


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a prediction file; it appears only when it is complete."""
    write_text(Path(path), "".join(json.dumps(prediction.to_json()) + "\n" for prediction in predictions))


def check_place(path: Path) -> None:
    """Refuse a path where a file that holds no predictions would be replaced."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        _, first = next(validated_lines(dict[str, object], path, "predict again"))
        held = {"index", "prediction"} <= first.keys()
    except UserError:
        held = False
    if not held:
        raise UserError(f"--out {path}: exists and does not contain predictions; choose another file")


@dataclass(frozen=True, kw_only=True)
class _QueryLine(Prediction):
    query: Query | None = field()


@dataclass(frozen=True, kw_only=True)
class _AnswerLine(Prediction):
    id: str = field()


NO_ERROR_KEY: Final = object()


@dataclass(frozen=True, kw_only=True)
class _OfficialLine:
    """A line of the official form; its other keys, which the official evaluator ignores too, are not read."""

    query: Query | None = None
    error: object = NO_ERROR_KEY
    """Why there is no query; empty, null or missing where there is one."""


MEND_OFFICIAL = "correct it, or write the file again"


def _line_type(path: Path) -> type[_QueryLine | _AnswerLine | _OfficialLine]:
    """What the lines of a prediction file are, by the keys of its first line.

    Raises:
        UserError: the first line is of no known form, or the file is empty.
    """
    place, first = next(validated_lines(dict[str, object], path, "predict again"))
    if "index" in first or "prediction" in first:
        return _AnswerLine if "id" in first and "query" not in first else _QueryLine
    if "query" in first or "error" in first:
        return _OfficialLine
    raise UserError(
        f"{place}: keys {', '.join(first)[:60] or 'none'}; expected a line that zeropods predict writes "
        "(index, question, prediction, query) or one of WikiSQL's official evaluator (query, error)"
    )


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions that `write_predictions` wrote, in file order; the first line decides which task they are of.

    Columns of a query are not checked against a table, which the file does not name.

    Raises:
        UserError: the first fault, with its line, an empty file, or one in the official evaluator's form.
    """
    kind = _line_type(path)
    if issubclass(kind, _OfficialLine):
        # Its lines name no example, so that it can be read together with its split only.
        raise UserError(f"{path}: is in the form of WikiSQL's official evaluator; only zeropods score reads it")
    predictions: dict[int, Prediction] = {}
    for place, line in validated_lines(kind, path, "predict again"):
        if line.index in predictions:
            raise UserError(f"{place}: index {line.index} occurs twice; keep one of them")
        predictions[line.index] = Prediction(**{**vars(line), "id": line.id if kind is _AnswerLine else None})
    return list(predictions.values())
