"""A prepared split in memory, and batches of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zeropods.data.manifest import Manifest, read_manifest
from zeropods.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Row = tuple[np.ndarray, np.ndarray]


class TokenizedSplit(Dataset[Row]):
    """Rows of (source ids, target ids), each int32 of its own length, without padding."""

    def __init__(self, sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
        self.sources = sources
        self.targets = targets

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Row:
        return self.sources[index], self.targets[index]

    def first(self, count: int | None) -> TokenizedSplit:
        """The first rows; all of them for None."""
        return TokenizedSplit(self.sources[:count], self.targets[:count])

    def lengths(self) -> np.ndarray:
        """(rows, 2): source and target tokens of every row."""
        pairs = zip(self.sources, self.targets, strict=True)
        return np.array([(len(s), len(t)) for s, t in pairs], dtype=np.int64).reshape(-1, 2)


def load_split(folder: Path, split: str) -> TokenizedSplit | None:
    """A split of a prepared set; None if the set has none of that name."""
    if not (folder / split).is_dir():
        return None
    try:
        table = _arrow_table(folder / split)
        return TokenizedSplit(_rows(table, "input_ids"), _rows(table, "labels"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / split}: cannot be read ({error}); prepare the data set again") from None


def load_prepared(folder: Path) -> tuple[Manifest, TokenizedSplit, TokenizedSplit | None]:
    """Manifest, train split and, where there is one, dev split."""
    manifest = read_manifest(folder)
    train = load_split(folder, "train")
    if train is None:
        raise UserError(f"{folder}: has no train split; prepare the data set again")
    return manifest, train, load_split(folder, "dev")


def collate(rows: list[Row], pad: int = 0, multiple: int = 1) -> dict[str, Tensor]:
    """Pad rows to the longest of the batch, or to the next multiple of a length.

    Returns:
        input_ids, attention_mask: (rows, source tokens) int64.
        labels: (rows, target tokens) int64, -100 where there is no label.
        label_positions: (n,) int64, flat positions of the labels.
    """
    sources, mask = padded([row[0] for row in rows], pad, multiple)
    labels, labelled = padded([row[1] for row in rows], -100, multiple)
    return {
        "input_ids": torch.from_numpy(sources),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "labels": torch.from_numpy(labels),
        "label_positions": torch.from_numpy(np.flatnonzero(labelled)),
    }


def padded(rows: list[np.ndarray], fill: int, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(rows, longest up to a multiple) int64, filled up on the right, and which of its places a row has."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(-(-lengths.max() // multiple) * multiple)[None, :] < lengths[:, None]
    filled = np.full(mask.shape, fill, dtype=np.int64)
    filled[mask] = np.concatenate(rows)
    return filled, mask


def _arrow_table(folder: Path) -> pyarrow.Table:
    """What `Dataset.save_to_disk` wrote, without `datasets`: Arrow streams that state.json names in their order."""
    import pyarrow

    files = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
    tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / each["filename"]))).read_all() for each in files]
    return pyarrow.concat_tables(tables)


def _rows(table: pyarrow.Table, column: str) -> list[np.ndarray]:
    array = table[column].combine_chunks()
    values = array.values.to_numpy().astype(np.int32, copy=False)
    return np.split(values, array.offsets.to_numpy()[1:-1]) if len(array) else []
