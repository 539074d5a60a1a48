"""A prepared set in memory, the order of its rows, and batches of them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from zeropods.data.manifest import Manifest, read_manifest
from zeropods.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The order of training rows: batches of similar length, the same on any number of processes.

POOL = 64
"""Number of effective batches sorted together by source: enough for little padding, few enough to stay random."""
LIKE = 8
"""Number of effective batches of similar sources, sorted by target: 9 % of WikiSQL targets stay padding, not 26 %."""


@dataclass(eq=False)
class LengthGroupedSampler(Sampler[int]):
    """Row indices whose consecutive runs of `effective_batch_size` are the optimizer steps' rows.

    The order depends on seed, epoch and effective batch size alone. transformers' own sampler groups
    by the batch of one device, so that its order changes with the number of pods. The last batch is
    filled up from the beginning of the order: every step has its full number of rows.
    """

    lengths: np.ndarray
    """(rows, 2) numbers of source and target tokens."""
    effective_batch_size: int
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.effective_batch_size) * self.effective_batch_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().ravel().tolist())

    def order(self) -> np.ndarray:
        """(steps, effective batch size) row indices of the epoch."""
        generator = np.random.default_rng((self.seed, self.epoch))
        rows = np.resize(generator.permutation(len(self.lengths)), len(self))
        # Sources (0) of many batches are sorted together, then targets (1) of fewer.
        for side, batches in enumerate((POOL, LIKE)):
            size = batches * self.effective_batch_size
            runs = [rows[start : start + size] for start in range(0, len(rows), size)]
            rows = np.concatenate([run[np.argsort(self.lengths[run, side], kind="stable")] for run in runs])
        grouped = rows.reshape(-1, self.effective_batch_size)
        return grouped[generator.permutation(len(grouped))]


# A prepared set in memory, and batches of it.

Row = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class TokenizedSplit(Dataset[Row]):
    """Rows of (source ids, target ids), each int32 of its own length, without padding."""

    sources: list[np.ndarray]
    targets: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Row:
        return self.sources[index], self.targets[index]

    def first(self, count: int | None) -> TokenizedSplit:
        """The first `count` rows; all of them for None."""
        return TokenizedSplit(self.sources[:count], self.targets[:count])

    def lengths(self) -> np.ndarray:
        """(rows, 2): numbers of source and target tokens of every row."""
        pairs = zip(self.sources, self.targets, strict=True)
        return np.array([(len(s), len(t)) for s, t in pairs], dtype=np.int64).reshape(-1, 2)


def load_split(folder: Path, split: str) -> TokenizedSplit | None:
    """A split of a prepared set; None if the set has no split of that name."""
    import pyarrow

    place = folder / split
    if not place.is_dir():
        return None
    columns = []
    try:
        # Read without `datasets` what `Dataset.save_to_disk` wrote: Arrow streams, named in order by state.json.
        files = json.loads((place / "state.json").read_text(encoding="utf-8"))["_data_files"]
        streams = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(place / each["filename"]))) for each in files]
        table = pyarrow.concat_tables([stream.read_all() for stream in streams])
        for column in ("input_ids", "labels"):
            array = table[column].combine_chunks()
            # pyarrow's own `to_numpy` imports pandas.
            values = np.from_dlpack(array.values).astype(np.int32, copy=False)
            offsets = np.from_dlpack(array.offsets).tolist()
            columns.append([values[start:end] for start, end in itertools.pairwise(offsets)])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place}: cannot be read ({error}); prepare the data set again") from None
    return TokenizedSplit(*columns)


@dataclass(frozen=True)
class Prepared:
    """A run's data: rows of the train split, and of the dev split where there is one."""

    folder: Path
    manifest: Manifest
    train: TokenizedSplit
    dev: TokenizedSplit | None

    @classmethod
    def read(cls, folder: Path) -> Prepared:
        """The data of a prepared set."""
        manifest, train = read_manifest(folder), load_split(folder, "train")
        if train is None:
            raise UserError(f"{folder}: has no train split; prepare the data set again")
        return cls(folder, manifest, train, load_split(folder, "dev"))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the set was prepared with."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder / "tokenizer")
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder}/tokenizer: {error}; prepare the set again") from error


def collate(rows: list[Row], multiple: int = 1) -> dict[str, Tensor]:
    """Pad rows to the longest of the batch, rounded up to a multiple of `multiple`.

    Returns:
        input_ids, attention_mask: (rows, source tokens) int64.
        labels: (rows, target tokens) int64, -100 where there is no label.
        label_positions: (n,) int64, flat positions of the labels.
    """
    sources, mask = padded([row[0] for row in rows], 0, multiple)
    labels, labelled = padded([row[1] for row in rows], -100, multiple)
    return {
        "input_ids": torch.from_numpy(sources),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "labels": torch.from_numpy(labels),
        "label_positions": torch.from_numpy(np.flatnonzero(labelled)),
    }


def padded(rows: list[np.ndarray], fill: int, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(rows, longest rounded up to a multiple) int64, filled up on the right, and a mask, True for rows' own values."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(-(-lengths.max() // multiple) * multiple)[None, :] < lengths[:, None]
    filled = np.full(mask.shape, fill, dtype=np.int64)
    filled[mask] = np.concatenate(rows)
    return filled, mask


# Which rows each rank evaluates.


def evaluation_batches(rows: TokenizedSplit, size: int, rank: int, ranks: int) -> list[tuple[list[int], int]]:
    """A rank's batches of row indices, with weight 1; a rank with one batch fewer repeats one with weight 0.

    Every rank makes the same number of forward passes: under ZeRO-3 each one is collective.
    """
    order = sorted(range(len(rows)), key=lambda i: (len(rows.sources[i]), len(rows.targets[i])))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    mine = [(batch, 1) for batch in batches[rank::ranks]]
    return mine + [(batches[0], 0)] * (math.ceil(len(batches) / ranks) - len(mine))
