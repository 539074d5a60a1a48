"""Which rows each rank evaluates."""

from __future__ import annotations

import math

from zeropods.train.dataset import TokenizedSplit


def evaluation_batches(rows: TokenizedSplit, size: int, rank: int, ranks: int) -> list[tuple[list[int], int]]:
    """A rank's batches of row indices, with weight 1; a rank with one batch fewer repeats one with weight 0.

    Every rank makes the same number of forward passes: under ZeRO-3 each one is collective.
    """
    order = sorted(range(len(rows)), key=lambda i: (len(rows.sources[i]), len(rows.targets[i])))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    mine = [(batch, 1) for batch in batches[rank::ranks]]
    return mine + [(batches[0], 0)] * (math.ceil(len(batches) / ranks) - len(mine))
