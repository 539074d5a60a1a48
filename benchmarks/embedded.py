"""The embedded job: t5-tiny on the sample, four minutes of training, scored on the test split."""

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
from zeropods.workshop import EMBEDDED, TINY, TRAINING

SECONDS = 240


def measure(work: Path) -> list[Figure]:
    """Execution accuracy over known and over unseen tables."""
    write_sample(work / "sample")
    prepare(Preparation(data=work / "sample", tokenizer=TINY), work / "tiny")
    flags = {**TRAINING, **EMBEDDED, "max_train_seconds": SECONDS}
    train(model_id=TINY, dataset_path=work / "tiny", outputdir=work / "run", **flags)
    answers = work / "run" / "predictions.test.jsonl"
    speed = predict(work / "run", work / "sample", "test", answers, Generation())
    scored = score(answers, work / "sample", "test")
    assert isinstance(scored, QueryScore)
    groups = scored.groups or {}
    name = f"embedded job, {SECONDS} s of training, execution accuracy over "
    return [
        _accuracy(name + "known tables", groups["known_tables"], "at least 0.90"),
        _accuracy(name + "unseen tables", groups["unseen_tables"], "whatever it is"),
        _fresh(work, name + "known tables, questions of another seed"),
        Figure(
            name="embedded job, questions answered",
            value=speed.to_json()["questions_per_second"],
            unit="questions/s",
        ),
    ]


def _fresh(work: Path, name: str) -> Figure:
    """Execution accuracy on questions that nobody saw while the training flags were chosen."""
    write_sample(work / "fresh", seed=1)
    seen = {_words(e) for split in SPLITS for e in read_split(work / "sample", split)}
    known = {e.table.id for e in read_split(work / "sample", "train")}
    drawn = [e for split in ("dev", "test") for e in read_split(work / "fresh", split)]
    examples = [e for e in drawn if e.table.id in known and _words(e) not in seen]
    answers = QueryAnswerer.load(work / "run").answer(examples, Generation())
    pairs = zip(answers, examples, strict=True)
    right = [a.query is not None and execute(a.query, e.table) == execute(e.query, e.table) for a, e in pairs]
    return Figure(name=name, value=fmean(right), unit="", interval=score_interval(right))


def _words(example: Example) -> str:
    return example.question.lower().rstrip("?.")


def _accuracy(name: str, group: QueryScore, asked: str) -> Figure:
    span = group.intervals["execution_accuracy"]
    return Figure(name=name, value=group.execution_accuracy, unit="", asked=asked, interval=span)
