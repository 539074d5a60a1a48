"""The tensors of a causal language model by its shape, and what is counted over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from zeropods.plan.causal_shapes import CausalShape


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


def embedding(shape: CausalShape) -> int:
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
