"""The order of training rows: batches of like length, the same on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

POOL = 64
"""Effective batches that are sorted together: enough for little padding, few enough for chance."""


class LengthGroupedSampler(Sampler[int]):
    """Row indices whose consecutive runs of `effective_batch_size` are the optimizer steps' rows.

    The order depends on seed, epoch and effective batch size alone. transformers' own sampler groups
    by the batch of one device, so that its order changes with the number of pods. The last batch is
    filled up from the beginning of the order: every step has its full number of rows.
    """

    def __init__(self, lengths: np.ndarray, effective_batch_size: int, seed: int) -> None:
        """`lengths`: (rows, 2) source and target tokens."""
        self.lengths = lengths
        self.effective_batch_size = effective_batch_size
        self.seed = seed
        self.epoch = 0

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
        shuffled = np.resize(generator.permutation(len(self.lengths)), len(self))
        batches = np.concatenate([self._grouped(pool) for pool in self._pools(shuffled)])
        return batches[generator.permutation(len(batches))]

    def _pools(self, shuffled: np.ndarray) -> list[np.ndarray]:
        size = POOL * self.effective_batch_size
        return [shuffled[start : start + size] for start in range(0, len(shuffled), size)]

    def _grouped(self, pool: np.ndarray) -> np.ndarray:
        source, target = self.lengths[pool].T
        return pool[np.lexsort((target, source))].reshape(-1, self.effective_batch_size)
