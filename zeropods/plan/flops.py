"""Floating-point operations of training, from a shape: a multiplication and its addition are two."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.shapes import T5Shape

FORWARD, BACKWARD = 2, 4
"""FLOPs a matmul parameter and token: one product forward, two backward (Kaplan et al. 2020, arXiv:2001.08361)."""


@dataclass(frozen=True, kw_only=True)
class MatmulParameters:
    """Parameters that tokens are multiplied with: embeddings that are looked up, norms and biases are none."""

    encoder: int
    decoder: int
    """Cross-attention's keys and values included."""
    cross_keys_values: int
    """The part of the decoder that works on source tokens."""
    head: int


def matmul_parameters(shape: T5Shape) -> MatmulParameters:
    """Those of each part of a T5."""
    projection = shape.d_model * shape.heads * shape.d_kv
    feed_forward = 2 * shape.d_model * shape.d_ff
    return MatmulParameters(
        encoder=shape.layers * (4 * projection + feed_forward),
        decoder=shape.layers * (8 * projection + feed_forward),
        cross_keys_values=shape.layers * 2 * projection,
        head=shape.vocabulary * shape.d_model,
    )


def training_flops(shape: T5Shape, source_tokens: float, target_tokens: float) -> float:
    """FLOPs to train on so many tokens, forward and backward, without recomputation.

    6 x (encoder x S + cross K,V x S + (decoder - cross K,V) x T + head x T) over matmul parameters. Attention's
    products of queries with keys are left out: they grow with the square of a length, and are 2 % at 96 tokens.
    Linear in both counts: of means it gives a mean, of totals a total.
    """
    return (FORWARD + BACKWARD) * products(shape, source_tokens, target_tokens)


def recomputed_flops(shape: T5Shape, source_tokens: float, target_tokens: float) -> float:
    """FLOPs that gradient checkpointing adds: a second forward pass of all layers, not of the head."""
    return FORWARD * (products(shape, source_tokens, target_tokens) - matmul_parameters(shape).head * target_tokens)


def products(shape: T5Shape, source_tokens: float, target_tokens: float) -> float:
    """Multiply-adds of a forward pass: each token with the parameters that it meets."""
    parts = matmul_parameters(shape)
    own = parts.decoder - parts.cross_keys_values
    return (parts.encoder + parts.cross_keys_values) * source_tokens + (own + parts.head) * target_tokens
