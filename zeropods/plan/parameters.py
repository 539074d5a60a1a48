"""How many parameters a shape has, and how many operations training with it takes, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from zeropods.plan.shapes import CausalShape, T5Shape, causal_shape_from, shape_from, window

# How many parameters a shape has, by arithmetic.

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


# The tensors of a causal language model by its shape, and what is counted over them.


@dataclass(frozen=True)
class Weight:
    """One parameter tensor."""

    size: int
    """Elements."""
    is_matrix: bool = True
    """Else a bias or a norm, which weight decay leaves out."""


@lru_cache(maxsize=64)
def weights(shape: CausalShape) -> tuple[Weight, ...]:
    """All of them, in the model's order; a head that is the embedding is counted once."""
    table = Weight(shape.vocabulary * shape.hidden)
    head = () if shape.tied else (table,)
    layers = tuple(weight for _ in range(shape.layers) for weight in _layer(shape))
    return (table, *_first(shape), *layers, *_norm(shape), *head)


def causal_parameters(shape: CausalShape) -> int:
    """Parameters of the model, each counted once."""
    return sum(weight.size for weight in weights(shape))


def causal_embedding(shape: CausalShape) -> int:
    """Elements of the embedding, and of the head."""
    return shape.vocabulary * shape.hidden


def layer_parameters(shape: CausalShape) -> int:
    """Of one layer."""
    return sum(weight.size for weight in _layer(shape))


def largest_weight(shape: CausalShape) -> int:
    """Elements of the largest single parameter."""
    return max(weight.size for weight in weights(shape))


def in_small_weights(shape: CausalShape, threshold: int) -> int:
    """Parameters in tensors of at most `threshold` elements."""
    return sum(weight.size for weight in weights(shape) if weight.size <= threshold)


def matrices(shape: CausalShape) -> int:
    """How many matrices a forward pass meets."""
    return sum(weight.is_matrix for weight in weights(shape))


def decay_groups(shape: CausalShape) -> tuple[list[int], list[int]]:
    """Elements of each tensor by parameter group, as Trainer makes them: what is decayed, and what is not."""
    decayed = [weight.size for weight in weights(shape) if weight.is_matrix]
    return decayed, [weight.size for weight in weights(shape) if not weight.is_matrix]


def matmul_of_layers(shape: CausalShape) -> int:
    """Parameters of all layers that each token is multiplied with."""
    return shape.layers * sum(weight.size for weight in _layer(shape) if weight.is_matrix)


def _first(shape: CausalShape) -> tuple[Weight, ...]:
    """Behind the embedding: learned positions, or BLOOM's norm."""
    if shape.family == "gpt2":
        return (Weight(shape.positions * shape.hidden),)
    return _norm(shape) if shape.family == "bloom" else ()


def _layer(shape: CausalShape) -> tuple[Weight, ...]:
    return _with_biases(shape) if shape.family in ("gpt2", "bloom") else _gated(shape)


def _with_biases(shape: CausalShape) -> tuple[Weight, ...]:
    """Norm, queries, keys and values in one, output; norm, feed-forward up and down."""
    d, f = shape.hidden, shape.ffn
    attention = (*_linear(d, 3 * d), *_linear(d, d))
    return (*_norm(shape), *attention, *_norm(shape), *_linear(d, f), *_linear(f, d))


def _gated(shape: CausalShape) -> tuple[Weight, ...]:
    """Queries, keys, values, output; gate, up and down; norms."""
    d, f = shape.hidden, shape.ffn
    queries, keys = Weight(d * shape.heads * shape.head_size), Weight(d * shape.kv_heads * shape.head_size)
    attention = (queries, keys, keys, queries)
    of_heads = 2 * (Weight(shape.head_size, is_matrix=False),) if shape.family == "qwen3" else ()
    return (*attention, *of_heads, *3 * (Weight(d * f),), *_norm(shape), *_norm(shape))


def _linear(inputs: int, outputs: int) -> tuple[Weight, ...]:
    return Weight(inputs * outputs), Weight(outputs, is_matrix=False)


def _norm(shape: CausalShape) -> tuple[Weight, ...]:
    """Scale; where the family has biases, a bias too."""
    scale = Weight(shape.hidden, is_matrix=False)
    return (scale, scale) if shape.family in ("gpt2", "bloom") else (scale,)


# Floating-point operations of training, from a shape: a multiplication and its addition are two.

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


# Floating-point operations of training a causal language model: a multiplication and its addition are two.


def causal_products(shape: CausalShape, tokens: float, labels: float) -> float:
    """Multiply-adds of a forward pass with parameters: layers by token, the head by label.

    The loss makes logits where there is a label and nowhere else.
    """
    return matmul_of_layers(shape) * tokens + causal_embedding(shape) * labels


def attention_products(shape: CausalShape, tokens: float) -> float:
    """Multiply-adds of queries with keys, and of probabilities with values, in a forward pass over one row.

    Each token meets itself and those before it, half of the square: 2 x layers x heads x head size x tokens^2 / 2;
    behind a window's end only those within it.
    """
    beyond = max(0.0, tokens - (window(shape) or tokens))
    return shape.layers * shape.heads * shape.head_size * (tokens**2 - beyond**2)


def causal_training_flops(shape: CausalShape, tokens: float, labels: float) -> float:
    """FLOPs to train on one row, forward and backward, without recomputation: 6 x (products + attention's).

    Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) count the whole square of attention, 12 x layers x heads x head
    size x tokens a token; a causal model needs half of it, and only that is counted here. Of mean lengths it gives the
    mean of what is linear, and a lower bound of attention's part where lengths differ.
    """
    return (FORWARD + BACKWARD) * (causal_products(shape, tokens, labels) + attention_products(shape, tokens))


def causal_recomputed_flops(shape: CausalShape, tokens: float) -> float:
    """FLOPs that gradient checkpointing adds to a row: a second forward pass of all layers, not of the head."""
    return FORWARD * (matmul_of_layers(shape) * tokens + attention_products(shape, tokens))


# A shape of any kind, as a record holds it, and the operations that training with it takes.


def known_shape(numbers: Mapping[str, Any]) -> T5Shape | CausalShape:
    """The shape that `dataclasses.asdict` has written: a causal one names its `family`.

    Raises:
        UserError: a number is missing, unknown, or not what it can be.
    """
    return causal_shape_from(numbers) if "family" in numbers else shape_from(numbers)


def sample_flops(shape: T5Shape | CausalShape, tokens: float, others: float) -> float:
    """FLOPs to train on one sample, forward and backward.

    Args:
        tokens: of the source; of a causal model all of them.
        others: of the target; of a causal model those with a loss.
    """
    if isinstance(shape, CausalShape):
        return causal_training_flops(shape, tokens, others)
    return training_flops(shape, tokens, others)
