"""Tables and plots of data sets that notebooks show: raw, as tokens, and models by size."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np

from zeropods.data.manifest import Manifest, TokenStatistics
from zeropods.data.tokenizers import load_tokenizer
from zeropods.data.wikisql import Example, read_split, source_of, target_of
from zeropods.errors import UserError
from zeropods.plan.facts import shape_named
from zeropods.plan.models import known_names
from zeropods.plan.workload import ELEMENT_BYTES
from zeropods.report.plots import Plot, new_axes
from zeropods.sql.query import cells_text, execute
from zeropods.tables import GIB, Table

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
    return Plot(figure, f"histograms of source and target tokens of {split}")


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


def _described(example: Example) -> dict[str, str]:
    return {
        "question": example.question,
        "columns": "; ".join(example.table.header),
        "query": target_of(example),
    }
