"""Floating-point operations of training a causal language model: a multiplication and its addition are two."""

from __future__ import annotations

from zeropods.plan.causal_parameters import embedding, matmul_of_layers
from zeropods.plan.causal_shapes import CausalShape, window
from zeropods.plan.flops import BACKWARD, FORWARD


def causal_products(shape: CausalShape, tokens: float, labels: float) -> float:
    """Multiply-adds of a forward pass with parameters: layers by token, the head by label.

    The loss makes logits where there is a label and nowhere else.
    """
    return matmul_of_layers(shape) * tokens + embedding(shape) * labels


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
