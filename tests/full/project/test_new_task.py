"""A task that the package does not know, added by this file alone with a measure of its own: to write the words of a
line in reverse, by a T5."""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pytest

from tests.full.conftest import TINY
from tests.made import a_run
from zeropods import tasks
from zeropods.cli import main, parser
from zeropods.data import prepare
from zeropods.data.encoding import Encoder, TokenRows, count_lost
from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, TaskData
from zeropods.errors import UserError
from zeropods.evaluate import generate, score
from zeropods.evaluate.generate import Answerer, Generation
from zeropods.evaluate.score import Prediction, ScoreRequest, paired, read_predictions, write_predictions
from zeropods.files import sha256
from zeropods.measure import score_json
from zeropods.measure.intervals import score_interval
from zeropods.measure.record import read_record
from zeropods.measure.score_json import AnswerScore, Interval, read_score
from zeropods.tasks import EXACT_MATCH, EXAMPLE_COUNT, T5_SCRIPT, LearningTask, Measure
from zeropods.train import run_argv
from zeropods.train.flags import CausalArguments
from zeropods.train.saved_models import load_model, task_of

NAME = "reverse"

# What the task is, and the measure by which its models are judged.

WRONG_WORDS = Measure(key="wrong_words", name="wrong words", unit="per line", form=".2f", higher_is_better=False)
TASK = LearningTask(
    name=NAME,
    script=T5_SCRIPT,
    prompts=(NAME,),
    figures=(EXAMPLE_COUNT, EXACT_MATCH, WRONG_WORDS),
    judged_by=(WRONG_WORDS,),
)

# Its raw data: `SPLIT.txt`, a line of words each.


@dataclass(frozen=True)
class Line:
    index: int
    question: str

    @property
    def answer(self) -> str:
        return " ".join(reversed(self.question.split()))


def read_lines(folder: Path, split: str) -> Iterator[Line]:
    for index, line in enumerate(file_of(folder, split).read_text().splitlines()):
        yield Line(index, line)


def file_of(folder: Path, split: str) -> Path:
    path = Path(folder) / f"{split}.txt"
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a folder that has it")
    return path


class Lines:
    """The lines of a folder as rows of tokens."""

    def __init__(self, wanted: Preparation) -> None:
        self.folder = Path(wanted.data)
        self.splits = ["train", "dev", "test"]
        self.hashes = {f"{split}.txt": sha256(file_of(self.folder, split)) for split in self.splits}

    def texts(self) -> Iterator[str]:
        return (line.question for line in read_lines(self.folder, "train"))

    def rows(self, split: str, tokenizer: Any, progress: Callable[[int], object]) -> TokenRows:
        encode = Encoder(tokenizer)
        lines = list(read_lines(self.folder, split))
        answers = [line.answer for line in lines]
        labels = encode(answers)
        decoded = tokenizer.batch_decode(labels, skip_special_tokens=True)
        progress(len(lines))
        sources = encode([line.question for line in lines])
        return TokenRows(sources, labels, targets_lost=count_lost(answers, decoded))


# Its answers and their score.


@dataclass(frozen=True)
class Reverser(Answerer):
    usual = Generation(max_new_tokens=16)
    task_options = ()

    @classmethod
    def load(cls, folder: Path, precision: str = "fp32") -> "Reverser":
        return cls(load_model(folder, precision, causal=False))

    def _encoded(self, examples: Sequence[Line], how: Generation) -> list[list[int]]:
        return [self.tokenizer(line.question).input_ids for line in examples]

    def _answer_batch(self, examples: list[Line], prompts: list[Any], how: Generation) -> list[Prediction]:
        ids = self.saved.generated(prompts, **how.options)
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [answer_to(line, text) for line, text in zip(examples, texts, strict=True)]


def answer_to(line: Line, text: str) -> Prediction:
    return Prediction(index=line.index, question=line.question, text=text, task=NAME)


@dataclass(frozen=True, kw_only=True)
class ReverseScore(AnswerScore):
    task: Literal["reverse"] = "reverse"
    wrong_words: float
    intervals: dict[str, Interval | None]


def grade(request: ScoreRequest) -> ReverseScore:
    lines = read_lines(request.data, request.split)
    pairs = paired(request.predictions, request.split, read_predictions(request.predictions), lines)
    right = [float(prediction.text == line.answer) for prediction, line in pairs]
    wrong = [wrong_words(prediction.text, line.answer) for prediction, line in pairs]
    return ReverseScore(
        examples=len(right),
        exact_match=fmean(right),
        wrong_words=fmean(wrong),
        intervals={"exact_match": score_interval(right), "wrong_words": score_interval(wrong)},
    )


def wrong_words(text: str, answer: str) -> float:
    """The number of places in which the words of two texts differ."""
    words = itertools.zip_longest(text.split(), answer.split())
    return float(sum(1 for written, right in words if written != right))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The task has its line in each table for as long as a test runs."""
    # Flags list the tasks that are known when a process reads its first command line.
    parser.cache_clear()
    monkeypatch.setitem(tasks.TASKS, NAME, TASK)
    monkeypatch.setitem(prepare.TASK_DATA, NAME, TaskData(open=Lines, read=read_lines, check=file_of))
    monkeypatch.setitem(score_json.SCORES, NAME, ReverseScore)
    monkeypatch.setitem(score.SCORERS, NAME, grade)
    monkeypatch.setitem(generate.ANSWERERS, NAME, Reverser)
    yield
    parser.cache_clear()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """24 lines of three words in each split."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(0)
    for split in ("train", "dev", "test"):
        lines = [" ".join(rng.sample(["one", "two", "three", "four", "five"], 3)) for _ in range(24)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def score_answers(run: Path, data: Path, right: int) -> None:
    """Write answers of which the first ones are right and the others are the word `no`, and score them."""
    answers = [answer_to(line, line.answer if line.index < right else "no") for line in read_lines(data, "test")]
    write_predictions(run / "predictions.test.jsonl", answers)
    assert main(["score", str(run / "predictions.test.jsonl"), "--data", str(data), "--split", "test"]) == 0


def test_a_task_of_one_file_is_prepared_trained_answered_scored_and_summed_up(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "set"
    flags = ["--task", NAME, "--data", str(data), "--tokenizer", "t5-tiny", "--out", str(made)]
    assert main(["prepare", *flags]) == 0
    manifest = read_manifest(made)
    assert (manifest.task, manifest.prompt, manifest.splits["train"].rows) == (NAME, NAME, 24)
    assert manifest.splits["test"].targets_lost == 0

    with pytest.raises(UserError, match=r"prepared for reverse; train on it with textsql_train\.py"):
        CausalArguments(data=str(made)).manifest()
    run = tmp_path / "run"
    place = ["--dataset_path", str(made), "--outputdir", str(run)]
    steps = ["--max_steps", "3", "--eval_steps", "0", "--memory_interval", "0", "--threads", "1"]
    assert run_argv([T5_SCRIPT, *TINY, *place, *steps]) == 0
    assert (read_record(run).task, read_record(run).prompt, task_of(run / "model")) == (NAME, NAME, NAME)

    # The data and the split that training has not seen are found by what the run says.
    assert main(["predict", "--model", str(run), "--score"]) == 0
    answers = read_predictions(run / "predictions.test.jsonl")
    right = [answer.text == line.answer for answer, line in zip(answers, read_lines(data, "test"), strict=True)]
    scored = read_score(run / "score.test.json")
    assert isinstance(scored, ReverseScore)
    assert (scored.examples, scored.exact_match) == (24, fmean(right))

    # An untrained model is right by chance alone: some answers are written down as right. Each of the four others has
    # three wrong words, so there are 12 in 24 lines.
    capsys.readouterr()
    score_answers(run, data, right=20)
    assert capsys.readouterr().out.startswith("24 answers: exact match 0.833 [")
    scored = read_score(run / "score.test.json")
    assert isinstance(scored, ReverseScore) and scored.wrong_words == 0.5
    summary = tmp_path / "summary"
    assert main(["summary", str(run), "--out", str(summary)]) == 0
    (row,) = json.loads((summary / "summary.json").read_text())["groups"]
    assert (row["task"], row["split"], row["examples"], row["exact_match"]) == (NAME, "test", 24, pytest.approx(5 / 6))
    low, high = row["wrong_words_interval"]
    assert low < row["wrong_words"] == 0.5 < high
    assert (row["inference_kind"], row["inference_result"]) == ("wrong words", 0.5)
    text = (summary / "summary.md").read_text()
    assert f"| wrong words 0.50 [{low:.2f}, {high:.2f}] (test) " in text and "| wrong words (per line) " in text
    assert "wrong_words" in (summary / "summary.csv").read_text().splitlines()[0]


def test_a_measure_that_should_be_low_is_worse_for_the_gate_where_it_rose(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", task=NAME, prompt=NAME)
    summary = ["summary", str(run), "--out", str(tmp_path / "summary")]
    against = ["--against", str(tmp_path / "summary" / "summary.json"), "--json"]
    score_answers(run, data, right=20)
    assert main(summary) == 0
    score_answers(run, data, right=24)
    assert main([*summary, *against]) == 0
    score_answers(run, data, right=20)
    capsys.readouterr()
    assert main([*summary, *against]) == 1
    (worse,) = json.loads(capsys.readouterr().out)["against"]["worse"]
    assert (worse["figure"], worse["old"], worse["new"]) == ("wrong_words", 0.0, 0.5)


def test_answers_of_such_a_task_are_refused_like_those_of_any_other(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [answer_to(line, "no") for line in read_lines(data, "test")]
    path = tmp_path / "predictions.test.jsonl"
    write_predictions(path, own)
    where = ["--data", str(data), "--split", "test"]
    assert main(["score", str(path), *where, "--rouge"]) == 1
    assert "--rouge: is for text2sql, but these predictions are for reverse; leave it out" in capsys.readouterr().err
    path.write_text(path.read_text().replace('"task": "reverse"', '"task": "other"'))
    assert main(["score", str(path), *where]) == 1
    assert "task is 'other': expected one of text2sql, squad, reverse; predict again" in capsys.readouterr().err
