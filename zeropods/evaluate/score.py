"""Prediction files, and their scores: accuracy by the metrics of `metric/`, with 95 % intervals."""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeVar

from pydantic import Field

from zeropods.data.llmsql import question_file, read_questions
from zeropods.data.squad import read_squad
from zeropods.data.wikisql import Example, read_split, table_ids
from zeropods.errors import UserError
from zeropods.evaluate.llmsql_execution import (
    Completion,
    query_in,
    read_completions,
    with_llmsql,
    write_completions,
)
from zeropods.files import validated_lines, write_text
from zeropods.measure.intervals import score_interval
from zeropods.measure.score_json import AnswerScore, Interval, QueryScore, SquadScore
from zeropods.sql.query import AGGREGATES, Query, format_query
from zeropods.sql.statement import statement_of
from zeropods.tables import counted
from zeropods.tasks import SQUAD, TASKS, TEXT2SQL

if TYPE_CHECKING:
    from evaluate import EvaluationModule


class WithQuestion(Protocol):
    """An example that a model answers."""

    @property
    def index(self) -> int:
        """Its place in its split, from 0."""

    @property
    def question(self) -> str:
        """What the model is asked."""


AnyExample = TypeVar("AnyExample", bound=WithQuestion)
Metric = Callable[[str, Sequence[str]], float]
"""A custom metric: a function of a prediction and the right answers."""
Graded = dict[str, list[Any]]
"""A list for each result of a metric, by its name, with one value per prediction; a value is None
where it could not be measured."""
Accuracies = Callable[[Sequence[int]], QueryScore]
"""A function that takes the places of some predictions in their file, from 0, and scores them."""
METRICS = Path(__file__).parent / "metric"
METRIC_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)
"""Errors by which a custom metric fails on a value that it did not expect."""


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A file of answers, the examples that they belong to, and what is to be measured."""

    predictions: Path
    data: Path
    """Folder of the raw data."""
    split: str
    rouge: bool
    """Whether the answers are also compared as texts."""
    custom: Mapping[str, Metric]
    """Custom metrics by name."""


def score(
    predictions: Path, data: Path, split: str, *, rouge: bool = False, metrics: Sequence[str] = ()
) -> AnswerScore:
    """Score a file of any task and write `score.SPLIT.json` beside it.

    The file may hold only a part of the split: examples without a prediction are not counted. A
    file in the form of WikiSQL's official evaluator holds a line for each example of the split.

    Answers to LLMSQL's questions are also scored by its own rules; ours are written to
    `llmsql.SPLIT.jsonl`, in the form that its evaluator reads.

    Args:
        metrics: custom metrics, each as `module:function`.

    Raises:
        UserError: predictions and data do not fit together, or `rouge` is requested for a task that
            does not have it.
    """
    request = ScoreRequest(
        predictions=predictions,
        data=data,
        split=split,
        rouge=rouge,
        custom=custom_metrics(metrics),
    )
    task = _task_of_lines(predictions)
    if rouge and not TASKS[task].has_rouge:
        with_rouge = " and ".join(kind.name for kind in TASKS.values() if kind.has_rouge)
        fault = f"is for {with_rouge}, but these predictions are for {task}"
        raise UserError(f"--rouge: {fault}; leave it out")
    result = SCORERS[task](request)
    result.write(Path(predictions).parent, split)
    return result


def right_queries(predictions: Path, data: Path, split: str) -> dict[int, bool]:
    """Whether each example of a text-to-SQL file is answered right, by the example's index.

    An answer is judged by what it finds; where the gold query finds nothing, by its logical form.
    Raises what `score` raises.
    """
    pairs = _query_pairs(predictions, data, split)
    graded = _graded_queries(pairs)
    executed = graded["execution_accuracy"]
    logical_forms = graded["logical_form_accuracy"]
    right = {}
    for (_, example), by_result, by_form in zip(pairs, executed, logical_forms, strict=True):
        if by_result is not None:
            right[example.index] = bool(by_result)
        else:
            right[example.index] = bool(by_form)
    return right


def load_metric(name: str) -> EvaluationModule:
    """A metric of `zeropods/evaluate/metric/`, by `evaluate.load`.

    For its own pipelines, which are not used here, `evaluate` checks for transformers and loads
    torch with it: two thirds of the time of a score. Where transformers has not been loaded yet, it
    is hidden from `evaluate`.
    """
    is_hidden = "transformers" not in sys.modules
    if is_hidden:
        sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        import evaluate
    finally:
        if is_hidden:
            del sys.modules["transformers"]
    return evaluate.load(str(METRICS / name), keep_in_memory=True)


def _query_pairs(path: Path, data: Path, split: str) -> list[tuple[Prediction, Example]]:
    """Each prediction of a text-to-SQL file paired with its example, whichever of the three forms
    the file has."""
    line_type = _line_type(path)
    if line_type is _OfficialLine:
        return _official_pairs(path, split, list(read_split(data, split)))
    if line_type is Completion:
        return _completion_pairs(path, data, split)
    predictions = read_predictions(path)
    return paired(path, split, predictions, read_split(data, split))


def _official_pairs(
    path: Path, split: str, examples: Sequence[Example]
) -> list[tuple[Prediction, Example]]:
    """Each line of the official evaluator's file paired with the example in its place."""
    lines = []
    for place, line in validated_lines(_OfficialLine, path, MEND_OFFICIAL):
        if line.query is None and line.error is NO_ERROR_KEY:
            raise UserError(f"{place}: has neither a query nor an error; {MEND_OFFICIAL}")
        lines.append(line)
    if len(lines) != len(examples):
        raise UserError(
            f"{path}: {counted(len(lines), 'line')}, but {split} has "
            f"{counted(len(examples), 'example')}; "
            "the official evaluator's file has one line for each example, in order"
        )
    pairs = []
    for line, example in zip(lines, examples, strict=True):
        has_failed = line.error is not NO_ERROR_KEY and bool(line.error)
        query = None if has_failed else line.query
        header = example.table.header
        # A query on columns that the table does not have cannot be written with their names. Its
        # text stays empty and matches no gold query.
        text = ""
        if query is not None and query.fits(len(header)):
            text = format_query(query, header)
        prediction = Prediction(
            index=example.index, question=example.question, text=text, query=query
        )
        pairs.append((prediction, example))
    return pairs


def _completion_pairs(path: Path, data: Path, split: str) -> list[tuple[Prediction, Example]]:
    """Each line of LLMSQL's form paired with its example.

    Questions whose gold statement is not of WikiSQL's form are no examples here, and lines about
    them are left out.

    Raises:
        UserError: the data are not in LLMSQL's layout, a line is at fault, or none is left.
    """
    questions_path = question_file(data, split)
    if questions_path is None:
        raise UserError(
            f"{path}: is in the form of LLMSQL's evaluator, but {data} does not have {split} in "
            "LLMSQL's layout; give the data that it was made from"
        )
    questions = list(read_questions(questions_path))
    pairs = []
    for index, completion in read_completions(path, questions).items():
        question = questions[index]
        if question.query is None:
            continue
        table = question.table
        query = query_in(completion, table)
        text = completion if query is None else format_query(query, table.header)
        prediction = Prediction(index=index, question=question.question, text=text, query=query)
        example = Example(index, question.question, table, question.query)
        pairs.append((prediction, example))
    if not pairs:
        raise UserError(
            f"{path}: no line answers a question whose gold statement is of WikiSQL's form; "
            "score it with LLMSQL's own evaluator"
        )
    return pairs


def paired(
    path: Path,
    split: str,
    predictions: Sequence[Prediction],
    examples: Iterable[AnyExample],
) -> list[tuple[Prediction, AnyExample]]:
    """Each prediction of a file paired with its example.

    Args:
        path: the file, for messages.
        split: name of the split, for messages.
        predictions: all predictions of the file, one for each line.

    Raises:
        UserError: a prediction names no example, or was made for another question.
    """
    by_index = {example.index: example for example in examples}
    pairs = []
    for number, prediction in enumerate(predictions, 1):
        place = f"{path}:{number}"
        example = by_index.get(prediction.index)
        if example is None:
            last = len(by_index) - 1
            fault = f"index {prediction.index}; the examples of {split} are 0 to {last}"
            raise UserError(f"{place}: {fault}")
        has_other_question = prediction.question != example.question
        # SQuAD's questions have an id; several of them have the same words.
        has_other_id = prediction.id != getattr(example, "id", None)
        if has_other_question or has_other_id:
            of_id = "" if prediction.id is None else f" of id {prediction.id!r:.60}"
            raise UserError(
                f"{place}: question {prediction.question!r:.60}{of_id}, but example "
                f"{example.index} of {split} asks {example.question!r:.60}; "
                "score the file against the split and data it was made from"
            )
        pairs.append((prediction, example))
    return pairs


def _query_score(request: ScoreRequest) -> QueryScore:
    """The score of answers to text-to-SQL; on LLMSQL's data also by its own rules."""
    # The scores of questions on tables of train are told apart from the others. In train itself
    # there are no others.
    known_tables = set[str]()
    if request.split != "train":
        known_tables = table_ids(request.data, "train")
    pairs = _query_pairs(request.predictions, request.data, request.split)
    texts = [prediction.text for prediction, _ in pairs]
    gold = [format_query(example.query, example.table.header) for _, example in pairs]
    examples = [example for _, example in pairs]
    graded = _graded_queries(pairs)
    if request.rouge:
        metric = load_metric("rouge_f1")
        graded |= metric.compute(predictions=texts, references=gold, average=False)
    linked = any(prediction.linked for prediction, _ in pairs)
    accuracies = partial(_accuracies, graded, linked=linked)
    of_all = accuracies(range(len(pairs)))
    answered = [(text, (right,)) for text, right in zip(texts, gold, strict=True)]
    indices = [example.index for example in examples]
    custom_means, custom_intervals = custom_scores(request.custom, answered, indices)
    result = replace(
        of_all,
        intervals={**of_all.intervals, **custom_intervals},
        own_metrics=custom_means,
        groups=_group_scores(accuracies, examples, known_tables),
        kinds=_kind_scores(accuracies, examples),
    )
    questions = question_file(request.data, request.split)
    if questions is None:
        return result
    return _score_on_llmsql(request, result, pairs, questions)


def _score_on_llmsql(
    request: ScoreRequest,
    result: QueryScore,
    pairs: Sequence[tuple[Prediction, Example]],
    questions_path: Path,
) -> QueryScore:
    """The score of answers to LLMSQL's questions, with the accuracy by LLMSQL's rules.

    Unless the file of answers is in the form of LLMSQL's evaluator already, the answers are also
    written in that form, to `llmsql.SPLIT.jsonl` beside it.

    Args:
        result: the score by WikiSQL's rules.
    """
    path = Path(request.predictions)
    questions = list(read_questions(questions_path))
    if _line_type(path) is Completion:
        completions = read_completions(path, questions)
        return with_llmsql(result, questions, completions, questions_path)
    statements = {}
    for prediction, example in pairs:
        statements[example.index] = _as_statement(prediction, example)
    # The file is written only once the answers could be scored.
    llmsql_result = with_llmsql(result, questions, statements, questions_path)
    write_completions(path.with_name(f"llmsql.{request.split}.jsonl"), questions, statements)
    return llmsql_result


def _as_statement(prediction: Prediction, example: Example) -> str:
    """The statement that SQLite runs for an answer; its own text where it is no query on the
    table."""
    query = prediction.query
    if query is None or not query.fits(len(example.table.header)):
        return prediction.text
    return statement_of(query, example.table)


def _group_scores(
    accuracies: Accuracies, examples: Sequence[Example], known_tables: set[str]
) -> dict[str, QueryScore] | None:
    """Scores of the examples on tables of train, and of the others; None unless there are both."""
    known = []
    unseen = []
    for number, example in enumerate(examples):
        if example.table.id in known_tables:
            known.append(number)
        else:
            unseen.append(number)
    if not known or not unseen:
        return None
    return {
        "known_tables": accuracies(known),
        "unseen_tables": accuracies(unseen),
    }


def _kind_scores(accuracies: Accuracies, examples: Sequence[Example]) -> dict[str, QueryScore]:
    """Scores by the gold query's aggregate, then by its number of conditions."""
    by_aggregate = defaultdict[int, list[int]](list)
    by_conditions = defaultdict[int, list[int]](list)
    for number, example in enumerate(examples):
        by_aggregate[example.query.agg].append(number)
        by_conditions[len(example.query.conds)].append(number)
    scores = {}
    for aggregate, numbers in sorted(by_aggregate.items()):
        name = AGGREGATES[aggregate] or "no aggregate"
        scores[name] = accuracies(numbers)
    for conditions, numbers in sorted(by_conditions.items()):
        name = counted(conditions, "condition")
        scores[name] = accuracies(numbers)
    return scores


def _graded_queries(pairs: Sequence[tuple[Prediction, Example]]) -> Graded:
    """What WikiSQL's rules say of each answer: `exact_match`, `logical_form_accuracy`,
    `execution_accuracy` and `unparseable`, each with one value per answer."""
    references = []
    for _, example in pairs:
        query = json.dumps(example.query.to_json())
        references.append({"query": query, "header": example.table.header})
    graded: Graded = load_metric("query_accuracy").compute(
        predictions=[prediction.text for prediction, _ in pairs],
        references=references,
        queries=[prediction.query for prediction, _ in pairs],
        tables=[example.table for _, example in pairs],
        average=False,
    )
    return graded


def _accuracies(graded: Graded, numbers: Sequence[int], *, linked: bool) -> QueryScore:
    """The score of some of the graded predictions.

    Args:
        graded: the values of all predictions.
        numbers: places of the predictions to be scored, from 0; at least one.
        linked: whether the answers were linked to the rows of their tables.
    """
    measured: Graded = {}
    for name, values in graded.items():
        measured[name] = [values[i] for i in numbers if values[i] is not None]
    # The other measures have a value for each prediction. This one has none where the gold query
    # finds nothing, which may be so for all of them.
    executed = measured["execution_accuracy"]
    shares = ("exact_match", "logical_form_accuracy", "execution_accuracy")
    rouge = {}
    for name, values in measured.items():
        if name.startswith("rouge"):
            rouge[name] = fmean(values)
    return QueryScore(
        examples=len(numbers),
        exact_match=fmean(measured["exact_match"]),
        logical_form_accuracy=fmean(measured["logical_form_accuracy"]),
        execution_accuracy=fmean(executed) if executed else None,
        executable=len(executed),
        unparseable=sum(measured["unparseable"]),
        linked=linked,
        intervals={name: score_interval(measured[name]) for name in shares},
        rouge=rouge or None,
    )


def _squad_score(request: ScoreRequest) -> SquadScore:
    """The score of answers to SQuAD's questions."""
    predictions = read_predictions(request.predictions)
    examples = read_squad(request.data, request.split)
    pairs = paired(request.predictions, request.split, predictions, examples)
    answered = [(prediction.text, example.answers) for prediction, example in pairs]
    graded: Graded = load_metric("squad_accuracy").compute(
        predictions=[text for text, _ in answered],
        references=[right for _, right in answered],
        average=False,
    )
    intervals = {name: score_interval(values) for name, values in graded.items()}
    indices = [prediction.index for prediction, _ in pairs]
    custom_means, custom_intervals = custom_scores(request.custom, answered, indices)
    return SquadScore(
        examples=len(pairs),
        exact_match=fmean(graded["exact_match"]),
        f1=fmean(graded["f1"]),
        intervals={**intervals, **custom_intervals},
        own_metrics=custom_means,
    )


SCORERS: dict[str, Callable[[ScoreRequest], AnswerScore]] = {
    TEXT2SQL: _query_score,
    SQUAD: _squad_score,
}
"""What grades the answers of each task, by its name."""


# Custom metrics: one function each, named on the command line.
#
#     # lengths.py
#     def short(prediction: str, answers: Sequence[str]) -> float:
#         "1 for an answer of at most three words, else 0."
#         return float(len(prediction.split()) <= 3)
#
#     zeropods score predictions.dev.jsonl --data squad --split dev --metric lengths:short
#
# The function is called once per example, with the model's text and every right answer (for
# text-to-SQL: the gold query's text). The mean of what it returns is in the score file under the
# function's name, with its 95 % interval.


def custom_metrics(named: Sequence[str]) -> dict[str, Metric]:
    """Functions by name, given as `module:function`.

    Modules are also searched for in the working folder.

    Raises:
        UserError: another form, a missing module, no function of that name in it, or two functions
            of one name.
    """
    functions: dict[str, Metric] = {}
    for full_name in named:
        function = _custom_metric(full_name)
        name = full_name.rpartition(":")[2]
        if name in functions:
            raise UserError(f"--metric: two functions are called {name}; rename one")
        functions[name] = function
    return functions


def _custom_metric(full_name: str) -> Metric:
    """The function that `module:function` names.

    Raises:
        UserError: there is none, or it cannot be called with two arguments.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = pkgutil.resolve_name(full_name)
    except (ValueError, ImportError, AttributeError) as error:
        expected = "expected module:function, as in lengths:short"
        raise UserError(f"--metric {full_name}: {error}; {expected}") from None
    finally:
        del sys.path[0]
    expected = "expected a function of (prediction, answers)"
    if not callable(function):
        raise UserError(f"--metric {full_name}: is not a function; {expected}")
    try:
        inspect.signature(function).bind("", ())
    except TypeError as error:
        raise UserError(f"--metric {full_name}: {error}; {expected}") from None
    except ValueError:
        pass  # A function written in C may not tell its arguments.
    return function


def custom_scores(
    custom: Mapping[str, Metric],
    answered: Sequence[tuple[str, Sequence[str]]],
    indices: Sequence[int],
) -> tuple[dict[str, float], dict[str, Interval | None]]:
    """The mean of what each custom metric returns, and the 95 % interval of each mean, by name.

    Args:
        custom: the metrics by name.
        answered: the text of each prediction, with the right answers to its question.
        indices: the index of each prediction's example, in the order of `answered`.

    Raises:
        UserError: a value is not a finite number; the message names the index of its example.
    """
    values: dict[str, list[float]] = {}
    for name, function in custom.items():
        values[name] = []
        for index, (prediction, right) in zip(indices, answered, strict=True):
            place = f"--metric {name}: index {index}"
            values[name].append(_custom_value(function, prediction, right, place))
    means = {name: fmean(numbers) for name, numbers in values.items()}
    intervals = {name: score_interval(numbers) for name, numbers in values.items()}
    return means, intervals


def _custom_value(function: Metric, prediction: str, right: Sequence[str], place: str) -> float:
    """What a custom metric returns for one prediction; `UserError` if it is no finite number.

    Args:
        place: names the metric and the example in messages.
    """
    try:
        value = function(prediction, right)
    except METRIC_ERRORS as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        fault = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        raise UserError(
            f"{place}: {fault}; expected a finite number for every prediction and its right answers"
        ) from error
    # `math.isfinite` would raise an error where an integer is too large for a float.
    largest = sys.float_info.max
    if not isinstance(value, int | float) or not -largest <= value <= largest:
        raise UserError(f"{place}: {value!r:.60}; expected a finite number")
    return value


# Prediction files: one JSON object per line.
#
# Text-to-SQL: `{"index", "question", "prediction", "query": {"sel", "agg", "conds"} | null}`, and
# `"linked": true` where conditions were bound to what the question quotes from the table's rows;
# SQuAD: `{"index", "id", "question", "prediction"}`; any other task: `{"index", "task", "question",
# "prediction"}`. Each line names its example, so that a file may hold any part of a split.
#
# WikiSQL's official evaluator (`evaluate.py` of github.com/salesforce/WikiSQL) reads another form,
# and others publish their predictions in it: `{"query": {"sel", "agg", "conds"}}` or `{"query":
# null, "error": "why"}`, one line for each example, in the order of the split. Such a file is
# scored too; it is never written. A file of LLMSQL's evaluator is scored as well: `{"question_id",
# "completion"}`.


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model answered to one question."""

    index: Annotated[int, Field(strict=True, ge=0)]
    """The example's place in its split, from 0."""
    question: str
    text: Annotated[str, Field(alias="prediction")]
    query: Query | None = None
    """None where the answer could not be read as a query, and for SQuAD."""
    linked: bool = False
    """Whether the query's conditions were bound to what the question quotes from the table's rows,
    as `zeropods.sql.linking` finds it."""
    id: str | None = None
    """The question's id in SQuAD; None for other tasks."""
    task: str | None = None
    """The task; None for text-to-SQL and SQuAD, whose lines are told apart by their keys."""

    def to_json(self) -> dict[str, object]:
        """The JSON object of this prediction's line in a prediction file."""
        line: dict[str, object] = {
            "index": self.index,
            "question": self.question,
            "prediction": self.text,
        }
        if self.task is not None:
            line["task"] = self.task
        elif self.id is not None:
            line["id"] = self.id
        elif self.query is not None:
            line["query"] = self.query.to_json()
        else:
            line["query"] = None
        if self.linked:
            line["linked"] = True
        return line


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a prediction file; it appears only when it is complete."""
    lines = (json.dumps(prediction.to_json()) + "\n" for prediction in predictions)
    write_text(Path(path), "".join(lines))


def check_place(path: Path) -> None:
    """Refuse a path where a file that holds no predictions would be replaced.

    An empty file may be replaced, and so may one that `write_predictions` made.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    # The first line is enough: it shows whether `write_predictions` made the file.
    try:
        _, first = next(validated_lines(dict[str, object], path, "predict again"))
        has_predictions = {"index", "prediction"} <= first.keys()
    except UserError:
        has_predictions = False
    if not has_predictions:
        fault = "exists and does not contain predictions"
        raise UserError(f"--out {path}: {fault}; choose another file")


# The kinds of lines that `write_predictions` writes. Each requires the key by which it is known,
# which a `Prediction` may lack.


@dataclass(frozen=True, kw_only=True)
class _QueryLine(Prediction):
    query: Query | None = field()


@dataclass(frozen=True, kw_only=True)
class _AnswerLine(Prediction):
    id: str = field()


@dataclass(frozen=True, kw_only=True)
class _TaskLine(Prediction):
    task: str = field()


NO_ERROR_KEY: Final = object()
"""Stands for a missing `error`, which is not the same as one that is null."""


@dataclass(frozen=True, kw_only=True)
class _OfficialLine:
    """A line of the official form; other keys are not read, as by the official evaluator."""

    query: Query | None = None
    error: object = NO_ERROR_KEY
    """Why there is no query; empty, null or missing where there is one."""


MEND_OFFICIAL = "correct it, or write the file again"
"""What to do about a fault in a file of the official form."""
LineType = type[_QueryLine | _AnswerLine | _TaskLine | _OfficialLine | Completion]
"""The type that the lines of a prediction file are read into."""


def _line_type(path: Path) -> LineType:
    """The type of the lines of a prediction file, by the keys of its first line.

    Raises:
        UserError: the first line is of no known form, or the file is empty.
    """
    place, first = next(validated_lines(dict[str, object], path, "predict again"))
    # One of the two keys is enough here: when the line is read, the missing one is named.
    is_of_predict = "index" in first or "prediction" in first
    if is_of_predict:
        if "task" in first:
            return _TaskLine
        # Of the tasks whose lines do not name them, only text-to-SQL has queries.
        is_answer = "id" in first and "query" not in first
        return _AnswerLine if is_answer else _QueryLine
    if "query" in first or "error" in first:
        return _OfficialLine
    if "completion" in first:
        return Completion
    keys = ", ".join(first)[:60] or "none"
    raise UserError(
        f"{place}: keys {keys}; expected a line that zeropods predict writes "
        "(index, question, prediction, query), one of LLMSQL's evaluator (question_id, completion) "
        "or one of WikiSQL's official evaluator (query, error)"
    )


def _task_of_lines(path: Path) -> str:
    """The task of a prediction file, by its first line; raises what `_line_type` raises."""
    line_type = _line_type(path)
    if line_type is _AnswerLine:
        return SQUAD
    if line_type is not _TaskLine:
        return TEXT2SQL
    place, first = next(validated_lines(_TaskLine, path, "predict again"))
    if first.task not in SCORERS:
        expected = ", ".join(SCORERS)
        raise UserError(
            f"{place}: task is {first.task!r:.60}: expected one of {expected}; predict again"
        )
    return first.task


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions that `write_predictions` wrote, in file order.

    The first line decides which task they are of. Columns of a query are not checked against a
    table, which the file does not name.

    Raises:
        UserError: a line is at fault (the first such line is named), the file is empty, or it is in
            the form of another evaluator.
    """
    line_type = _line_type(path)
    if issubclass(line_type, _OfficialLine | Completion):
        # The lines of these forms do not hold the indices of their examples, so that they can be
        # read only together with the split.
        evaluator = "LLMSQL's" if line_type is Completion else "WikiSQL's official"
        fault = f"is in the form of {evaluator} evaluator"
        raise UserError(f"{path}: {fault}; only zeropods score reads it")
    predictions: dict[int, Prediction] = {}
    for place, line in validated_lines(line_type, path, "predict again"):
        if line.index in predictions:
            raise UserError(f"{place}: index {line.index} occurs twice; keep one of them")
        predictions[line.index] = Prediction(
            index=line.index,
            question=line.question,
            text=line.text,
            query=line.query,
            linked=line.linked,
            id=line.id if line_type is _AnswerLine else None,
            task=line.task if line_type is _TaskLine else None,
        )
    return list(predictions.values())
