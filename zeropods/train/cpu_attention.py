"""T5's attention on a CPU.

PyTorch has no kernel there for a bias that is trained: it widens BF16 to FP32, wants a whole bias for each row, and
draws its dropout with one thread. Two products, a softmax and our dropout take half the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from zeropods.train.dropout import dropped

NAME = "zeropods_cpu"


def use_cheap_attention(model: PreTrainedModel) -> None:
    """Let all layers of a T5 attend by this module."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a T5's layer asks of an attention: queries are not scaled, a learned bias is added.

    Args:
        query: (rows, heads, queries, width); `key` and `value` of as many keys.
        attention_mask: added to the scores, (rows or 1, 1, queries, keys).
        position_bias: (1, heads, queries, keys).

    Returns:
        (rows, queries, heads, width).
    """
    scores = torch.matmul(query, key.transpose(2, 3))
    for added in (position_bias, attention_mask):
        if added is not None:
            scores = scores.add_(added[..., : key.shape[2]])
    weights = dropped(torch.softmax(scores, dim=-1), dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None
