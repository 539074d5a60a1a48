"""The embedded job: t5-tiny on the sample, four minutes of training, scored on the test split."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.evaluate.generate import Generation
from zeropods.evaluate.predict import predict
from zeropods.evaluate.score import Score, score_predictions
from zeropods.launch.process import train
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
    groups = score_predictions(answers, work / "sample", "test").groups or {}
    name = f"embedded job, {SECONDS} s of training, execution accuracy over "
    return [
        _accuracy(name + "known tables", groups["known_tables"], "at least 0.90"),
        _accuracy(name + "unseen tables", groups["unseen_tables"], "whatever it is"),
        Figure(
            name="embedded job, questions answered",
            value=speed.to_json()["questions_per_second"],
            unit="questions/s",
            asked="-",
        ),
    ]


def _accuracy(name: str, score: Score, asked: str) -> Figure:
    interval = score.intervals["execution_accuracy"]
    return Figure(name=name, value=score.execution_accuracy, unit="", asked=asked, interval=interval)
