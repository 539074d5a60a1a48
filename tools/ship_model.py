"""Put a trained t5-tiny into the package, as the base that `--model_id t5-tiny` starts from.

    tools/ship_model.py runs/wikisql-second/t5-tiny-ddp-1-pod-schema/1 --wikisql data/wikisql

The weights become FP16, answer all questions of WikiSQL's dev and test, where they are there, as
they will be shipped, and get a card with data, licence, revision and scores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from base_data import QUESTIONS

from zeropods.data.manifest import read_manifest
from zeropods.data.sample import read_facts
from zeropods.data.wikisql import wikisql_splits
from zeropods.errors import guarded
from zeropods.export import export
from zeropods.files import open_to_readers, write_text
from zeropods.measure.record import read_config, read_record
from zeropods.measure.score_json import QueryScore
from zeropods.outputs import new_folder
from zeropods.shipped_models import MODELS, SHIPPED

CARD = """---
license: bsd-3-clause
language: en
base_model: none, random weights
tags: [text2text-generation, text-to-sql, wikisql]
---
# {name}

A T5 of {parameters:,} parameters (d_model 128, two layers on each side, {vocabulary:,} pieces) that
turns a question about one table into a WikiSQL query. It is the base from which
`textsql_train.py --model_id {name}` starts, and small enough to be trained on two CPU cores. Its
weights are FP16; they are loaded as FP32.

* **Input** `translate to SQL: QUESTION columns: NAME; NAME (real); ...` (prompt `schema`, in lower
  case); **output** `SELECT [AGGREGATE] COLUMN FROM table [WHERE COLUMN OP VALUE [AND ...]]`.
* **Data**: the split train of WikiSQL 1.1 (Zhong, Xiong and Socher 2017, arXiv 1709.00103;
  BSD-3-Clause), and {questions:,} questions that `tools/base_data.py` makes about the tables of
  facts in `tools/base_facts/`; of each question {copies} rows, all but the first with columns in
  another order or of other names, and other values.
* **Command**: `make wikisql` (`matrices/wikisql.yaml`, then `matrices/wikisql_second.yaml`):
{stages}
* **Scores** of these FP16 weights, all questions, constrained decoding, one beam, with 95 %
  intervals:

| split of WikiSQL | questions | logical form | execution |
| --- | --- | --- | --- |
{scores}

  No table of dev or test occurs in train. Settings were chosen by dev, none by test. Execution is
  over the questions whose tables come with rows.
* **Held out**: it has never seen a table of the data set that `zeropods data sample` makes, in any
  of its splits: {held_out}.
* **Licence**: BSD-3-Clause, as WikiSQL.
"""
STAGE = """  * {steps:,} steps of {rows} rows, learning rate {rate:g}, seed {seed}, revision
    {revision}, on {cores} cores of {processor} at {speed:,.0f} rows/s."""
SPLITS = ("dev", "test")


def main() -> None:
    """Export, score and describe the run that the arguments name."""
    parser = argparse.ArgumentParser(description="Ship a trained t5-tiny.", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--wikisql", type=Path, required=True, help="WikiSQL's folder")
    arguments = parser.parse_args()
    (name,) = SHIPPED
    with new_folder(MODELS / name) as folder:
        folder.rmdir()
        exported = export(arguments.run, folder, dtype="float16")
        open_to_readers(folder)
        scores = {}
        for split in wikisql_splits(arguments.wikisql):
            if split in SPLITS:
                scores[split] = _score(folder, arguments.wikisql, split)
        card = _card(name, arguments.run, exported.parameters, scores)
        write_text(folder / "README.md", card)
    print(card)


def _score(model: Path, wikisql: Path, split: str) -> QueryScore:
    """The score of a model's answers to all questions of a split."""
    from zeropods.evaluate.generate import ANSWERERS, predict
    from zeropods.evaluate.score import score

    decoding = replace(ANSWERERS["text2sql"].usual, constrained=True)
    with tempfile.TemporaryDirectory() as made:
        answers = Path(made, f"predictions.{split}.jsonl")
        predict(model, wikisql, split, answers, decoding, task="text2sql", precision="fp32")
        measured = score(answers, wikisql, split)
    assert isinstance(measured, QueryScore)
    return measured


def _card(name: str, run: Path, parameters: int, scores: dict[str, QueryScore]) -> str:
    """The text of a model's card, from its run and its scores by split."""
    config = read_config(run)
    manifest = read_manifest(Path(config.dataset["path"]))
    lines = []
    for split, measured in scores.items():
        figures = [split, f"{measured.examples:,}"]
        for measure in ("logical_form_accuracy", "execution_accuracy"):
            interval = measured.intervals[measure]
            if interval is None:
                figures.append("no rows")
                continue
            low, high = interval
            figures.append(f"{getattr(measured, measure):.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {' | '.join(figures)} |")
    return CARD.format(
        name=name,
        parameters=parameters,
        vocabulary=manifest.vocabulary_size,
        questions=QUESTIONS,
        copies=manifest.copies,
        stages="\n".join(_stage(stage) for stage in _stages(run)),
        scores="\n".join(lines),
        held_out=", ".join(sorted(table.id for table in read_facts())),
    )


def _stages(run: Path) -> list[Path]:
    """The runs that made a model, in their order: each went on with the model of the one before
    it."""
    stages = [run]
    while True:
        arguments = read_config(stages[0]).argv
        start = Path(arguments[arguments.index("--init") + 1])
        if not start.is_dir():
            return stages
        stages.insert(0, start)


def _stage(run: Path) -> str:
    """What the card says of one run."""
    config = read_config(run)
    record = read_record(run)
    return STAGE.format(
        steps=record.steps,
        rows=config.effective_batch_size,
        rate=config.identity["learning_rate"],
        seed=config.identity["seed"],
        revision=config.git_revision,
        cores=record.hardware["cores"],
        processor=record.hardware["cpu"],
        speed=record.samples_per_second or 0.0,
    )


if __name__ == "__main__":
    sys.exit(guarded(main))
