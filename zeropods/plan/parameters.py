"""How many parameters a shape has, by arithmetic."""

from __future__ import annotations

from zeropods.plan.shapes import T5Shape

POSITION_BUCKETS = 32
"""Relative positions of T5, one bias a head for each; the first layer of encoder and decoder holds them."""
BYTES = {"fp32": 4, "bf16": 2}


def t5_parameters(shape: T5Shape) -> int:
    """Parameters of a T5 whose input, output and decoder embeddings are one matrix."""
    attention = 4 * shape.d_model * shape.heads * shape.d_kv
    feed_forward = 2 * shape.d_model * shape.d_ff
    encoder_layer = attention + feed_forward + 2 * shape.d_model
    decoder_layer = 2 * attention + feed_forward + 3 * shape.d_model
    ends = 2 * (shape.d_model + POSITION_BUCKETS * shape.heads)
    return shape.vocabulary * shape.d_model + shape.layers * (encoder_layer + decoder_layer) + ends
