"""Raw data to a tokenized set with its tokenizer and manifest: what every task shares, and WikiSQL's part of it.

`zeropods.data.prepare_causal` holds the sources of the tasks `squad` and `lm`.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeropods import __version__
from zeropods.data.manifest import FILE, SCHEMA_VERSION, Manifest, SplitStatistics, TokenStatistics, read_manifest
from zeropods.data.prompts import MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS, PROMPTS, source_text
from zeropods.data.tokenizers import TINY, Encoder, Ids, fingerprint, load_tokenizer, train_tokenizer
from zeropods.data.wikisql import SPLITS, Example, read_split, split_file
from zeropods.errors import UserError
from zeropods.files import new_folder, sha256, write_json
from zeropods.sql.text import format_query

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int], object]
"""Called with the number of rows, or of documents, done since the last call."""
MOST_TOKENS = 2**31 - 1
"""Rows are found by 32-bit offsets."""
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt")
CHUNK = 8_192


class RawData(Protocol):
    """Raw data of a task, and how they become rows."""

    splits: list[str]
    hashes: dict[str, str]
    """SHA-256 by file, or a revision at the hub."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that was asked for: loaded, or trained on the train split."""

    def build(
        self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ) -> tuple[Dataset, SplitStatistics]:
        """The rows of a split and their statistics."""

    def described(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The fields of the manifest that are the task's own."""


class Asked(Protocol):
    """What is asked of a preparation."""

    @property
    def tokenizer(self) -> str:
        """A hub id, a folder, a file, or the name of one that is trained on the data."""

    @property
    def limit(self) -> int | None:
        """Number of examples, or documents, of each split; None for all."""

    def settings(self) -> dict[str, Any]:
        """What decides the result besides the raw data, the tokenizer and the versions."""

    def open(self) -> RawData:
        """The raw data; `UserError` where they are not there."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is asked of `prepare` for text-to-SQL."""

    data: Path
    tokenizer: str
    prompt: str = "schema"
    limit: int | None = None
    """Number of examples of each split, the first ones; None for all."""
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

    def settings(self) -> dict[str, Any]:
        """Prompt, limits and vocabulary."""
        return {
            "prompt": self.prompt,
            "limit": self.limit,
            "complete_vocabulary": self.complete_vocabulary,
            "max_tokens": [self.source_limit, self.max_target_tokens],
        }

    def open(self) -> WikiSQLData:
        """The splits of the folder; train must be there, the others may be."""
        return WikiSQLData(self)

    def rows(self) -> int:
        """Number of examples that are asked for, of all splits together."""
        counts = []
        for split in _splits(self.data):
            with open(split_file(self.data, split, "jsonl"), "rb") as lines:
                counts.append(sum(1 for _ in itertools.islice(lines, self.limit)))
        return sum(counts)


def prepare(wanted: Asked, out: Path, progress: Progress = lambda rows: None) -> tuple[Manifest, bool]:
    """Make the tokenized set at `out`; returns its manifest, and False if it was there already.

    Every split is a folder of the columns `input_ids` and `labels`: lists of int32, without padding.
    """
    raw, out = wanted.open(), Path(out)
    key = content_key(wanted, raw.hashes)
    if (out / FILE).is_file():
        current = read_manifest(out)
        if current.content_key == key:
            return current, False
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: holds something that is no prepared data set; choose another --out")
    with _without_collector(), new_folder(out) as folder:
        return _build(wanted, raw, key, folder, progress), True


def content_key(wanted: Asked, hashes: dict[str, str]) -> str:
    """SHA-256 over what decides the result: sources, settings, tokenizer, versions of what tokenizes."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "sources": hashes,
        "tokenizer": _tokenizer_identity(wanted.tokenizer),
        "versions": _versions(),
        **wanted.settings(),
    }
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
    """(rows,) number of marked tokens of each row; `tokens` holds the rows one behind the other."""
    sums = np.concatenate(([0], np.cumsum(tokens, dtype=np.int64)))
    ends = np.cumsum(lengths)
    return sums[ends] - sums[ends - lengths]


def folded(text: str) -> str:
    """The text with compatible characters and runs of spaces made one, as it is compared after decoding."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def source_of(example: Example, prompt: str) -> str:
    """What the model reads of an example."""
    return source_text(prompt, example.question, example.table.header, example.table.types)


def target_of(example: Example) -> str:
    """What the model shall write."""
    return format_query(example.query, example.table.header)


class WikiSQLData:
    """The questions of a folder in WikiSQL's layout, each with its query as the target."""

    def __init__(self, wanted: Preparation) -> None:
        split_file(wanted.data, "train", "jsonl")
        self._wanted = wanted
        self.splits = _splits(wanted.data)
        files = [split_file(wanted.data, split, kind) for split in self.splits for kind in ("jsonl", "tables.jsonl")]
        self.hashes = {path.name: sha256(path) for path in files}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """T5's, completed by what it lacks, or a tiny one that is trained on sources and targets."""
        wanted = self._wanted
        if wanted.tokenizer != TINY:
            return load_tokenizer(wanted.tokenizer, complete=wanted.complete_vocabulary)
        examples = self._examples("train")
        return train_tokenizer(text for e in examples for text in (source_of(e, wanted.prompt), target_of(e)))

    def build(
        self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ) -> tuple[Dataset, SplitStatistics]:
        """Sources as `input_ids` and targets as `labels`; what is too long is cut, its end token kept."""
        prompt, lost = self._wanted.prompt, 0
        encode, backend = Encoder(tokenizer), tokenizer.backend_tokenizer
        sources, targets, examples = list[Ids](), list[Ids](), self._examples(split)
        while chunk := list(itertools.islice(examples, CHUNK)):
            texts = [target_of(example) for example in chunk]
            ids = encode(texts)
            sources += encode([source_of(example, prompt) for example in chunk])
            targets += ids
            decoded = backend.decode_batch(ids, skip_special_tokens=True)
            lost += sum(folded(a) != folded(b) for a, b in zip(texts, decoded, strict=True))
            progress(len(chunk))
        read = _side(sources, self._wanted.source_limit, tokenizer)
        written = _side(targets, self._wanted.max_target_tokens, tokenizer)
        statistics = SplitStatistics(rows=len(sources), source=read[1], target=written[1], targets_lost=lost)
        return dataset_of(input_ids=read[0], labels=written[0]), statistics

    def described(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The prompt and the limits of both sides."""
        return {
            "task": "text2sql",
            "prompt": self._wanted.prompt,
            "max_source_tokens": self._wanted.source_limit,
            "max_target_tokens": self._wanted.max_target_tokens,
        }

    def _examples(self, split: str) -> Iterator[Example]:
        return itertools.islice(read_split(self._wanted.data, split), self._wanted.limit)


def _build(wanted: Asked, raw: RawData, key: str, folder: Path, progress: Progress) -> Manifest:
    """Write the splits, the tokenizer and, last, the manifest."""
    from datasets import DatasetDict

    tokenizer = raw.tokenizer()
    built = {split: raw.build(split, tokenizer, progress) for split in raw.splits}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        content_key=key,
        tokenizer=wanted.tokenizer,
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocabulary_size=len(tokenizer),
        limit=wanted.limit,
        source_sha256=raw.hashes,
        splits={split: statistics for split, (_, statistics) in built.items()},
        versions=_versions(),
        **raw.described(tokenizer),
    )
    with _without_bars():
        DatasetDict({split: rows for split, (rows, _) in built.items()}).save_to_disk(folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_json(folder / FILE, manifest.to_json())
    return manifest


def _side(
    rows: list[Ids], limit: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[NDArray[np.int64], Ids], TokenStatistics]:
    """One side of a split, cut at `limit` tokens, the end token last: (rows,) lengths, (tokens,) ids; statistics."""
    truncated = sum(len(row) > limit for row in rows)
    end = np.int32(tokenizer.eos_token_id)
    cut = [row if len(row) <= limit else np.append(row[: limit - 1], end) for row in rows]
    lengths, ids = np.array([len(row) for row in cut]), np.concatenate(cut)
    unknowns = count_by_row(ids == tokenizer.unk_token_id, lengths)
    return (lengths, ids), token_statistics(lengths, truncated, unknowns)


def _splits(data: Path) -> list[str]:
    return [split for split in SPLITS if (Path(data) / f"{split}.jsonl").is_file()]


def _tokenizer_identity(source: str) -> str:
    """What tells two tokenizers apart without loading them: their files' content, or a name."""
    path = Path(source)
    if path.is_file():
        return sha256(path)
    files = sorted(f for f in path.glob("*") if f.name in TOKENIZER_FILES)
    return " ".join(sha256(file) for file in files) or source


def _versions() -> dict[str, str]:
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
