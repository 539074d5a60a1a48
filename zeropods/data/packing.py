"""Documents as one row of tokens, cut into blocks without padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


def join(documents: Sequence[Ids], end: int) -> Ids:
    """(tokens,) all documents in their order, the end token between two of them."""
    if not documents:
        return np.empty(0, np.int32)
    starts = np.cumsum([0] + [len(document) + 1 for document in documents])
    joined = np.full(starts[-1] - 1, end, np.int32)
    between = np.zeros(len(joined), bool)
    between[starts[1:-1] - 1] = True
    joined[~between] = np.concatenate(documents)
    return joined


def pack(tokens: Ids, length: int) -> tuple[Ids, int]:
    """Blocks of exactly `length` tokens, none padded.

    Returns:
        (blocks, length) the tokens in their order, and how many are left over: fewer than `length`.
    """
    blocks, leftover = divmod(len(tokens), length)
    return tokens[: blocks * length].reshape(blocks, length), leftover


def unpack(blocks: Ids) -> Ids:
    """(tokens,) the tokens that were packed, without the leftover."""
    return blocks.reshape(-1)


def overlap(tokens: Ids, length: int) -> tuple[NDArray[np.int64], Ids]:
    """Blocks for evaluation: each starts with the last token of the one before, the last may be short.

    Since nothing predicts the first token of a block, every token but the very first is predicted once.

    Returns:
        (blocks,) tokens of each block, 2 to `length`, and (sum of them,) the blocks one behind the other.
    """
    predicted = len(tokens) - 1
    if predicted < 1:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    blocks = -(-predicted // (length - 1))
    positions = np.arange(blocks)[:, None] * (length - 1) + np.arange(length)
    within = positions < len(tokens)
    return within.sum(axis=1), tokens[positions[within]]
