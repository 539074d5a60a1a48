"""Tables that notebooks show: prepared data, techniques, restarts, the causal workshop, answers and text."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from zeropods.data.manifest import Manifest, TokenStatistics, read_manifest
from zeropods.data.prompts import source_text, squad_prompt
from zeropods.data.squad import SquadExample, read_squad
from zeropods.data.tokenizers import load_tokenizer
from zeropods.data.wikisql import Cell, Example, read_split
from zeropods.errors import UserError
from zeropods.evaluate.generate import sample_text
from zeropods.evaluate.perplexity import TextToScore, text_perplexity
from zeropods.evaluate.predictions import Prediction, read_predictions
from zeropods.evaluate.score import load_metric
from zeropods.evaluate.score_file import Score, TextScore, read_score
from zeropods.measure.record import Record, Sampled, read_json, read_record
from zeropods.plan.shapes import T5_SHAPES, T5Shape
from zeropods.plan.workload import ELEMENT_BYTES
from zeropods.report import rows
from zeropods.report.accuracy import score_lines
from zeropods.report.figures import (
    DEVICE_USED,
    RESIDENT,
    eval_loss,
    evaluation_samples_per_second,
    measured_bytes,
    of_ranks,
    peak_memory_bytes,
    pod_memory_kind,
    train_loss,
)
from zeropods.report.plots import Plot, drawn, new_axes
from zeropods.report.rows import NOT_MEASURED, Column, accuracy_columns
from zeropods.report.run import Run
from zeropods.report.summary import read_runs
from zeropods.sql.execute import Execution, Rows, execute
from zeropods.sql.query import Query
from zeropods.sql.text import format_query
from zeropods.tables import MIB, Table, progress

# Techniques against a baseline: memory, speed, and whether the losses are the same.


def technique_table(runs: Sequence[Run]) -> Table:
    """A line for each run; the first is what the others are compared with.

    `states` are parameters, gradients and optimizer states in memory before an optimizer step, measured where there
    is no GPU. `loss difference` is the largest of a training step, as a share of the baseline's loss at that step.
    """
    records = [run.record for run in runs]
    return Table.of(_line(record, records[0]) for record in records)


def loss_difference(record: Record, baseline: Record) -> float | None:
    """The largest |loss - loss of the baseline| / loss of the baseline, over the steps that both have; None if none."""
    before = {point.step: point.loss for point in baseline.losses}
    pairs = [(point.loss, before[point.step]) for point in record.losses if point.step in before]
    return max((abs(loss - base) / base for loss, base in pairs), default=None)


def speed_up(record: Record, baseline: Record) -> float | None:
    """samples/s of a run / of the baseline; None where one of them has none."""
    rate, base = record.samples_per_second, baseline.samples_per_second
    return rate / base if rate and base else None


def _line(record: Record, baseline: Record) -> dict[str, str]:
    kind = pod_memory_kind(record)
    states = measured_bytes(record) if kind == "resident" else None
    return {
        "technique": record.technique,
        "training (samples/s)": _shown(record.samples_per_second, "{:,.1f}"),
        "against the first": _shown(speed_up(record, baseline), "{:.2f} x"),
        "peak memory (MiB)": _mib(peak_memory_bytes(record)),
        "kind of memory": kind or NOT_MEASURED,
        "states (MiB)": _mib(states),
        "final train loss": _shown(train_loss(record), "{:.4f}"),
        "final eval loss": _shown(eval_loss(record), "{:.4f}"),
        "loss difference": _shown(loss_difference(record, baseline), "{:.1e}"),
        "status": record.status,
    }


def _mib(value: float | None) -> str:
    return _shown(None if value is None else value / MIB, "{:,.1f}")


def _shown(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else form.format(value)


# A run that lost a pod and went on, beside one that nothing has disturbed.

FAULT, JOURNAL = "fault.json", "restarts.json"


def disturbed_table(disturbed: Run, undisturbed: Run) -> Table:
    """What was lost, how soon it was found, what the run went on with, and the losses of both.

    `UserError` where the first one did not go on by itself.
    """
    if not (disturbed.folder / JOURNAL).is_file():
        raise UserError(f"{disturbed.folder}: did not go on by itself; nothing was lost")
    record, other = disturbed.record, undisturbed.record
    entry = read_json(disturbed.folder / JOURNAL)["restarts"][-1]
    first = read_record(disturbed.folder, record.attempt - 1)
    told = " ".join(f"--{name} {value}" for name, value in entry["flags"].items())
    facts = {
        "ended by": (f"{entry['status']}: {entry['pod']}", "nothing"),
        "found after": (_seconds(_until_found(disturbed.folder, entry)), "-"),
        "trained again after": (_seconds(_until_first_step(record, entry)), "-"),
        "steps done twice": (str(first.steps - record.ranks[0].first_step), "0"),
        "pods": (f"{first.pods}, then {record.pods}: {', '.join(entry['pods'])}", str(other.pods)),
        "told otherwise": (told or "nothing", "-"),
        "effective batch": tuple(str(one.effective_batch_size) for one in (record, other)),
        "steps": tuple(str(one.steps) for one in (record, other)),
        "last training loss": tuple(f"{one.losses[-1].loss:.6f}" for one in (record, other)),
        "last validation loss": tuple(_validation(one) for one in (record, other)),
        "largest difference of a step's loss": (f"{largest_difference(record, other):.1e}", "-"),
    }
    lines = ({"": name, "went on": ours, "undisturbed": theirs} for name, (ours, theirs) in facts.items())
    return Table.of(lines)


def largest_difference(record: Record, other: Record) -> float:
    """Of the losses of the steps that both records have, relative to the other's."""
    known = {point.step: point.loss for point in other.losses}
    pairs = [(point.loss, known[point.step]) for point in record.losses if point.step in known]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def _until_found(folder: Path, entry: Mapping[str, Any]) -> float | None:
    """From the fault to the moment when the supervisor saw that the run had ended."""
    if not (folder / FAULT).is_file():
        return None
    return float(entry["found_unix_seconds"] - read_json(folder / FAULT)["killed_unix_seconds"])


def _until_first_step(record: Record, entry: Mapping[str, Any]) -> float | None:
    """From that moment to the first step of the last attempt, start of all processes included."""
    first = record.ranks[0]
    if first.wall_seconds is None or first.start_seconds is None or first.ended_unix_seconds is None:
        return None
    began = first.ended_unix_seconds - first.wall_seconds
    return float(began + first.start_seconds - entry["found_unix_seconds"])


def _validation(record: Record) -> str:
    return f"{record.eval_losses[-1].loss:.6f}" if record.eval_losses else "none"


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} s"


# The two tables of the causal workshop, filled from records, and how runs scale over slots and pods.

SCALING = (
    Column("pods", "pods"),
    Column("slots", "slots of a pod"),
    Column("world_size", "processes"),
    *(column for column in rows.SPEED if column.key in ("samples_per_second", "tokens_per_second")),
    *(column for column in rows.SCALING if column.key in ("speed_up", "scaling_efficiency", "base", "sharing")),
)


def training_table(runs: Sequence[Run]) -> Table:
    """Losses and speed: a line for each run, with its evaluation loss after each epoch.

    Losses are nats a label token; samples/s are of all processes. `before` is the evaluation before the first step,
    where there was one.
    """
    records = [run.record for run in runs]
    by_epoch = [eval_losses_by_epoch(record) for record in records]
    epochs = sorted({epoch for losses in by_epoch for epoch in losses})
    return Table.of(
        [
            {
                "run": run.folder.name,
                "technique": record.technique,
                "final train loss": _shown(train_loss(record), "{:.4f}"),
                **{_heading(epoch): _shown(losses.get(epoch), "{:.4f}") for epoch in epochs},
                "training (samples/s)": _shown(record.samples_per_second, "{:,.2f}"),
                "evaluation (samples/s)": _shown(evaluation_samples_per_second(record), "{:,.2f}"),
                "steps an epoch": f"{steps_per_epoch(record):,}",
                "status": record.status,
            }
            for run, record, losses in zip(runs, records, by_epoch, strict=True)
        ]
    )


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory over a whole run as a log of `nvidia-smi` would give it: peak, mean and minimum of its samples, in MiB.

    Of GPUs device-used memory, context and other processes included; elsewhere the process's resident memory. The peak
    is of the rank that needed most, the minimum of the one that needed least, the mean of all.
    """
    lines = []
    for run in runs:
        record = run.record
        kind, sampled = _sampled(record)
        lines.append(
            {
                "run": run.folder.name,
                "technique": record.technique,
                "kind of memory": kind or NOT_MEASURED,
                "peak (MiB)": _mib_workshop_tables(max, sampled, "peak"),
                "mean (MiB)": _mib_workshop_tables(mean, sampled, "mean"),
                "minimum (MiB)": _mib_workshop_tables(min, sampled, "minimum"),
            }
        )
    return Table.of(lines)


def scaling_table(runs: Sequence[Run], *, allow_differences: bool = False) -> Table:
    """Speed-up and efficiency over slots and pods, against the run with the fewest processes; repeats are one line.

    Args:
        allow_differences: as in `summary.read_runs`.
    """
    summary = read_runs([run.folder for run in runs], allow_differences=allow_differences)
    lines = [{**line, "slots": _slots(line)} for line in summary.lines]
    return rows.table("", SCALING, lines)


def steps_per_epoch(record: Record) -> int:
    """Optimizer steps of an epoch: rows of the train split / effective batch size, rounded up."""
    return math.ceil(record.train_rows / record.effective_batch_size)


def eval_losses_by_epoch(record: Record) -> dict[int, float]:
    """The last evaluation loss within each epoch, from 1; under 0 that before the first step."""
    length = steps_per_epoch(record)
    return {math.ceil(point.step / length): point.loss for point in record.eval_losses}


def _heading(epoch: int) -> str:
    return f"eval loss, epoch {epoch}" if epoch else "eval loss, before"


def _sampled(record: Record) -> tuple[str | None, list[Sampled]]:
    """The first kind that every rank has samples of, and their statistics in bytes."""
    of_all = of_ranks(record, "sampled") or []
    for kind, column in ((DEVICE_USED, "device_used_bytes"), (RESIDENT, "resident_bytes")):
        found = [of_rank[column] for of_rank in of_all if column in of_rank]
        if found and len(found) == len(of_all):
            return kind, found
    return None, []


def _mib_workshop_tables(of_all: Any, sampled: Sequence[Sampled], key: str) -> str:
    return f"{of_all([getattr(one, key) for one in sampled]) / MIB:,.1f}" if sampled else NOT_MEASURED


def _slots(line: dict[str, Any]) -> int | None:
    return line["world_size"] // line["pods"] if line["world_size"] and line["pods"] else None


# SQuAD's questions and a model's answers to them: what 11 shows.


def question_table(data: Path, split: str = "train", count: int = 3) -> Table:
    """The first questions of a split: the text that the model reads, and what it shall go on with."""
    return Table.of(
        {"prompt": squad_prompt(example.question, example.context), "answer": example.answers[0]}
        for example in islice(read_squad(data, split), count)
    )


def answered_file(predictions: Path, data: Path, split: str, count: int = 8) -> Table:
    """`answered_table` of a prediction file and the split that it answers."""
    answers = read_predictions(predictions)
    return answered_table(answers, list(islice(read_squad(data, split), answers[-1].index + 1)), count)


def answered_table(answers: Sequence[Prediction], examples: Sequence[SquadExample], count: int = 8) -> Table:
    """Question, prediction and expected answer side by side, with exact match and F1.

    Args:
        answers: their `index` names the example that they answer.
        count: how many are shown, taken at even distances.
    """
    by_index = {example.index: example for example in examples}
    chosen = answers[:: max(1, len(answers) // count)][:count]
    pairs = [(answer.text or "", by_index[answer.index]) for answer in chosen]
    scores = load_metric("squad_accuracy").compute(
        predictions=[text for text, _ in pairs], references=[list(e.answers) for _, e in pairs], average=False
    )
    return Table.of(
        {
            "question": example.question,
            "prediction": text or "(nothing)",
            "expected": " | ".join(dict.fromkeys(example.answers)),
            "exact match": "yes" if exact else "no",
            "F1": f"{f1:.2f}",
        }
        for (text, example), exact, f1 in zip(pairs, scores["exact_match"], scores["f1"], strict=True)
    )


# A language model before and after training: what 14 shows.

UNSEEN = ("dev", "test")
"""Splits that training does not see, as far as a set has them."""


def perplexity_table(before: str | Path, run: Run, prepared: Path) -> Table:
    """Tokens, loss and perplexity of each unseen split: of a model before its run, and as the run has written it."""
    splits = [split for split in UNSEEN if split in read_manifest(prepared).splits]
    return Table.of(_scored(before, run, prepared, split) for split in splits)


def continued_table(before: str | Path, run: Run, prompt: str) -> Table:
    """What a model writes after a prompt, before its run and after."""
    models = {"before": before, "after": run.folder}
    return Table.of(
        {"": when, "prompt": prompt, "goes on": sample_text(model, prompt).text} for when, model in models.items()
    )


def _scored(before: str | Path, run: Run, prepared: Path, split: str) -> dict[str, str]:
    with progress("perplexity", "blocks") as bar:
        first = text_perplexity(before, TextToScore(data=str(prepared), split=split), progress=bar.update)
    last = read_score(run.folder / f"score.{split}.json")
    assert isinstance(last, TextScore)
    return {
        "split": split,
        "tokens": f"{first.tokens:,}",
        "loss before (nats a token)": f"{first.loss:.4f}",
        "loss after": f"{last.loss:.4f}",
        "perplexity before": f"{first.perplexity:,.1f}",
        "perplexity after": f"{last.perplexity:,.1f}",
    }


# A model's answers beside what was expected: what 05 shows.

SHOWN_ROWS = 2
"""Of the rows that a query finds."""
NO_QUERY = "(no query)"


def answer_table(predictions: Sequence[Prediction], examples: Sequence[Example], count: int = 8) -> Table:
    """Question, prediction, expected query, and the rows that both find, side by side.

    Args:
        predictions: their `index` names the example that they answer.
        count: how many are shown, taken at even distances.
    """
    by_index = {example.index: example for example in examples}
    step = max(1, len(predictions) // count)
    chosen = predictions[::step][:count]
    return Table.of(_line_answers(prediction, by_index[prediction.index]) for prediction in chosen)


def accuracy_table(score: Score, split: str) -> Table:
    """The measures of a score of any task, with their 95 % intervals where they have one.

    Of text-to-SQL a line for all tables, and one each for known and unseen ones.
    """
    lines = list(score_lines(split, [score]))
    columns = accuracy_columns([score.task], lines)
    return Table(tuple(c.heading for c in columns), tuple(tuple(c.show(one) for c in columns) for one in lines))


def cells_text(cells: Sequence[Cell] | None) -> str:
    """What a query gives, as people read it; None stands for a query that cannot be run."""
    if cells is None:
        return "cannot be run"
    return ", ".join(_cell_text(cell) for cell in cells if cell is not None) or "nothing"


def _cell_text(cell: Cell) -> str:
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell)


def _line_answers(prediction: Prediction, example: Example) -> dict[str, str]:
    header = example.table.header
    with closing(Execution(example.table)) as execution:
        return {
            "question": example.question,
            "prediction": prediction.text or NO_QUERY,
            "expected": format_query(example.query, header),
            "answer": _answer(execution, prediction.query),
            "expected answer": _answer(execution, example.query),
            "rows found": _rows(execution, prediction.query),
            "rows expected": _rows(execution, example.query),
        }


def _answer(execution: Execution, query: Query | None) -> str:
    return cells_text(None if query is None else execution.execute(query))


def _rows(execution: Execution, query: Query | None) -> str:
    found = None if query is None else execution.matching_rows(query)
    return "" if found is None else _shown_answers(found)


def _shown_answers(found: Rows) -> str:
    rows = [" | ".join(map(str, row)) for row in found.rows[:SHOWN_ROWS]]
    more = len(found.rows) - len(rows)
    return "\n".join([*rows, *([f"and {more} more"] if more else [])])


# A prepared data set as tables and plots: what 01 shows.

COLUMNS = {"source": "input_ids", "target": "labels"}
GIB = 2**30


def split_table(manifest: Manifest) -> Table:
    """Rows, lengths in tokens, truncated rows and unknown tokens of both sides of each split."""
    return Table.of(
        {"split": name, "side": side, "rows": f"{split.rows:,}", **_statistics(getattr(split, side))}
        for name, split in manifest.splits.items()
        for side in COLUMNS
    )


def length_histograms(prepared: Path, split: str = "train") -> Plot:
    """How many rows have how many source and target tokens."""
    figure, axes = new_axes(9, 3.2, columns=len(COLUMNS))
    for one, (side, column) in zip(axes, COLUMNS.items(), strict=True):
        lengths = token_lengths(prepared, split, column)
        one.hist(lengths, bins=min(60, int(np.ptp(lengths)) + 1), color="C0")
        one.set(xlabel="tokens", ylabel="rows", title=f"{side} of {split}")
    return drawn(figure, f"histograms of source and target tokens of {split}")


def longest_example(prepared: Path, data: Path, split: str = "train") -> Table:
    """The example with the longest source: its tokens, question, columns and query."""
    lengths = token_lengths(prepared, split, COLUMNS["source"])
    example = next(itertools.islice(read_split(data, split), int(lengths.argmax()), None))
    target = token_lengths(prepared, split, COLUMNS["target"])[lengths.argmax()]
    return Table.of_facts({"source tokens": lengths.max(), "target tokens": target, **_described(example)})


def first_examples(data: Path, split: str = "train", count: int = 5) -> Table:
    """The first examples: question, columns, query, and the answer that the table's rows give."""
    examples = itertools.islice(read_split(data, split), count)
    return Table.of({**_described(e), "answer": cells_text(execute(e.query, e.table))} for e in examples)


def unknown_text(prepared: Path, data: Path, manifest: Manifest, split: str = "train") -> Table:
    """What the tokenizer has no token for, as it stands in sources and targets, and how often."""
    tokenizer = load_tokenizer(str(prepared / "tokenizer"), complete=False)
    unknown, found = tokenizer.unk_token_id, Counter[str]()
    examples = itertools.islice(read_split(data, split), manifest.limit)
    while chunk := list(itertools.islice(examples, 4_096)):
        texts = [text for example in chunk for text in _texts(manifest.prompt, example)]
        for text, row in zip(texts, tokenizer.backend_tokenizer.encode_batch(texts), strict=True):
            if unknown in row.ids:
                spans = itertools.compress(row.offsets, [id_ == unknown for id_ in row.ids])
                found.update(text[start:end].strip() for start, end in spans)
    return Table(("text", "times"), tuple((text, f"{times:,}") for text, times in found.most_common(10)))


def shape_table(*names: str) -> Table:
    """Parameters of models by their published shape, and the memory of the weights at each precision."""
    return Table.of(_weights(name, T5_SHAPES[name].parameters) for name in names or T5_SHAPES)


def token_lengths(prepared: Path, split: str, column: str) -> np.ndarray:
    """(rows,) tokens of each row of a prepared split."""
    from datasets import load_from_disk

    if not (Path(prepared) / split).is_dir():
        raise UserError(f"{prepared}: has no split {split!r}; prepare the data set again")
    table = load_from_disk(str(Path(prepared) / split)).data.table
    return np.diff(table[column].combine_chunks().offsets.to_numpy())


def _statistics(side: TokenStatistics) -> dict[str, float]:
    return {
        "mean tokens": side.mean,
        "median": side.p50,
        "99 %": side.p99,
        "longest": side.max,
        "truncated rows": side.truncated_rows,
        "unknown tokens": side.unknown_tokens,
    }


def _weights(name: str, parameters: int) -> dict[str, str]:
    sizes = {
        f"{precision} weights (GiB)": f"{parameters * ELEMENT_BYTES[precision] / GIB:.3f}"
        for precision in T5Shape.PRECISIONS
    }
    return {"model": name, "parameters": f"{parameters:,}", **sizes}


def _described(example: Example) -> dict[str, str]:
    return {
        "question": example.question,
        "columns": "; ".join(example.table.header),
        "query": format_query(example.query, example.table.header),
    }


def _texts(prompt: str, example: Example) -> tuple[str, str]:
    table = example.table
    source = source_text(prompt, example.question, table.header, table.types)
    return source, format_query(example.query, table.header)
