"""Tables and plots that notebooks show: raw and tokenized data sets, model sizes, a model's answers and its text."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import TypeVar

import numpy as np

from zeropods.data.manifest import Manifest, read_manifest
from zeropods.data.squad import read_squad, squad_prompt
from zeropods.data.tokenizers import load_tokenizer
from zeropods.data.wikisql import Example, read_split, source_of, target_of
from zeropods.errors import UserError
from zeropods.evaluate.score import Prediction, load_metric, read_predictions, right_queries
from zeropods.evaluate.score_json import UNSEEN_SPLITS, Score, TextScore, read_score
from zeropods.measure.intervals import score_interval
from zeropods.measure.record import read_record
from zeropods.plan.facts import shape_named
from zeropods.plan.known_models import known_names
from zeropods.plan.workload import ELEMENT_BYTES
from zeropods.report.columns import accuracy_columns, table
from zeropods.report.entry import score_lines
from zeropods.report.plots import WIDE, Plot, new_axes
from zeropods.report.run import Run
from zeropods.sql.query import Execution, Query, cells_text, execute
from zeropods.tables import GIB, Table, progress

T = TypeVar("T")

# A prepared data set as tables and plots, shown by notebook 01.

COLUMNS = {"source": "input_ids", "target": "labels"}
MOST_BINS = 100


def split_table(manifest: Manifest) -> Table:
    """Rows, lengths in tokens, truncated rows and unknown tokens of both sides of each split."""
    return Table.of(
        {
            "split": name,
            "side": side,
            "rows": f"{split.rows:,}",
            "mean tokens": f"{tokens.mean:.1f}",
            "median": tokens.p50,
            "99 %": tokens.p99,
            "longest": tokens.max,
            "truncated rows": tokens.truncated_rows,
            "unknown tokens": tokens.unknown_tokens,
        }
        for name, split in manifest.splits.items()
        for side, tokens in (("source", split.source), ("target", split.target))
    )


def length_histograms(prepared: Path, split: str = "train") -> Plot:
    """Histograms of the rows of a split by their number of source and of target tokens."""
    figure, axes = new_axes(WIDE, 2.6, columns=len(COLUMNS))
    for one, (side, column) in zip(axes, COLUMNS.items(), strict=True):
        lengths = token_lengths(prepared, split, column)
        # Each bin spans the same number of whole numbers: a bin of width 1.2 would hold one of them, or two.
        step = math.ceil((np.ptp(lengths) + 1) / MOST_BINS)
        one.hist(lengths, bins=[first - 0.5 for first in range(lengths.min(), lengths.max() + step + 1, step)])
        one.yaxis.set_major_formatter("{x:,g}")
        one.set(xlabel="tokens", ylabel="rows", title=f"{side} of {split}")
    return Plot(figure, f"histograms of source and target tokens of {split}")


def longest_example(prepared: Path, data: Path, split: str = "train") -> Table:
    """The example with the longest source: its number of tokens, its question, columns and query."""
    source, target = (token_lengths(prepared, split, column) for column in COLUMNS.values())
    longest = int(source.argmax())
    example = next(itertools.islice(read_split(data, split), longest, None))
    return Table.of_facts({"source tokens": source[longest], "target tokens": target[longest], **_described(example)})


def first_examples(data: Path, split: str = "train", count: int = 5) -> Table:
    """The first examples: question, columns, query, and the answer that the table's rows give."""
    examples = itertools.islice(read_split(data, split), count)
    return Table.of({**_described(e), "answer": cells_text(execute(e.query, e.table))} for e in examples)


def _described(example: Example) -> dict[str, str]:
    columns = "; ".join(example.table.header)
    return {"question": example.question, "columns": columns, "query": target_of(example)}


def unknown_text(prepared: Path, data: Path, manifest: Manifest, split: str = "train") -> Table:
    """The text that the tokenizer has no token for, as it appears in sources and targets, and how often."""
    counted, found = manifest.splits[split], Counter[str]()
    has_any = counted.source.unknown_tokens + counted.target.unknown_tokens
    examples = itertools.islice(read_split(data, split), manifest.limit if has_any else 0)
    tokenizer = load_tokenizer(str(prepared / "tokenizer"), complete=False)
    unknown = tokenizer.unk_token_id
    while chunk := list(itertools.islice(examples, 4_096)):
        texts = [text for each in chunk for text in (source_of(each, manifest.prompt), target_of(each))]
        for text, row in zip(texts, tokenizer.backend_tokenizer.encode_batch(texts), strict=True):
            if unknown in row.ids:
                spans = itertools.compress(row.offsets, [id_ == unknown for id_ in row.ids])
                found.update(text[start:end].strip() for start, end in spans)
    return Table(("text", "times"), tuple((text, f"{times:,}") for text, times in found.most_common(10)))


def shape_table(*names: str) -> Table:
    """Parameters of models by their published shape, and the memory of the weights at each precision."""
    sizes = {name: shape_named(name).parameters for name in names or known_names("t5")}
    return Table.of(
        {
            "model": name,
            "parameters": f"{parameters:,}",
            **{f"{p} weights (GiB)": f"{parameters * ELEMENT_BYTES[p] / GIB:.3f}" for p in ("fp32", "bf16")},
        }
        for name, parameters in sizes.items()
    )


def token_lengths(prepared: Path, split: str, column: str) -> np.ndarray:
    """Number of tokens of each row of a prepared split, of shape (rows,)."""
    from datasets import load_from_disk

    if not (Path(prepared) / split).is_dir():
        raise UserError(f"{prepared}: has no split {split!r}; prepare the data set again")
    table = load_from_disk(str(Path(prepared) / split)).data.table
    return np.diff(table[column].combine_chunks().offsets.to_numpy())


# SQuAD's questions and a model's answers to them, shown by notebook 11.


def question_table(data: Path, split: str = "train", count: int = 3) -> Table:
    """The first questions of a split: the text that the model reads, and the answer that it should continue with."""
    return Table.of(
        {"prompt": squad_prompt(example.question, example.context), "answer": example.answers[0]}
        for example in itertools.islice(read_squad(data, split), count)
    )


def answered_file(predictions: Path, data: Path, split: str, count: int = 8) -> Table:
    """Question, prediction and expected answer side by side, with exact match and F1.

    Args:
        data: the data set whose questions were answered.
        count: number of predictions to show, evenly spaced.
    """
    answers = read_predictions(predictions)
    by_index = {example.index: example for example in itertools.islice(read_squad(data, split), answers[-1].index + 1)}
    pairs = [(answer.text or "", by_index[answer.index]) for answer in _spread(answers, count)]
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


# A language model before and after training, shown by notebook 14.


def perplexity_table(before: str | Path, run: Run, prepared: Path) -> Table:
    """Tokens, loss and perplexity of each unseen split: of a model before its run, and as the run has recorded them."""
    from zeropods.evaluate.generate import text_perplexity

    lines = []
    for split in (split for split in reversed(UNSEEN_SPLITS) if split in read_manifest(prepared).splits):
        with progress("perplexity", "blocks") as bar:
            first = text_perplexity(before, prepared, split, progress=bar.update)
        last = read_score(run.folder / f"score.{split}.json")
        assert isinstance(last, TextScore)
        lines.append(
            {
                "split": split,
                "tokens": f"{first.tokens:,}",
                "loss before (nats/token)": f"{first.loss:.4f}",
                "loss after": f"{last.loss:.4f}",
                "perplexity before": f"{first.perplexity:,.1f}",
                "perplexity after": f"{last.perplexity:,.1f}",
            }
        )
    return Table.of(lines)


def continued_table(before: str | Path, run: Run, prompt: str) -> Table:
    """The text that a model writes after a prompt, before its run and after it."""
    from zeropods.evaluate.generate import sample_text

    models = {"before": before, "after": run.folder}
    return Table.of(
        {"": when, "prompt": prompt, "goes on": sample_text(model, prompt).text} for when, model in models.items()
    )


# A model's answers beside the expected ones, shown by notebook 05.

SHOWN_ROWS = 2
"""Number of rows shown of those that a query finds."""
NO_QUERY = "(no query)"
LEVEL = 0.05
"""Probability of a difference at least as large between equally good models, below which it is more than chance."""


def answer_table(predictions: Sequence[Prediction], examples: Sequence[Example], count: int = 8) -> Table:
    """Question, prediction, expected query, and the rows that both queries find, side by side.

    Args:
        predictions: their `index` names the example that they answer.
        count: number of predictions to show, evenly spaced.
    """
    by_index, lines = {example.index: example for example in examples}, []
    for prediction in _spread(predictions, count):
        example = by_index[prediction.index]
        with closing(Execution(example.table)) as execution:
            lines.append(
                {
                    "question": example.question,
                    "prediction": prediction.text or NO_QUERY,
                    "expected": target_of(example),
                    "answer": cells_text(execution.execute(prediction.query) if prediction.query else None),
                    "expected answer": cells_text(execution.execute(example.query)),
                    "rows found": _rows(execution, prediction.query),
                    "rows expected": _rows(execution, example.query),
                }
            )
    return Table.of(lines)


def _rows(execution: Execution, query: Query | None) -> str:
    found = (execution.matching_rows(query) if query else None) or []
    more = len(found) - SHOWN_ROWS
    return "\n".join([*(" | ".join(map(str, row)) for row in found[:SHOWN_ROWS]), *[f"and {more} more"] * (more > 0)])


def _spread(items: Sequence[T], count: int) -> Sequence[T]:
    """At most `count` of the items, evenly spaced."""
    return items[:: max(1, len(items) // count)][:count]


def compared_answers(runs: Sequence[Path], data: Path, split: str, count: int = 8) -> Table:
    """Some questions, the expected query, and what the model of each run answers, with a column for each run."""
    answers = {_run_label(run): read_predictions(run / f"predictions.{split}.jsonl") for run in runs}
    by_index = {run: {one.index: one.text or NO_QUERY for one in found} for run, found in answers.items()}
    asked = sorted(set[int].intersection(*map(set, by_index.values())) if by_index else ())
    chosen = set(_spread(asked, count))
    examples = (example for example in read_split(data, split) if example.index in chosen)
    return Table.of(
        {
            "question": example.question,
            "expected": target_of(example),
            **{run: found[example.index] for run, found in by_index.items()},
        }
        for example in examples
    )


def paired_table(runs: Sequence[Path], data: Path, split: str) -> Table:
    """Whether the model of each run differs by more than chance from that of the first run, on the same questions.

    Where one model is right on a question and the other is wrong, either is as likely to be the right one if they are
    equally good: this is the exact form of McNemar's test (1947), two-sided. With p below 0.05 they differ by more than
    chance, which happens in one of twenty comparisons of equal models.
    """
    from scipy.stats import binomtest

    right = {_run_label(run): right_queries(run / f"predictions.{split}.jsonl", data, split) for run in runs}
    first = next(iter(right.values()), {})
    lines = []
    for run, found in right.items():
        both = found.keys() & first.keys()
        gained, lost = sum(found[i] > first[i] for i in both), sum(found[i] < first[i] for i in both)
        chance = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        low, high = score_interval(list(found.values())) or (math.nan, math.nan)
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

    Text-to-SQL has a line for all tables, one each for known and unseen ones, and one for each kind of query.
    """
    lines = list(score_lines(split, [score]))
    for kind, part in (getattr(score, "kinds", None) or {}).items():
        lines += [{**line, "tables": kind} for line in score_lines(split, [part])]
    return table("", accuracy_columns({score.task}, lines), lines, whole=True)
