"""How many parameters a shape has, by arithmetic."""

from __future__ import annotations

from zeropods.plan.shapes import T5Shape

POSITION_BUCKETS = 32
"""Relative positions of T5, one bias a head for each; the first layer of encoder and decoder holds them."""
BYTES = {"fp32": 4, "bf16": 2}


def t5_parameters(shape: T5Shape) -> int:
    """Parameters of a T5 whose input, output and decoder embeddings are one matrix."""
    return embedding(shape) + encoder_parameters(shape) + decoder_parameters(shape)


def embedding(shape: T5Shape) -> int:
    """The matrix that encoder, decoder and head share."""
    return shape.vocabulary * shape.d_model


def encoder_parameters(shape: T5Shape) -> int:
    """Of the encoder without its embedding: layers, position biases, last norm."""
    layer = _attention(shape) + _feed_forward(shape) + 2 * shape.d_model
    return shape.layers * layer + _ends(shape)


def decoder_parameters(shape: T5Shape) -> int:
    """Of the decoder without its embedding: each layer also attends to the encoder's output."""
    layer = 2 * _attention(shape) + _feed_forward(shape) + 3 * shape.d_model
    return shape.layers * layer + _ends(shape)


def largest_tensor(shape: T5Shape) -> int:
    """Elements of the largest single parameter."""
    return shape.d_model * max(shape.vocabulary, shape.d_ff, shape.heads * shape.d_kv)


def in_small_tensors(shape: T5Shape, threshold: int) -> int:
    """Parameters in tensors of at most `threshold` elements."""
    projection, feed_forward = shape.d_model * shape.heads * shape.d_kv, shape.d_model * shape.d_ff
    tensors = (
        (1, embedding(shape)),
        (12 * shape.layers, projection),
        (4 * shape.layers, feed_forward),
        (5 * shape.layers + 2, shape.d_model),
        (2, POSITION_BUCKETS * shape.heads),
    )
    return sum(count * size for count, size in tensors if size <= threshold)


def weight_tensors(shape: T5Shape) -> int:
    """Matrices that a forward pass meets: embedding, 6 an encoder layer, 10 a decoder layer."""
    return 1 + 16 * shape.layers


def _attention(shape: T5Shape) -> int:
    return 4 * shape.d_model * shape.heads * shape.d_kv


def _feed_forward(shape: T5Shape) -> int:
    return 2 * shape.d_model * shape.d_ff


def _ends(shape: T5Shape) -> int:
    return shape.d_model + POSITION_BUCKETS * shape.heads
