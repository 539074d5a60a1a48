"""Gradients of a rank in ZeRO's stages 1 and 2: whole tensors, also those of which its share has only a part.

Source: DeepSpeed 0.19.8, stage_1_and_2.py: `get_partition_info` says which tensors a rank's share touches, in each
parameter group of the optimizer; `copy_grads_in_partition` makes a buffer of the sum of their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeropods.plan.parameters import POSITION_BUCKETS, embedding
from zeropods.plan.shapes import T5Shape
from zeropods.plan.term import share


def touched_of(groups: Sequence[Sequence[int]], ranks: int) -> int:
    """Elements of all tensors that the share of a rank touches, of the rank with most of them.

    Args:
        groups: the elements of each tensor by parameter group of the optimizer, in the model's order.
    """
    return max(map(sum, zip(*(_of_group(group, ranks) for group in groups if group), strict=True)))


def parameter_groups(shape: T5Shape, own_rates: bool) -> tuple[list[int], ...]:
    """Elements of each tensor of a T5 by parameter group, in the model's order.

    Args:
        own_rates: parameter groups as `train.rates` makes them: matrices, embedding, position biases, norms. Else as
            Trainer makes them: matrices with the embedding, and what is not decayed.
    """
    projection, feed_forward = shape.d_model * shape.heads * shape.d_kv, shape.d_model * shape.d_ff
    bias, norm = POSITION_BUCKETS * shape.heads, shape.d_model
    matrices, biases, norms, undecayed = [], [], [], []
    for attentions in (1, 2):
        sub_layers = shape.layers * (attentions + 1)
        matrices += shape.layers * (attentions * 4 * [projection] + 2 * [feed_forward])
        biases += [bias]
        norms += (sub_layers + 1) * [norm]
        undecayed += [bias, *(sub_layers + 1) * [norm]]
    if own_rates:
        return matrices, [embedding(shape)], biases, norms
    return [embedding(shape), *matrices], undecayed


def _of_group(sizes: Sequence[int], ranks: int) -> list[int]:
    """By rank; a group is cut into equal shares wherever a tensor ends."""
    part, held, begin = share(sum(sizes), ranks), [0] * ranks, 0
    for size in sizes:
        end = begin + size
        for rank in range(begin // part, min(ranks, share(end, part))):
            held[rank] += size
        begin = end
    return held
