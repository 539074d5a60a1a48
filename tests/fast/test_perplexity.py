"""Perplexity as a score: its formula, its file, and score files of every task read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_score
from zeropods.errors import UserError
from zeropods.evaluate.perplexity import text_score, write_perplexity
from zeropods.evaluate.score_file import read_score


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    # 8 tokens, each as unsure as a choice among 4: 8 x ln 4 nats together.
    score = text_score(8 * math.log(4), 8)
    assert (score.tokens, score.loss, score.perplexity) == (8, pytest.approx(math.log(4)), pytest.approx(4.0))


def test_the_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    score = write_perplexity(tmp_path, "test", loss_sum=20.0, tokens=10)
    assert read_score(tmp_path / "score.test.json") == score.to_json() == {
        "task": "lm", "tokens": 10, "loss": 2.0, "perplexity": math.exp(2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("loss_sum", "tokens", "said"),
    [
        (0.0, 0, "perplexity of 0 tokens"),
        (math.nan, 5, "a loss of nan nats a token over 5 tokens"),
        (math.inf, 5, "a loss of inf"),
        (10_000.0, 5, "a loss of 2000 nats"),
    ],
)
def test_what_is_no_perplexity_is_refused_and_not_written(
    tmp_path: Path, loss_sum: float, tokens: int, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        write_perplexity(tmp_path, "dev", loss_sum=loss_sum, tokens=tokens)
    assert list(tmp_path.iterdir()) == []


def read(folder: Path, document: dict[str, Any]) -> dict[str, Any]:
    (folder / "score.dev.json").write_text(json.dumps(document))
    return read_score(folder / "score.dev.json")


def test_a_score_that_does_not_say_its_task_is_of_text_to_sql(tmp_path: Path) -> None:
    assert read(tmp_path, a_score())["task"] == "text2sql"


SQUAD = {"task": "squad", "examples": 3, "exact_match": 0.5, "f1": 0.6, "intervals": {"f1": [0.5, 0.7]}}


def test_an_interval_that_could_not_be_measured_is_no_fault(tmp_path: Path) -> None:
    document = SQUAD | {"intervals": {"f1": None}, "own_metrics": {"words": 2}}
    assert read(tmp_path, document) == document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"task": "poetry"}, "task is 'poetry'; expected one of text2sql, squad, lm"),
        (SQUAD | {"f1": None}, "f1 is None; expected int or float"),
        (SQUAD | {"f1": True}, "f1 is True; expected int or float"),
        (SQUAD | {"intervals": {"f1": [0.5]}}, r"intervals\.f1 is \[0\.5\]; expected two numbers"),
        (SQUAD | {"intervals": 5}, "intervals is 5; expected dict"),
        (SQUAD | {"own_metrics": [1]}, r"own_metrics is \[1\]; expected an object"),
        (SQUAD | {"own_metrics": {"words": "two"}}, r"own_metrics\.words is 'two'; expected a number"),
        ({"task": "lm", "tokens": 4, "loss": 1.0}, "perplexity is 'missing'; expected int or float"),
        ({"task": "lm", "tokens": 4, "loss": 1.0, "perplexity": math.nan}, "perplexity is nan"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, document: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"score\.dev\.json: {said}.*: measure again"):
        read(tmp_path, document)
