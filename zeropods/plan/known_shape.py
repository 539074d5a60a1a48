"""A shape of any kind, as a record holds it, and the operations that training with it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropods.plan.causal_flops import causal_training_flops
from zeropods.plan.causal_shapes import CausalShape, causal_shape_from
from zeropods.plan.flops import training_flops
from zeropods.plan.shapes import T5Shape, shape_from


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
