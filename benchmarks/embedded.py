"""The embedded job: the base model t5-tiny goes on with the sample, and is scored on the test
split."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from benchmarks.figure import Figure
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.wikisql import SPLITS, Example, read_split
from zeropods.evaluate.generate import Generation, QueryAnswerer, predict
from zeropods.evaluate.score import score
from zeropods.launch.notebook import train
from zeropods.measure.intervals import score_interval
from zeropods.measure.score_json import QueryScore
from zeropods.sql.query import execute
from zeropods.workshop import COPIES, FROM_BASE, TINY, TRAINING


def measure(work: Path) -> list[Figure]:
    """Execution accuracy over known and over unseen tables."""
    sample = work / "sample"
    run = work / "run"
    write_sample(sample)
    prepare(Preparation(data=sample, tokenizer=TINY, copies=COPIES), work / "tiny")
    flags = {**TRAINING, **FROM_BASE}
    train(model_id=TINY, dataset_path=work / "tiny", outputdir=run, **flags)
    answers = run / "predictions.test.jsonl"
    speed = predict(run, sample, "test", answers, Generation())
    test_score = score(answers, sample, "test")
    assert isinstance(test_score, QueryScore)
    groups = test_score.groups or {}
    name = f"embedded job, {FROM_BASE['max_steps']} steps, execution accuracy over "
    return [
        _accuracy(name + "known tables", groups["known_tables"], "at least 0.96"),
        _accuracy(name + "unseen tables", groups["unseen_tables"], "at least 0.70, aim 0.80"),
        _fresh(work, name + "known tables, questions of another seed"),
        Figure(
            name="embedded job, questions answered",
            value=speed.to_json()["questions_per_second"],
            unit="questions/s",
        ),
    ]


def _accuracy(name: str, group: QueryScore, asked: str) -> Figure:
    return Figure(
        name=name,
        value=group.execution_accuracy,
        unit="",
        asked=asked,
        interval=group.intervals["execution_accuracy"],
    )


def _fresh(work: Path, name: str) -> Figure:
    """Execution accuracy on questions that nobody saw while the training flags were chosen."""
    fresh = work / "fresh"
    write_sample(fresh, seed=1)
    examples = _unseen_questions(work / "sample", fresh)
    answers = QueryAnswerer.load(work / "run").answer(examples, Generation())
    is_right = []
    for answer, example in zip(answers, examples, strict=True):
        is_right.append(
            answer.query is not None
            and execute(answer.query, example.table) == execute(example.query, example.table)
        )
    return Figure(name=name, value=fmean(is_right), unit="", interval=score_interval(is_right))


def _unseen_questions(sample: Path, fresh: Path) -> list[Example]:
    """Questions of a fresh sample over tables of the first one's train split that the first one
    does not have."""
    seen = set[str]()
    for split in SPLITS:
        seen.update(_words(example) for example in read_split(sample, split))
    known_tables = {example.table.id for example in read_split(sample, "train")}
    unseen = []
    for split in ("dev", "test"):
        for example in read_split(fresh, split):
            if example.table.id in known_tables and _words(example) not in seen:
                unseen.append(example)
    return unseen


def _words(example: Example) -> str:
    return example.question.lower().rstrip("?.")
