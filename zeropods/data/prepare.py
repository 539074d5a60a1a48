"""Raw WikiSQL to a tokenized set with its tokenizer and manifest."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zeropods import __version__
from zeropods import files as atomic
from zeropods.data import manifest as manifests
from zeropods.data.manifest import Manifest, SplitStatistics, TokenStatistics
from zeropods.data.prompts import MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS, PROMPTS, source_text
from zeropods.data.tokenizers import TINY, Encoder, Ids, fingerprint, load_tokenizer, train_tokenizer
from zeropods.data.wikisql import SPLITS, Example, read_split, split_file
from zeropods.errors import UserError
from zeropods.files import sha256
from zeropods.sql.text import format_query

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


# What every prepared set has in common: made once, whole, with its tokenizer and manifest.

Progress = Callable[[int], object]
"""Called with the number of rows, or of documents, done since the last call."""
MOST_TOKENS = 2**31 - 1
"""Rows are found by 32-bit offsets."""
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt")


def build_once(out: Path, key: str, build: Callable[[Path], Manifest]) -> tuple[Manifest, bool]:
    """Make the set at `out` unless one with the same content key is there; True if it was made.

    Args:
        build: fills an empty folder and returns the manifest that it wrote there.
    """
    if (out / manifests.FILE).is_file():
        current = manifests.read_manifest(out)
        if current.content_key == key:
            return current, False
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: holds something that is no prepared data set; choose another --out")
    with _without_collector(), atomic.new_folder(out) as folder:
        return build(folder), True


def save_set(
    folder: Path, splits: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase, manifest: Manifest
) -> None:
    """Write the splits, the tokenizer and, last, the manifest."""
    from datasets import DatasetDict

    with _without_bars():
        DatasetDict(splits).save_to_disk(folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    atomic.write_json(folder / manifests.FILE, manifest.to_json())


def key_of(document: dict[str, Any]) -> str:
    """SHA-256 over what decides the result."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def dataset_of(**columns: tuple[NDArray[np.integer], NDArray[np.int32]]) -> Dataset:
    """Columns of lists of int32, each given as (rows,) lengths and (all tokens,) values."""
    import pyarrow
    from datasets import Dataset

    def lists(lengths: NDArray[np.integer], values: NDArray[np.int32]) -> pyarrow.ListArray:
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        if offsets[-1] > MOST_TOKENS:
            raise UserError(f"{offsets[-1]:,} tokens; a split holds at most {MOST_TOKENS:,}: prepare less with --limit")
        return pyarrow.ListArray.from_arrays(offsets.astype(np.int32), values)

    return Dataset(pyarrow.table({name: lists(*column) for name, column in columns.items()}))


def token_statistics(lengths: Sequence[int] | NDArray[np.integer], truncated: int, unknowns: Any) -> TokenStatistics:
    """Lengths of a side of a split.

    Args:
        lengths: (rows,) tokens of each row.
        unknowns: (rows,) unknown tokens of each row.
    """
    lengths, unknowns = np.asarray(lengths), np.asarray(unknowns)
    return TokenStatistics(
        total=int(lengths.sum()),
        mean=round(float(lengths.mean()), 3),
        p50=int(np.percentile(lengths, 50)),
        p99=int(np.percentile(lengths, 99)),
        max=int(lengths.max()),
        truncated_rows=truncated,
        unknown_tokens=int(unknowns.sum()),
        rows_with_unknown=int(np.count_nonzero(unknowns)),
    )


def count_by_row(tokens: NDArray[np.bool_], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """(rows,) how many tokens of each row are marked; `tokens` holds the rows one behind the other."""
    sums = np.concatenate(([0], np.cumsum(tokens, dtype=np.int64)))
    ends = np.cumsum(lengths)
    return sums[ends] - sums[ends - lengths]


def tokenizer_identity(source: str) -> str:
    """What tells two tokenizers apart without loading them: their files' content, or a name."""
    path = Path(source)
    if path.is_file():
        return sha256(path)
    files = sorted(f for f in path.glob("*") if f.name in TOKENIZER_FILES)
    return " ".join(sha256(file) for file in files) or source


def versions() -> dict[str, str]:
    """Versions of what tokenizes and stores; our own is this code's, installed or not."""
    return {"zeropods": __version__, **{name: version(name) for name in ("tokenizers", "sentencepiece", "datasets")}}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of rows and none in a cycle: looking for cycles takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Our own progress is shown; a second bar for each split is none."""
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()


# Examples -> token ids without padding, and what was lost on the way.

CHUNK = 8_192


def tokenize(
    examples: Iterator[Example],
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    limits: tuple[int, int],
    progress: Progress,
) -> tuple[Dataset, SplitStatistics]:
    """Rows of `input_ids` and `labels`, and their statistics.

    Args:
        limits: the most source and target tokens of a row, the end token included.
    """
    sources, targets, lost = _Side(limits[0]), _Side(limits[1]), 0
    encode, backend = Encoder(tokenizer), tokenizer.backend_tokenizer
    while chunk := list(itertools.islice(examples, CHUNK)):
        texts = [target_of(e) for e in chunk]
        ids = encode(texts)
        sources.extend(encode([source_of(e, prompt) for e in chunk]))
        targets.extend(ids)
        decoded = backend.decode_batch(ids, skip_special_tokens=True)
        lost += sum(_folded(a) != _folded(b) for a, b in zip(texts, decoded, strict=True))
        progress(len(chunk))
    end, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id
    statistics = SplitStatistics(
        rows=len(sources.rows),
        source=sources.finish(end, unknown),
        target=targets.finish(end, unknown),
        targets_lost=lost,
    )
    return dataset_of(input_ids=sources.flat(), labels=targets.flat()), statistics


def source_of(example: Example, prompt: str) -> str:
    """What the model reads of an example."""
    return source_text(prompt, example.question, example.table.header, example.table.types)


def target_of(example: Example) -> str:
    """What the model shall write."""
    return format_query(example.query, example.table.header)


class _Side:
    """The token ids of one side of a split, cut at `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: list[Ids] = []

    def extend(self, rows: list[Ids]) -> None:
        self.rows += rows

    def finish(self, end: int, unknown: int) -> TokenStatistics:
        """Cut what is too long, keeping the end token last, and count."""
        truncated = 0
        for number, row in enumerate(self.rows):
            if len(row) > self.limit:
                self.rows[number] = np.append(row[: self.limit - 1], np.int32(end))
                truncated += 1
        unknowns = [np.count_nonzero(row == unknown) for row in self.rows]
        return token_statistics([len(row) for row in self.rows], truncated, unknowns)

    def flat(self) -> tuple[NDArray[np.int64], Ids]:
        """Tokens of each row, and all ids, one row behind the other."""
        return np.array([len(row) for row in self.rows]), np.concatenate(self.rows)


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


# Raw WikiSQL -> a tokenized set with its tokenizer and manifest.


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is asked of `prepare`."""

    data: Path
    tokenizer: str
    prompt: str = "schema"
    limit: int | None = None
    """Only the first N examples of each split."""
    complete_vocabulary: bool = True
    """Add the characters that T5's vocabulary lacks; False is the original recipe."""
    max_source_tokens: int | None = None
    max_target_tokens: int = MAX_TARGET_TOKENS

    def __post_init__(self) -> None:
        if self.prompt not in PROMPTS:
            raise UserError(f"prompt {self.prompt!r}; expected {' or '.join(PROMPTS)}")
        for name in ("limit", "max_source_tokens", "max_target_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value}; expected at least 1")

    @property
    def source_limit(self) -> int:
        """The most tokens of a source, the end token included."""
        return self.max_source_tokens or MAX_SOURCE_TOKENS[self.prompt]

    def rows(self) -> int:
        """How many examples are asked for, of all splits."""
        counts = []
        for split in _splits(self.data):
            with open(split_file(self.data, split, "jsonl"), "rb") as lines:
                counts.append(sum(1 for _ in itertools.islice(lines, self.limit)))
        return sum(counts)


def prepare(wanted: Preparation, out: Path, progress: Progress = lambda rows: None) -> tuple[Manifest, bool]:
    """Make the tokenized set at `out`; returns its manifest, and False if it was there already.

    `progress` is called with the number of rows done since the last call.
    """
    sources = source_hashes(wanted.data)
    key = content_key(wanted, sources)
    return build_once(Path(out), key, lambda folder: _build(wanted, sources, key, folder, progress))


def source_hashes(data: Path) -> dict[str, str]:
    """SHA-256 of every file of the raw set; the train split must be there, the others may be."""
    split_file(data, "train", "jsonl")
    files = [split_file(data, split, suffix) for split in _splits(data) for suffix in ("jsonl", "tables.jsonl")]
    return {path.name: sha256(path) for path in files}


def content_key(wanted: Preparation, sources: dict[str, str]) -> str:
    """SHA-256 over what decides the result: sources, settings, tokenizer, versions of what tokenizes."""
    document = {
        "schema_version": manifests.SCHEMA_VERSION,
        "sources": sources,
        "tokenizer": tokenizer_identity(wanted.tokenizer),
        "prompt": wanted.prompt,
        "limit": wanted.limit,
        "complete_vocabulary": wanted.complete_vocabulary,
        "max_tokens": [wanted.source_limit, wanted.max_target_tokens],
        "versions": versions(),
    }
    return key_of(document)


def _build(wanted: Preparation, sources: dict[str, str], key: str, folder: Path, progress: Progress) -> Manifest:
    tokenizer = _tokenizer(wanted)
    limits = (wanted.source_limit, wanted.max_target_tokens)
    built = {
        split: tokenize(_examples(wanted, split), wanted.prompt, tokenizer, limits, progress)
        for split in _splits(wanted.data)
    }
    manifest = Manifest(
        schema_version=manifests.SCHEMA_VERSION,
        content_key=key,
        task="text2sql",
        prompt=wanted.prompt,
        tokenizer=wanted.tokenizer,
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocabulary_size=len(tokenizer),
        max_source_tokens=wanted.source_limit,
        max_target_tokens=wanted.max_target_tokens,
        limit=wanted.limit,
        source_sha256=sources,
        splits={split: statistics for split, (_, statistics) in built.items()},
        versions=versions(),
    )
    save_set(folder, {split: rows for split, (rows, _) in built.items()}, tokenizer, manifest)
    return manifest


def _tokenizer(wanted: Preparation) -> PreTrainedTokenizerBase:
    if wanted.tokenizer != TINY:
        return load_tokenizer(wanted.tokenizer, complete=wanted.complete_vocabulary)
    examples = _examples(wanted, "train")
    return train_tokenizer(text for e in examples for text in (source_of(e, wanted.prompt), target_of(e)))


def _examples(wanted: Preparation, split: str) -> Iterator[Example]:
    return itertools.islice(read_split(wanted.data, split), wanted.limit)


def _splits(data: Path) -> list[str]:
    return [split for split in SPLITS if (Path(data) / f"{split}.jsonl").is_file()]
