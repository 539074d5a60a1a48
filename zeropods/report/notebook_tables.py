"""Tables and plots that notebooks show: raw and tokenized data sets, model sizes, a model's answers
and its text."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from zeropods.data.manifest import Manifest, read_manifest
from zeropods.data.squad import read_squad, squad_prompt
from zeropods.data.tokenizers import load_tokenizer
from zeropods.data.wikisql import Example, read_split, source_of, target_of
from zeropods.errors import UserError
from zeropods.evaluate.score import Prediction, load_metric, read_predictions, right_queries
from zeropods.measure.intervals import score_interval
from zeropods.measure.record import read_record
from zeropods.measure.score_json import UNSEEN_SPLITS, QueryScore, Score, TextScore, read_score
from zeropods.plan.facts import shape_named
from zeropods.plan.known_models import known_names
from zeropods.plan.workload import ELEMENT_BYTES
from zeropods.report.columns import accuracy_columns, table
from zeropods.report.entry import score_lines
from zeropods.report.plots import WIDE, Plot, new_axes
from zeropods.report.run import Run
from zeropods.sql.query import Execution, Query, cells_text, execute
from zeropods.tables import GIB, Table, progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

# A prepared data set as tables and plots, shown by notebook 01.

SIDE_COLUMNS = {"source": "input_ids", "target": "labels"}
"""Columns of a prepared set with the tokens of each side."""
MOST_BINS = 100
"""Most bins of a histogram."""
EXAMPLES_AT_ONCE = 4_096
"""Number of examples whose texts are tokenized together."""
SHOWN_UNKNOWN = 10
"""Most texts in the table of texts that the tokenizer has no token for."""


def split_table(manifest: Manifest) -> Table:
    """Rows, lengths in tokens, truncated rows and unknown tokens of both sides of each split."""
    lines = []
    for name, split in manifest.splits.items():
        for side, tokens in (("source", split.source), ("target", split.target)):
            lines.append(
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
            )
    return Table.of(lines)


def length_histograms(prepared: Path, split: str = "train") -> Plot:
    """Histograms of the rows of a split by their number of source and of target tokens."""
    figure, panels = new_axes(WIDE, 2.6, columns=len(SIDE_COLUMNS))
    for axes, (side, column) in zip(panels, SIDE_COLUMNS.items(), strict=True):
        lengths = token_lengths(prepared, split, column)
        # Each bin holds as many lengths as the others: of bins 1.2 wide some would hold one length,
        # some two.
        lengths_per_bin = math.ceil((np.ptp(lengths) + 1) / MOST_BINS)
        end = lengths.max() + lengths_per_bin + 1
        first_lengths = range(lengths.min(), end, lengths_per_bin)
        axes.hist(lengths, bins=[first_length - 0.5 for first_length in first_lengths])
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set(xlabel="tokens", ylabel="rows", title=f"{side} of {split}")
    return Plot(figure, f"histograms of source and target tokens of {split}")


def longest_row(prepared: Path, split: str = "train") -> Table:
    """The row with the longest source: the number of tokens of both sides, and their texts as the
    model sees them; `UserError` where the set has no such split.

    Args:
        prepared: folder of the prepared data set.
    """
    from zeropods.train.sampler import load_split

    rows = load_split(prepared, split)
    if rows is None:
        raise UserError(_no_split(prepared, split))
    tokenizer = load_tokenizer(str(prepared / "tokenizer"), complete=False)
    longest = max(range(len(rows)), key=lambda row: len(rows.sources[row]))
    facts: dict[str, object] = {}
    for side, ids in (("source", rows.sources[longest]), ("target", rows.targets[longest])):
        facts[f"{side} tokens"] = len(ids)
        facts[side] = tokenizer.decode(ids, skip_special_tokens=True)
    return Table.of_facts(facts)


def _no_split(prepared: Path, split: str) -> str:
    """The message about a split that a prepared data set lacks."""
    return f"{prepared}: has no split {split!r}; prepare the data set again"


def first_examples(data: Path, split: str = "train", count: int = 5) -> Table:
    """The first examples: question, columns, query, and the answer that the table's rows give."""
    lines = []
    for example in itertools.islice(read_split(data, split), count):
        answer = cells_text(execute(example.query, example.table))
        lines.append({**_question_cells(example), "answer": answer})
    return Table.of(lines)


def _question_cells(example: Example) -> dict[str, str]:
    """The cells of an example by heading: question, columns and query."""
    return {
        "question": example.question,
        "columns": "; ".join(example.table.header),
        "query": example.query_text,
    }


def unknown_text(prepared: Path, data: Path, manifest: Manifest, split: str = "train") -> Table:
    """The text that the tokenizer has no token for, as it appears in sources and targets, and how
    often; varied copies of the questions are not counted.

    Args:
        prepared: folder of the prepared data set.
        data: folder of the raw data set that it was prepared from.
        manifest: that of the prepared data set.
    """
    statistics = manifest.splits[split]
    unknown_tokens = statistics.source.unknown_tokens + statistics.target.unknown_tokens
    # As many examples as were prepared, None for all. Where the set has no unknown token, no
    # example needs to be tokenized again.
    limit = manifest.limit if unknown_tokens else 0
    examples = itertools.islice(read_split(data, split), limit)
    tokenizer = load_tokenizer(str(prepared / "tokenizer"), complete=False)
    number_by_text = Counter[str]()
    while chunk := list(itertools.islice(examples, EXAMPLES_AT_ONCE)):
        texts = []
        for example in chunk:
            texts.append(source_of(example, manifest.prompt))
            texts.append(target_of(example, manifest.prompt))
        number_by_text.update(_parts_without_a_token(tokenizer, texts))
    most_common = number_by_text.most_common(SHOWN_UNKNOWN)
    rows = tuple((text, f"{number:,}") for text, number in most_common)
    return Table(("text", "times"), rows)


def _parts_without_a_token(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> Iterator[str]:
    """Each part of the texts that the tokenizer has no token for."""
    unknown_id = tokenizer.unk_token_id
    encodings = tokenizer.backend_tokenizer.encode_batch(texts)
    for text, encoding in zip(texts, encodings, strict=True):
        # So it is with most texts, whose offsets, which take time to get, are not needed.
        if unknown_id not in encoding.ids:
            continue
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id == unknown_id:
                yield text[start:end].strip()


def shape_table(*names: str) -> Table:
    """Parameters of models by their published shape, and the memory of the weights at each
    precision.

    Args:
        names: known names of models; all T5s if none is given.
    """
    lines = []
    for name in names or known_names("t5"):
        parameters = shape_named(name).parameters
        line = {"model": name, "parameters": f"{parameters:,}"}
        for precision in ("fp32", "bf16"):
            weight_bytes = parameters * ELEMENT_BYTES[precision]
            line[f"{precision} weights (GiB)"] = f"{weight_bytes / GIB:.3f}"
        lines.append(line)
    return Table.of(lines)


def token_lengths(prepared: Path, split: str, column: str) -> np.ndarray:
    """Number of tokens of each row of a prepared split, of shape (rows,); `UserError` where the set
    has no such split.

    Args:
        column: one of `SIDE_COLUMNS`.
    """
    from datasets import load_from_disk

    folder = Path(prepared) / split
    if not folder.is_dir():
        raise UserError(_no_split(prepared, split))
    # From Arrow's offsets, without a look at the tokens themselves.
    arrow_table = load_from_disk(str(folder)).data.table
    return np.diff(arrow_table[column].combine_chunks().offsets.to_numpy())


# SQuAD's questions and a model's answers to them, shown by notebook 11.


def question_table(data: Path, split: str = "train", count: int = 3) -> Table:
    """The first questions of a split: the text that the model reads, and the answer that it should
    continue with."""
    examples = itertools.islice(read_squad(data, split), count)
    return Table.of(
        {
            "prompt": squad_prompt(example.question, example.context),
            "answer": example.answers[0],
        }
        for example in examples
    )


def answered_file(predictions: Path, data: Path, split: str, count: int = 8) -> Table:
    """Question, prediction and expected answer side by side, with exact match and F1.

    Args:
        predictions: a file of predictions, one or more.
        data: the data set whose questions were answered.
        count: number of predictions to show, evenly spaced.
    """
    answers = read_predictions(predictions)
    # Predictions are in the order of the examples: nothing after the last one is needed.
    examples = itertools.islice(read_squad(data, split), answers[-1].index + 1)
    by_index = {example.index: example for example in examples}
    shown = _spread(answers, count)
    answered = [by_index[answer.index] for answer in shown]
    scores = load_metric("squad_accuracy").compute(
        predictions=[answer.text or "" for answer in shown],
        references=[list(example.answers) for example in answered],
        average=False,
    )
    lines = []
    for answer, example, is_exact, f1 in zip(
        shown, answered, scores["exact_match"], scores["f1"], strict=True
    ):
        lines.append(
            {
                "question": example.question,
                "prediction": answer.text or "(nothing)",
                "expected": " | ".join(dict.fromkeys(example.answers)),
                "exact match": "yes" if is_exact else "no",
                "F1": f"{f1:.2f}",
            }
        )
    return Table.of(lines)


# A language model before and after training, shown by notebook 14.


def perplexity_table(before: str | Path, run: Run, prepared: Path) -> Table:
    """Tokens, loss and perplexity of each unseen split that the data have: computed here for the
    model before its run, and read from the scores of the run.

    Args:
        before: the model that the run began with.
        prepared: the data set that the run was trained on.
    """
    from zeropods.evaluate.generate import text_perplexity

    splits = read_manifest(prepared).splits
    lines = []
    for split in reversed(UNSEEN_SPLITS):
        if split not in splits:
            continue
        with progress("perplexity", "blocks") as bar:
            first = text_perplexity(before, prepared, split, progress=bar.update)
        last = read_score(run.folder / f"score.{split}.json")
        # A run on text, which this table is about, has no other scores.
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
    from zeropods.train.saved_models import sample_text

    models = {"before": before, "after": run.folder}
    return Table.of(
        {"": when, "prompt": prompt, "goes on": sample_text(model, prompt).text}
        for when, model in models.items()
    )


# A model's answers beside the expected ones, shown by notebook 05.

ROWS_OF_ANSWER = 2
"""Most rows shown of those that a query finds."""
NO_QUERY = "(no query)"
SIGNIFICANCE_LEVEL = 0.05
"""Probability of a difference at least as large between equally good models, below which it is more
than chance."""


def answer_table(
    predictions: Sequence[Prediction], examples: Sequence[Example], count: int = 8
) -> Table:
    """Question, predicted and expected query, and of each of the two its answer and the rows that
    it finds.

    Args:
        predictions: their `index` names the example that they answer.
        count: number of predictions to show, evenly spaced.
    """
    by_index = {example.index: example for example in examples}
    lines = []
    for prediction in _spread(predictions, count):
        example = by_index[prediction.index]
        with closing(Execution(example.table)) as execution:
            query = prediction.query
            answer = None if query is None else execution.execute(query)
            lines.append(
                {
                    "question": example.question,
                    "prediction": prediction.text or NO_QUERY,
                    "expected": example.query_text,
                    "answer": cells_text(answer),
                    "expected answer": cells_text(execution.execute(example.query)),
                    "rows found": _rows_text(execution, query),
                    "rows expected": _rows_text(execution, example.query),
                }
            )
    return Table.of(lines)


def _rows_text(execution: Execution, query: Query | None) -> str:
    """The first rows that a query finds, a line for each; empty where there is none or no query."""
    rows = None if query is None else execution.matching_rows(query)
    if not rows:
        return ""
    lines = [" | ".join(map(str, row)) for row in rows[:ROWS_OF_ANSWER]]
    number_left_out = len(rows) - ROWS_OF_ANSWER
    if number_left_out > 0:
        lines.append(f"and {number_left_out} more")
    return "\n".join(lines)


def _spread(items: Sequence[Item], count: int) -> Sequence[Item]:
    """At most `count` of the items, evenly spaced."""
    step = max(1, len(items) // count)
    return items[::step][:count]


def compared_answers(runs: Sequence[Path], data: Path, split: str, count: int = 8) -> Table:
    """Some questions that all runs have answered, the expected query, and what the model of each
    run answers, with a column for each run.

    Args:
        count: number of questions to show, evenly spaced.
    """
    # The answers of each run by its label, and in it by the index of their question.
    answers: dict[str, dict[int, str]] = {}
    for run, label in zip(runs, _run_labels(runs), strict=True):
        predictions = read_predictions(run / f"predictions.{split}.jsonl")
        answers[label] = {
            prediction.index: prediction.text or NO_QUERY for prediction in predictions
        }
    answered_by_all = set[int]()
    if answers:
        answered_by_all = set[int].intersection(*map(set, answers.values()))
    chosen = set(_spread(sorted(answered_by_all), count))
    lines = []
    for example in read_split(data, split):
        if example.index in chosen:
            line = {"question": example.question, "expected": example.query_text}
            for label, by_index in answers.items():
                line[label] = by_index[example.index]
            lines.append(line)
    return Table.of(lines)


def paired_table(runs: Sequence[Path], data: Path, split: str) -> Table:
    """Whether the model of each run differs by more than chance from that of the first run, on the
    questions that both have answered.

    Where one model is right on a question and the other is wrong, either is as likely to be the
    right one if they are equally good: this is the exact form of McNemar's test (1947), two-sided.
    With p below 0.05 they differ by more than chance, which happens in one of twenty comparisons of
    equal models.
    """
    # For each run by its label, whether its query is right, by the index of the question.
    right_by_label = {}
    for run, label in zip(runs, _run_labels(runs), strict=True):
        right_by_label[label] = right_queries(run / f"predictions.{split}.jsonl", data, split)
    first = next(iter(right_by_label.values()), {})
    lines = []
    for label, right_by_index in right_by_label.items():
        shared = right_by_index.keys() & first.keys()
        only_here = sum(1 for index in shared if right_by_index[index] and not first[index])
        only_first = sum(1 for index in shared if first[index] and not right_by_index[index])
        probability = _probability_by_chance(only_here, only_first)
        if right_by_index is first:
            verdict = "is the first"
        elif probability < SIGNIFICANCE_LEVEL:
            verdict = "yes"
        else:
            verdict = "no"
        low, high = score_interval(list(right_by_index.values())) or (math.nan, math.nan)
        lines.append(
            {
                "run": label,
                "right (of 1)": f"{mean(right_by_index.values()):.3f} [{low:.3f}, {high:.3f}]",
                "questions": f"{len(shared):,}",
                "right only here": str(only_here),
                "right only in the first": str(only_first),
                "p": f"{probability:.2f}",
                "more than chance": verdict,
            }
        )
    return Table.of(lines)


def _probability_by_chance(only_here: int, only_first: int) -> float:
    """Probability that equally good models differ at least as much: 1 where they do not differ.

    Args:
        only_here: number of questions on which one model alone is right.
        only_first: number of those on which the other one alone is right.
    """
    from scipy.stats import binomtest

    differing = only_here + only_first
    if differing == 0:
        return 1.0
    return binomtest(only_here, differing).pvalue


def _run_labels(runs: Sequence[Path]) -> list[str]:
    """Technique and pods of each run, with its folder where others have the same ones."""
    ways = []
    for run in runs:
        record = read_record(run)
        ways.append(f"{record.technique_text} x{record.pods}")
    labels = []
    for run, way in zip(runs, ways, strict=True):
        if ways.count(way) > 1:
            way = f"{way} {run.parent.name}/{run.name}"
        labels.append(way)
    return labels


def accuracy_table(score: Score, split: str) -> Table:
    """The measures of a score of any task, with their 95 % intervals where they have one.

    Text-to-SQL has a line for all tables, one each for known and unseen ones, and one for each kind
    of query.
    """
    lines = list(score_lines(split, [score]))
    if isinstance(score, QueryScore):
        for kind, score_of_kind in (score.kinds or {}).items():
            # The column of the tables names the kind.
            lines += [replace(line, tables=kind) for line in score_lines(split, [score_of_kind])]
    return table("", accuracy_columns({score.task}, lines), lines, whole=True)
