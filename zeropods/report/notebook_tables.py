"""Tables that notebooks show: techniques, restarts, the causal workshop, answers, text and prepared data."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from zeropods.data.manifest import Manifest, TokenStatistics, read_manifest
from zeropods.data.squad import SquadExample, read_squad, squad_prompt
from zeropods.data.tokenizers import load_tokenizer
from zeropods.data.wikisql import Example, read_split, source_text
from zeropods.errors import UserError
from zeropods.evaluate.generate import sample_text, text_perplexity
from zeropods.evaluate.score import Prediction, interval, load_metric, read_predictions, right_queries
from zeropods.evaluate.score_file import Score, TextScore, read_score
from zeropods.measure.record import RankMeasurement, Record, read_json, read_record
from zeropods.plan.memory import planned
from zeropods.plan.shapes import T5_SHAPES, T5Shape
from zeropods.plan.workload import ELEMENT_BYTES
from zeropods.report import rows
from zeropods.report.entry import score_lines
from zeropods.report.figures import (
    DEVICE_USED,
    LIVE_STATES,
    RESIDENT,
    eval_loss,
    evaluation_samples_per_second,
    measured_bytes,
    peak_bytes,
    peak_memory_bytes,
    planned_kind,
    pod_memory_kind,
    samples_of,
    train_loss,
)
from zeropods.report.plots import Plot, drawn, new_axes
from zeropods.report.rows import NOT_MEASURED, Column, accuracy_columns
from zeropods.report.run import Run
from zeropods.report.summary import read_runs
from zeropods.sql.query import Execution, Query, cells_text, execute, format_query
from zeropods.tables import GIB, MIB, Table, progress

# Techniques against a baseline: memory, speed, and whether the losses are the same.


def technique_table(runs: Sequence[Run]) -> Table:
    """A line for each run; the first is what the others are compared with.

    `states` are parameters, gradients and optimizer states in memory before an optimizer step, measured where there
    is no GPU. `loss difference` is the largest of a training step, as a share of the baseline's loss at that step.
    """
    records = [run.record for run in runs]
    return Table.of(_technique_line(record, records[0]) for record in records)


def pod_table(runs: Sequence[Run]) -> Table:
    """A line for each rank: when its process began, how long it took, its last loss and its memory.

    `states` are as in `technique_table`; the loss is the mean over all ranks, which each of them has.
    """
    return Table.of(_pod_line(run, rank) for run in runs for rank in run.record.ranks)


def _pod_line(run: Run, rank: RankMeasurement) -> dict[str, str]:
    began = None if rank.ended_unix_seconds is None else rank.ended_unix_seconds - (rank.wall_seconds or 0)
    live = rank.live_bytes
    return {
        "run": run.folder.name,
        "pod": rank.host,
        "rank": str(rank.rank),
        "began (UTC)": NOT_MEASURED if began is None else f"{datetime.fromtimestamp(began, UTC):%H:%M:%S}",
        "start (s)": _shown(rank.start_seconds, "{:.1f}"),
        "training (s)": _shown(sum(rank.step_seconds) or None, "{:.1f}"),
        "whole (s)": _shown(rank.wall_seconds, "{:.1f}"),
        "last loss": _shown(rank.losses[-1].loss if rank.losses else None, "{:.4f}"),
        "states (MiB)": _mib(None if live is None else live.parameters + live.gradients + live.optimizer),
        "peak (MiB)": _mib(rank.peak_allocated_bytes or rank.peak_resident_bytes),
    }


# What ZeRO divides: the bytes of a model's states in each process, beside arithmetic.

STATES = ("parameters", "gradients", "optimizer")


def state_table(runs: Sequence[Run]) -> Table:
    """A line for each run: the states of its fullest rank, what they come to by arithmetic, and the resident peak.

    States are tensors in memory between a backward pass and the optimizer's step, counted one by one. The resident
    peak is the whole process's: Python and its libraries, activations and buffers too.
    """
    records = [run.record for run in runs]
    base = state_bytes(records[0])
    return Table.of(_state_line(record, base) for record in records)


def state_plot(runs: Sequence[Run]) -> Plot:
    """The same as bars, a part of each colour; a black line is where arithmetic puts the sum."""
    figure, (axes,) = new_axes(8, 0.6 * len(runs) + 1.4)
    records = [run.record for run in runs]
    labels = [f"{record.technique}, {record.world_size} x" for record in records]
    lefts = np.zeros(len(records))
    for part in STATES:
        sizes = np.array([_states(record).get(part, 0) / MIB for record in records])
        axes.barh(labels, sizes, left=lefts, label=part)
        lefts += sizes
    expected = [(_planned_states(record) or math.nan) / MIB for record in records]
    axes.plot(expected, labels, linestyle="none", marker="|", markersize=24, color="black", label="by arithmetic")
    axes.invert_yaxis()
    axes.set(xlabel="MiB in each process", title="What ZeRO divides: the states of one model")
    axes.legend(loc="lower right")
    return drawn(figure, "bars of parameters, gradients and optimizer states per process, by technique")


def state_bytes(record: Record) -> int:
    """Parameters, gradients and optimizer states of the rank that holds most."""
    return sum(_states(record).values())


def _state_line(record: Record, base: int) -> dict[str, str]:
    parts, held = _states(record), state_bytes(record)
    return {
        "technique": record.technique,
        "processes": str(record.world_size),
        **{f"{part} (MiB)": _mib(parts.get(part)) for part in STATES},
        "states (MiB)": _mib(held or None),
        "by arithmetic (MiB)": _mib(_planned_states(record)),
        "against the first": _shown(held / base if held and base else None, "{:.2f} x"),
        "resident peak (MiB)": _mib(peak_bytes(record, RESIDENT)),
        "status": record.status,
    }


def _planned_states(record: Record) -> float | None:
    plan = planned(record)
    return None if plan is None else plan.state_bytes


def _states(record: Record) -> dict[str, int]:
    """Bytes by part, of the rank that holds most."""
    held = [asdict(rank.live_bytes) for rank in record.ranks if rank.live_bytes is not None]
    return max(held, key=lambda parts: sum(parts.values()), default={})


def largest_difference(record: Record, baseline: Record) -> float | None:
    """The largest |loss - loss of the baseline| / loss of the baseline, over the steps that both have; None if none."""
    before = {point.step: point.loss for point in baseline.losses}
    pairs = [(point.loss, before[point.step]) for point in record.losses if point.step in before]
    return max((abs(loss - base) / abs(base) for loss, base in pairs), default=None)


def _technique_line(record: Record, baseline: Record) -> dict[str, str]:
    rate, base = record.samples_per_second, baseline.samples_per_second
    states = measured_bytes(record) if planned_kind(record) == LIVE_STATES else None
    return {
        "technique": record.technique_text,
        "training (samples/s)": _shown(rate, "{:,.1f}"),
        "against the first": _shown(rate / base if rate and base else None, "{:.2f} x"),
        "peak memory (MiB)": _mib(peak_memory_bytes(record)),
        "kind of memory": pod_memory_kind(record) or NOT_MEASURED,
        "states (MiB)": _mib(states),
        "final train loss": _shown(train_loss(record), "{:.4f}"),
        "final eval loss": _shown(eval_loss(record), "{:.4f}"),
        "loss difference": _shown(largest_difference(record, baseline), "{:.1e}"),
        "status": record.status,
    }


def _mib(value: float | None) -> str:
    return _shown(None if value is None else value / MIB, "{:,.1f}")


def _shown(value: float | None, form: str, missing: str = NOT_MEASURED) -> str:
    return missing if value is None else form.format(value)


# A run that lost a pod and went on, beside one that nothing has disturbed: what 07 shows.

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
    flags = " ".join(f"--{name} {value}" for name, value in entry["flags"].items())
    facts = {
        "ended by": (f"{entry['status']}: {entry['pod']}", "nothing"),
        "found after": (_seconds(_until_found(disturbed.folder, entry)), "-"),
        "trained again after": (_seconds(_until_first_step(record, entry)), "-"),
        "steps done twice": (str(first.steps - record.ranks[0].first_step), "0"),
        "pods": (f"{first.pods}, then {record.pods}: {', '.join(entry['pods'])}", str(other.pods)),
        "told otherwise": (flags or "nothing", "-"),
        "effective batch": (str(record.effective_batch_size), str(other.effective_batch_size)),
        "steps": (str(record.steps), str(other.steps)),
        "last training loss": tuple(_shown(train_loss(one), "{:.6f}", "none") for one in (record, other)),
        "last validation loss": tuple(_shown(eval_loss(one), "{:.6f}", "none") for one in (record, other)),
        "largest difference of a step's loss": (_shown(largest_difference(record, other), "{:.1e}"), "-"),
    }
    return Table.of({"": name, "went on": ours, "undisturbed": theirs} for name, (ours, theirs) in facts.items())


def _until_found(folder: Path, entry: Mapping[str, Any]) -> float | None:
    """Seconds from the fault to the moment when the supervisor saw that the run had ended."""
    if not (folder / FAULT).is_file():
        return None
    return float(entry["found_unix_seconds"] - read_json(folder / FAULT)["killed_unix_seconds"])


def _until_first_step(record: Record, entry: Mapping[str, Any]) -> float | None:
    """Seconds from that moment to the first step of the last attempt, start of all processes included."""
    first = record.ranks[0]
    if first.wall_seconds is None or first.start_seconds is None or first.ended_unix_seconds is None:
        return None
    return float(first.ended_unix_seconds - first.wall_seconds + first.start_seconds - entry["found_unix_seconds"])


def _seconds(value: float | None) -> str:
    return _shown(value, "{:.1f} s", "not measured")


# The tables of the causal workshop: losses and speed, memory, scaling over slots and pods.

SCALING = (
    Column("pods", "pods"),
    Column("slots", "slots of a pod"),
    Column("world_size", "processes"),
    *(one for one in (*rows.RESULTS, *rows.SPEED) if one.key in ("samples_per_second", "tokens_per_second")),
    *(column for column in rows.SCALING if column.key in ("speed_up", "scaling_efficiency", "base", "sharing")),
)


def training_table(runs: Sequence[Run]) -> Table:
    """Losses and speed: a line for each run, with its evaluation loss after each epoch.

    Losses are nats per label token; samples/s are of all processes. `before` is the evaluation before the first step,
    where there was one.
    """
    records = {run.folder.name: run.record for run in runs}
    by_epoch = {name: _eval_losses_by_epoch(record) for name, record in records.items()}
    epochs = sorted({epoch for losses in by_epoch.values() for epoch in losses})
    return Table.of(
        {
            "run": name,
            "technique": record.technique_text,
            "final train loss": _shown(train_loss(record), "{:.4f}"),
            **{
                f"eval loss, epoch {epoch}" if epoch else "eval loss, before": _shown(
                    by_epoch[name].get(epoch), "{:.4f}"
                )
                for epoch in epochs
            },
            "training (samples/s)": _shown(record.samples_per_second, "{:,.2f}"),
            "evaluation (samples/s)": _shown(evaluation_samples_per_second(record), "{:,.2f}"),
            "steps per epoch": f"{_steps_per_epoch(record):,}",
            "status": record.status,
        }
        for name, record in records.items()
    )


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory over a whole run as a log of `nvidia-smi` would give it: peak, mean and minimum of its samples, in MiB.

    Of GPUs device-used memory, context and other processes included; elsewhere the process's resident memory. The peak
    is of the rank that needed most, the minimum of the one that needed least, the mean of all.
    """
    return Table.of(_memory_line(run) for run in runs)


def scaling_table(runs: Sequence[Run], *, allow_differences: bool = False) -> Table:
    """Speed-up and efficiency over slots and pods, against the run with the fewest processes; repeats are one line.

    Args:
        allow_differences: as in `summary.read_runs`.
    """
    lines = read_runs([run.folder for run in runs], allow_differences=allow_differences).lines
    known = [{**line, "slots": line["pods"] and line["world_size"] // line["pods"]} for line in lines]
    return rows.table("", SCALING, known)


def _memory_line(run: Run) -> dict[str, str]:
    record = run.record
    kind = next((kind for kind in (DEVICE_USED, RESIDENT) if samples_of(record, kind)), None)
    sampled = samples_of(record, kind) or [] if kind else []

    def over_ranks(rule: Callable[[Iterable[float]], float], key: str) -> str:
        return _mib(rule([getattr(one, key) for one in sampled]) if sampled else None)

    return {
        "run": run.folder.name,
        "technique": record.technique_text,
        "kind of memory": kind or NOT_MEASURED,
        "peak (MiB)": over_ranks(max, "peak"),
        "mean (MiB)": over_ranks(mean, "mean"),
        "minimum (MiB)": over_ranks(min, "minimum"),
    }


def _steps_per_epoch(record: Record) -> int:
    """Optimizer steps of an epoch: rows of the train split / effective batch size, rounded up."""
    return math.ceil(record.train_rows / record.effective_batch_size)


def _eval_losses_by_epoch(record: Record) -> dict[int, float]:
    """The last evaluation loss within each epoch, from 1; under 0 that before the first step."""
    length = _steps_per_epoch(record)
    return {math.ceil(point.step / length): point.loss for point in record.eval_losses}


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
        first = text_perplexity(before, prepared, split, progress=bar.update)
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
LEVEL = 0.05
"""Chance of a difference at least as large between equally good models, below which it counts as more than chance."""


def answer_table(predictions: Sequence[Prediction], examples: Sequence[Example], count: int = 8) -> Table:
    """Question, prediction, expected query, and the rows that both find, side by side.

    Args:
        predictions: their `index` names the example that they answer.
        count: how many are shown, taken at even distances.
    """
    by_index = {example.index: example for example in examples}
    step = max(1, len(predictions) // count)
    chosen = predictions[::step][:count]
    return Table.of(_answer_line(prediction, by_index[prediction.index]) for prediction in chosen)


def compared_answers(runs: Sequence[Path], data: Path, split: str, count: int = 8) -> Table:
    """Some questions, the expected query, and what the model of each run answers, a column for each."""
    answers = {_run_label(run): read_predictions(run / f"predictions.{split}.jsonl") for run in runs}
    by_index = {run: {one.index: one.text or NO_QUERY for one in found} for run, found in answers.items()}
    asked = sorted(set[int].intersection(*map(set, by_index.values())) if by_index else ())
    chosen = asked[:: max(1, len(asked) // count)][:count]
    examples = (example for example in read_split(data, split) if example.index in set(chosen))
    return Table.of(
        {
            "question": example.question,
            "expected": format_query(example.query, example.table.header),
            **{run: found[example.index] for run, found in by_index.items()},
        }
        for example in examples
    )


def paired_table(runs: Sequence[Path], data: Path, split: str) -> Table:
    """Whether the models of runs differ from that of the first by more than chance: the same questions, pair by pair.

    Where two models answer one question right and wrong, either is as likely to be the right one if they are equally
    good: the exact form of McNemar's test (1947), two-sided. Below 0.05 they differ by more than chance, of twenty
    comparisons of equal models in one.
    """
    from scipy.stats import binomtest

    right = {_run_label(run): right_queries(run / f"predictions.{split}.jsonl", data, split) for run in runs}
    first = next(iter(right.values()), {})
    lines = []
    for run, found in right.items():
        both = found.keys() & first.keys()
        gained, lost = sum(found[i] > first[i] for i in both), sum(found[i] < first[i] for i in both)
        chance = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        low, high = interval(list(found.values())) or (math.nan, math.nan)
        lines.append(
            {
                "run": run,
                "right (of 1)": f"{mean(found.values()):.3f} [{low:.3f}, {high:.3f}]",
                "questions": f"{len(both):,}",
                "right only here": str(gained),
                "right only in the first": str(lost),
                "p": f"{chance:.2f}",
                "more than chance": "is the first" if found is first else "yes" if chance < LEVEL else "no",
            }
        )
    return Table.of(lines)


def _run_label(run: Path) -> str:
    record = read_record(run)
    return f"{record.technique_text} x{record.pods}"


def accuracy_table(score: Score, split: str) -> Table:
    """The measures of a score of any task, with their 95 % intervals where they have one.

    Of text-to-SQL a line for all tables, and one each for known and unseen ones.
    """
    lines = list(score_lines(split, [score]))
    columns = accuracy_columns([score.task], lines)
    return Table(tuple(c.heading for c in columns), tuple(tuple(c.show(one) for c in columns) for one in lines))


def _answer_line(prediction: Prediction, example: Example) -> dict[str, str]:
    header = example.table.header
    with closing(Execution(example.table)) as execution:
        return {
            "question": example.question,
            "prediction": prediction.text or NO_QUERY,
            "expected": format_query(example.query, header),
            "answer": cells_text(execution.execute(prediction.query) if prediction.query else None),
            "expected answer": cells_text(execution.execute(example.query)),
            "rows found": _rows(execution, prediction.query),
            "rows expected": _rows(execution, example.query),
        }


def _rows(execution: Execution, query: Query | None) -> str:
    found = execution.matching_rows(query) if query else None
    if found is None:
        return ""
    shown = [" | ".join(map(str, row)) for row in found.rows[:SHOWN_ROWS]]
    more = len(found.rows) - len(shown)
    return "\n".join([*shown, *([f"and {more} more"] if more else [])])


# A prepared data set as tables and plots: what 01 shows.

COLUMNS = {"source": "input_ids", "target": "labels"}


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
