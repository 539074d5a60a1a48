"""Prediction files; score files read back, perplexity, intervals and custom metrics."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made import a_rank, a_record, a_score, as_record
from zeropods.errors import UserError
from zeropods.evaluate.score import Prediction, custom_metrics, custom_scores, read_predictions, write_predictions
from zeropods.measure.intervals import score_interval
from zeropods.measure.score_json import (
    QueryScore,
    Score,
    SquadScore,
    near_zero_text,
    read_score,
    text_score,
)
from zeropods.sql.query import Condition, Query

QUERY = Query(1, 3, (Condition(0, 0, "Ann"),))
READ = Prediction(index=7, question="How many?", text="SELECT COUNT Goals FROM table", query=QUERY)
GOOD: dict[str, Any] = {
    "index": 7, "question": "How many?", "prediction": "SELECT COUNT Goals FROM table",
    "query": {"sel": 1, "agg": 3, "conds": [[0, 0, "Ann"]]},
}  # fmt: skip
ANSWER = {"index": 0, "id": "q0", "question": "Who ran?", "prediction": 'a "quoted"\nlíne'}


def written(folder: Path, *documents: object) -> Path:
    path = folder / "predictions.dev.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_a_line_has_four_keys_and_that_of_an_answer_to_squad_its_id(tmp_path: Path) -> None:
    assert READ.to_json() == GOOD
    (answer,) = read_predictions(written(tmp_path, ANSWER))
    assert (answer.id, answer.text, answer.query) == ("q0", ANSWER["prediction"], None)
    assert answer.to_json() == ANSWER


CONDITIONS = st.lists(st.builds(Condition, st.integers(0, 9), st.integers(0, 3), st.text()), max_size=3)
QUERIES = st.builds(Query, st.integers(0, 9), st.integers(0, 5), CONDITIONS.map(tuple))
PREDICTIONS = st.builds(
    Prediction,
    index=st.integers(0),
    question=st.text(),
    text=st.text(),
    query=st.none() | QUERIES,
    linked=st.booleans(),
    id=st.none(),
)


@settings(max_examples=50)
@given(st.lists(PREDICTIONS, min_size=1, unique_by=lambda prediction: prediction.index))
def test_any_predictions_survive_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, predictions: list[Prediction]
) -> None:
    path = tmp_path_factory.getbasetemp() / "predictions.jsonl"
    write_predictions(path, predictions)
    assert read_predictions(path) == predictions


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, GOOD | {"index": -1}], "2: index is -1"),
        ([GOOD | {"query": []}], r"1: query is \[\]"),
        ([GOOD | {"query": {"sel": 0, "agg": 6, "conds": []}}], "1: query.agg is 6"),
        ([{key: value for key, value in GOOD.items() if key != "question"}], "1: question: Field required"),
        ([ANSWER | {"id": 5}], "1: id is 5"),
        ([ANSWER, GOOD | {"index": 1}], "2: id: Field required"),
        ([{key: value for key, value in GOOD.items() if key != "query"}], "1: query: Field required"),
        ([GOOD, GOOD], "2: index 7 occurs twice"),
        ([GOOD, {"query": None}], "2: index: Field required"),
        ([{"question": "How many?", "prediction": "", "query": None}], "1: index: Field required"),
        ([{"answer": 42}], "1: keys answer; expected a line that zeropods predict writes"),
        ([{}], "1: keys none; expected a line that zeropods predict writes"),
        ([{"query": None, "error": "why"}], " is in the form of WikiSQL's official evaluator; only zeropods score"),
    ],
)  # fmt: skip
def test_the_first_fault_is_named_with_its_line(tmp_path: Path, lines: list[object], said: str) -> None:
    with pytest.raises(UserError, match=f"jsonl:{said}"):
        read_predictions(written(tmp_path, *lines))


# Scores.


def read(folder: Path, document: dict[str, Any]) -> Score:
    (folder / "score.dev.json").write_text(json.dumps(document))
    return read_score(folder / "score.dev.json")


SQUAD = {"task": "squad", "examples": 3, "exact_match": 0.5, "f1": 0.6, "intervals": {"f1": [0.5, 0.7]}}


def test_the_interval_of_a_score_may_be_null(tmp_path: Path) -> None:
    document = SQUAD | {"intervals": {"f1": None}, "own_metrics": {"words": 2}}
    assert asdict(read(tmp_path, document)) == document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"task": "poetry"}, "task is 'poetry': expected one of text2sql, squad, lm"),
        ({"examples": 10}, "task is None: expected one of text2sql, squad, lm"),
        (SQUAD | {"f1": None}, "f1 is None: Input should be a valid number"),
        (SQUAD | {"intervals": {"f1": [0.5]}}, r"intervals\.f1\.1: Field required"),
        (SQUAD | {"own_metrics": {"words": "two"}}, r"own_metrics\.words is 'two': Input should be a valid number"),
        ({"task": "lm", "tokens": 4, "loss": 1.0}, "perplexity: Field required"),
        (
            {"task": "lm", "tokens": 4, "loss": 1.0, "perplexity": math.nan},
            "perplexity is nan: Input should be a finite",
        ),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, document: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"score\.dev\.json: {said}.*; measure again"):
        read(tmp_path, document)


def test_perplexity_is_the_exponential_of_the_mean_loss_where_that_is_one(tmp_path: Path) -> None:
    # 8 tokens, each as unsure as a choice among 4: 8 x ln 4 nats together.
    score = text_score(8 * math.log(4), 8)
    assert (score.tokens, score.loss, score.perplexity) == (8, pytest.approx(math.log(4)), pytest.approx(4.0))
    score.write(tmp_path, "test")
    assert read_score(tmp_path / "score.test.json") == score
    for loss_sum, tokens, said in (
        (0.0, 0, "of 0 tokens"),
        (math.nan, 5, "loss of nan"),
        (1e4, 5, "loss of 2000 nats"),
    ):
        with pytest.raises(UserError, match=said):
            text_score(loss_sum, tokens)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([7.0, 7.0], None),
        ([0.5], None),
        ([0, 1], (0.09453, 0.90547)),
        ([1] * 30 + [0] * 70, (0.21895, 0.39585)),
        # Wilson's ends for 0 and 5 of 5: z^2 / (n + z^2) = 3.84146 / 8.84146 = 0.43448, and 1 less that.
        ([0.0] * 5, (0.0, 0.43448)),
        ([True] * 5, (0.56552, 1.0)),
    ],
)
def test_the_interval_is_the_hand_computed_one(values: list[float], expected: tuple[float, float] | None) -> None:
    assert score_interval(values) == (expected and pytest.approx(expected, abs=5e-6))


def test_the_interval_of_a_mean_agrees_with_the_drawn_bootstrap() -> None:
    values = np.repeat([0.0, 0.4, 0.5, 1.0], [50, 20, 30, 100])
    means = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    assert score_interval(values.tolist()) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.005)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a module of metrics."""
    (tmp_path / "fox_metrics.py").write_text(
        "def words(prediction, answers):\n    return len(prediction.split())\n"
        "def nothing(prediction, answers):\n    return None\n"
        "NUMBER = 5\n"
        "def first(prediction, answers):\n    return {}[prediction.lower()]\n"
        "def one_argument(prediction):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("working_folder")
def test_a_custom_metric_has_a_mean_and_an_interval() -> None:
    means, intervals = custom_scores(custom_metrics(["fox_metrics:words"]), [("a red fox", ()), ("", ())], [0, 1])
    assert means == {"words": 1.5} and intervals == {"words": (0.0, 3.0)}


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["fox_metrics:two words"], "expected module:function"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["fox_metrics:none"], "has no attribute 'none'; expected module:function"),
        (["fox_metrics:NUMBER"], "is not a function"),
        (["fox_metrics:nothing"], "--metric nothing: index 19: None; expected a finite number"),
        (["fox_metrics:words"] * 2, "two functions are called words"),
        (["os:system"], "--metric os:system: too many positional arguments; expected a function of"),
        (["fox_metrics:one_argument"], "too many positional arguments; expected a function of"),
        (
            ["math:pow"],
            r"--metric pow: index 19: TypeError: must be real number, not str \(.*score.py:\d+\); expected a",
        ),
        (["fox_metrics:first"], r"index 19: KeyError: 'a fox' \(.*fox_metrics.py:7\); expected a finite number"),
    ],
)
def test_a_metric_that_cannot_be_used_is_named(named: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        custom_scores(custom_metrics(named), [("A fox", ("fox",))], [19])


# What is said of a score near zero.

REMEDY = "train longer, or start from a trained model"
WRONG = a_score(execution_accuracy=0.0, logical_form_accuracy=0.02, examples=300, executable=250)
LONG = {"init": "pretrained", "model_id": "t5-small", "train_rows": 64}


@pytest.mark.parametrize(
    ("score", "record", "said"),
    [
        (
            QueryScore(**WRONG),
            a_record(),
            "0 of 250 right: trained 20 steps only, 0.64 epochs, from random weights to a loss of 2",
        ),
        (
            QueryScore(**{**WRONG, "execution_accuracy": None}),
            a_record(**LONG),
            "6 of 300 right: trained 20 steps, 10 epochs, from t5-small to a loss of 2",
        ),
        (
            SquadScore(examples=300, exact_match=0.01, f1=0.02, intervals={}),
            a_record(task="squad", ranks=[a_rank(stopped_by="time", losses=[])], init="first"),
            "3 of 300 right: trained 20 steps only, 0.64 epochs, from the model of first, until its time limit",
        ),
        (QueryScore(**WRONG), None, "0 of 250 right: how its model was trained is not recorded here"),
    ],
)
def test_a_score_near_zero_has_a_reason(score: Score, record: dict[str, Any] | None, said: str) -> None:
    known = None if record is None else as_record(record)
    assert near_zero_text(score, known) == f"{said}; {REMEDY}"


def test_a_better_score_and_a_perplexity_are_said_nothing_of() -> None:
    good = QueryScore(**{**WRONG, "execution_accuracy": 0.05})
    assert near_zero_text(good, None) == near_zero_text(text_score(0.01, 10), None) == ""
