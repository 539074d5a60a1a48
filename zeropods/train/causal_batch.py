"""Batches for a causal model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from zeropods.train.dataset import Row, padded


def collate_causal(rows: list[Row], pad: int) -> dict[str, Tensor]:
    """Pad rows of (token ids, labels) on the right, to the longest of the batch.

    Returns:
        input_ids: (rows, tokens) int64.
        attention_mask: the same shape, 1 for a token and 0 for a pad; left out where no row is padded.
        labels: the same shape, not shifted; -100 where there is no loss, and at first tokens, which nothing predicts.
        label_positions: (n,) int64, flat positions p of the tokens that predict a label: the one at p + 1.
    """
    ids, is_token = padded([row[0] for row in rows], pad)
    labels, _ = padded([row[1] for row in rows], -100)
    labels[:, 0] = -100
    batch = {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "label_positions": torch.from_numpy(np.flatnonzero(labels.ravel()[1:] != -100)),
    }
    if not is_token.all():
        batch["attention_mask"] = torch.from_numpy(is_token.astype(np.int64))
    return batch
