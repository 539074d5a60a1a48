"""Exact match and F1 by SQuAD's official rules: by hand, and over the real dev split against another count."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import bootstrap

from zeropods.cli import main
from zeropods.data.squad import SquadExample, read_squad
from zeropods.errors import UserError
from zeropods.evaluate.intervals import mean_interval
from zeropods.evaluate.predictions import SquadAnswer, holds_answers, read_answers, write_answers
from zeropods.evaluate.score import own_metric
from zeropods.evaluate.squad import exact_match, f1, normalized, score_answers

CONTEXT = "The red fox ran to the river, and a grey fox slept."
QUESTIONS = [
    ("Who ran?", ("The red fox", "red fox ran")),
    ("Who slept?", ("a grey fox",)),
    ("Where to?", ("the river",)),
]
ANSWERS = ["A red  fox.", "grey wolf", ""]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three dev questions about one sentence."""
    qas = [
        {"id": f"q{i}", "question": q, "answers": [{"text": a, "answer_start": CONTEXT.index(a)} for a in answers]}
        for i, (q, answers) in enumerate(QUESTIONS)
    ]
    article = {"title": "Foxes", "paragraphs": [{"context": CONTEXT, "qas": qas}]}
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dev-v1.1.json").write_text(json.dumps({"version": "1.1", "data": [article]}))
    return folder


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "predictions.dev.jsonl"
    write_answers(path, [answer(i, text) for i, text in enumerate(ANSWERS)])
    return path


def answer(index: int, text: str) -> SquadAnswer:
    return SquadAnswer(index=index, id=f"q{index}", question=QUESTIONS[index][0], text=text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat!", "cat"),
        ("a theatre, an ant", "theatre ant"),
        ("U.S.", "us"),
        ("an\tapple\n", "apple"),
        ("mother-in-law's", "motherinlaws"),
        ("«Ça», the", "«ça»"),
        ("...", ""),
    ],
)
def test_what_is_compared_has_no_case_punctuation_or_articles(text: str, expected: str) -> None:
    assert normalized(text) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("red fox", ["the red fox"], 1.0),
        # 2 of 3 words are right, and 2 of 2 are found: 2 x 2/3 x 1 / (5/3) = 0.8.
        ("big red fox", ["red fox"], 0.8),
        ("big red fox", ["bird", "red fox"], 0.8),
        # A word counts as often as both have it: 1 of 2 and 1 of 1.
        ("fox fox", ["fox"], 2 / 3),
        ("wolf", ["fox"], 0.0),
        ("", ["fox"], 0.0),
        ("the", ["a"], 0.0),
    ],
)
def test_f1_is_the_hand_computed_one(prediction: str, golds: list[str], expected: float) -> None:
    assert f1(prediction, golds) == pytest.approx(expected)


def test_one_answer_that_is_met_is_enough() -> None:
    assert exact_match("Fox", ["wolf", "the fox"])


def test_score_is_the_mean_over_the_answered_questions(data: Path, answers: Path) -> None:
    # The first is right; "grey wolf" shares one of two words on each side; the last is empty.
    score = score_answers(answers, data, "dev")
    assert (score.examples, score.exact_match, score.f1) == (3, pytest.approx(1 / 3), pytest.approx(1.5 / 3))


def test_score_file_lies_beside_the_answers_with_its_keys(data: Path, answers: Path) -> None:
    score_answers(answers, data, "dev")
    document = json.loads((answers.parent / "score.dev.json").read_text())
    assert list(document) == ["task", "examples", "exact_match", "f1", "intervals", "own_metrics"]
    assert document["task"] == "squad"


def test_a_part_of_the_split_may_be_answered(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    write_answers(path, [answer(2, "the river")])
    assert score_answers(path, data, "dev").exact_match == 1.0


def test_the_answer_to_an_unknown_question_is_named(data: Path, answers: Path) -> None:
    write_answers(answers, [SquadAnswer(index=0, id="other", question="?", text="x")])
    with pytest.raises(UserError, match=r"jsonl:1: dev has no question with the id 'other'; score the file against"):
        score_answers(answers, data, "dev")


def test_answers_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    written = [answer(1, 'a "quoted"\nlíne'), answer(0, "")]
    write_answers(tmp_path / "p.jsonl", written)
    assert read_answers(tmp_path / "p.jsonl") == written


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is broken JSON"),
        ("[1]", "expected a JSON object"),
        ('{"index": 0, "id": "a", "prediction": ""}', "question missing"),
        ('{"index": 0, "id": 5, "question": "", "prediction": ""}', "id 5; expected text"),
        ('{"index": -1, "id": "a", "question": "", "prediction": ""}', "index -1; expected"),
        ("", "the file is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(UserError, match=said):
        read_answers(tmp_path / "p.jsonl")


def test_a_question_that_is_answered_twice_is_refused(tmp_path: Path) -> None:
    write_answers(tmp_path / "p.jsonl", [answer(0, "x"), answer(0, "y")])
    with pytest.raises(UserError, match=r"l:2: index 0 stands there twice"):
        read_answers(tmp_path / "p.jsonl")


def test_answers_are_told_from_queries(tmp_path: Path, answers: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"index": 0, "question": "", "prediction": "", "query": null}\n')
    assert (holds_answers(answers), holds_answers(tmp_path / "q.jsonl")) == (True, False)


def test_the_verb_scores_answers(data: Path, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(answers), "--data", str(data), "--split", "dev", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["f1"] == pytest.approx(0.5)


def test_a_flag_of_the_other_task_is_refused(data: Path, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(answers), "--data", str(data), "--split", "dev", "--rouge"]) == 1
    assert capsys.readouterr().err == "zeropods: --rouge: is for text2sql, this is squad; leave it out\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of metrics."""
    (tmp_path / "fox_metrics.py").write_text(
        "def words(prediction, answers):\n    return len(prediction.split())\n"
        "def starts(prediction, answers):\n    return float(any(a.startswith(prediction[:1]) for a in answers))\n"
        "def nothing(prediction, answers):\n    return None\n"
        "NUMBER = 5\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_metric_of_ones_own_stands_in_the_score_file(
    data: Path, answers: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["score", str(answers), "--data", str(data), "--split", "dev"]
    assert main([*call, "--metric", "fox_metrics:words", "--metric", "fox_metrics:starts"]) == 0
    document = json.loads((own / "score.dev.json").read_text())
    # Three, two and no words; "A", "g" and nothing begin no answer, no answer, and any.
    assert document["own_metrics"] == {"words": pytest.approx(5 / 3), "starts": pytest.approx(1 / 3)}
    assert set(document["intervals"]) == {"exact_match", "f1", "words", "starts"}


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("words", "expected module:function"),
        ("fox_metrics:two words", "expected module:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("fox_metrics:none", "fox_metrics has no function none"),
        ("fox_metrics:NUMBER", "fox_metrics has no function NUMBER"),
    ],
)
def test_a_metric_that_is_not_there_is_named(own: Path, named: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        own_metric(named)


def test_a_metric_that_gives_no_number_is_named(data: Path, answers: Path, own: Path) -> None:
    with pytest.raises(UserError, match=r"--metric nothing: None for prediction 0, 'A red  fox\.'; expected a finite"):
        score_answers(answers, data, "dev", own=[own_metric("fox_metrics:nothing")])


def test_the_interval_of_a_mean_agrees_with_the_drawn_bootstrap() -> None:
    values = np.repeat([0.0, 0.4, 0.5, 1.0], [50, 20, 30, 100])
    drawn = bootstrap((values,), np.mean, method="percentile", rng=0).confidence_interval
    assert mean_interval(values.tolist()) == pytest.approx((drawn.low, drawn.high), abs=0.005)


@pytest.mark.parametrize(("value", "expected"), [(0.0, (0.0, 0.43448)), (1.0, (0.56552, 1.0))])
def test_equal_scores_have_an_interval_with_a_width(value: float, expected: tuple[float, float]) -> None:
    assert mean_interval([value] * 5) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("values", [[], [7.0, 7.0]])
def test_where_nothing_is_known_of_a_spread_there_is_no_interval(values: list[float]) -> None:
    assert mean_interval(values) is None


def plainly_normalized(text: str) -> list[str]:
    """The rules once more, letter by letter: an article is a whole run of letters, digits and underscores."""
    done, run = "", ""
    for letter in [letter for letter in text.lower() if letter not in string.punctuation] + [" "]:
        if letter.isalnum() or letter == "_":
            run += letter
        else:
            done, run = done + (" " if run in ("a", "an", "the") else run) + letter, ""
    return done.split()


def plain_f1(prediction: str, golds: Iterable[str]) -> float:
    """Words are crossed out one by one."""
    best = 0.0
    for gold in golds:
        predicted, left = plainly_normalized(prediction), plainly_normalized(gold)
        total, shared = len(predicted) + len(left), 0
        for word in predicted:
            if word in left:
                left.remove(word)
                shared += 1
        best = max(best, 2 * shared / total if shared else 0.0)
    return best


def cut(example: SquadExample) -> str:
    return example.context[:80]


def other_answer(example: SquadExample) -> str:
    return example.answers[-1]


@pytest.fixture(scope="module")
def dev(shared_data: Path) -> list[SquadExample]:
    return list(read_squad(shared_data / "squad", "dev"))


@pytest.mark.parametrize("predicted", [cut, other_answer, lambda example: ""], ids=["cut context", "answer", "nothing"])
def test_over_all_of_dev_the_score_is_that_of_another_count(
    dev: list[SquadExample], predicted: Callable[[SquadExample], str]
) -> None:
    ours = [f1(predicted(example), example.answers[:2]) for example in dev]
    plain = [plain_f1(predicted(example), example.answers[:2]) for example in dev]
    assert len(ours) == 10_570
    assert ours == pytest.approx(plain)


def test_an_answer_of_the_data_itself_is_always_right(dev: list[SquadExample]) -> None:
    assert all(exact_match(example.answers[-1], example.answers) for example in dev)


def test_an_answer_under_another_question_s_number_is_refused(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "predictions.dev.jsonl"
    write_answers(path, [answer(0, "fox"), SquadAnswer(index=9, id="q0", question="Who ran?", text="fox")])
    with pytest.raises(UserError, match=r":2: index 9 and 'Who ran\?', but question q0 is number 0 of dev"):
        score_answers(path, data, "dev")
