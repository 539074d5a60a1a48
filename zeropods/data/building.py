"""What every prepared set has in common: made once, whole, with its tokenizer and manifest."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zeropods import __version__, atomic
from zeropods.data import manifest as manifests
from zeropods.data.checksum import sha256
from zeropods.data.manifest import Manifest, TokenStatistics
from zeropods.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

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
