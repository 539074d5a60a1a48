"""What a module's printed size says that it must have: parameters, tokens that went through it."""

from __future__ import annotations

from collections.abc import Hashable

from zeropods.measure.profile.report import Module
from zeropods.measure.profile.units import rounding


def linear_size(module: Module) -> tuple[int, int] | None:
    """(in, out) features of a linear layer; None for anything else."""
    wide, narrow = module.details.get("in_features"), module.details.get("out_features")
    return (wide, narrow) if isinstance(wide, int) and isinstance(narrow, int) else None


def embedding_size(module: Module) -> tuple[int, int] | None:
    """(rows, dimension) of an embedding; None for anything else."""
    rows, dimension = module.details.get("rows"), module.details.get("dimension")
    return (rows, dimension) if isinstance(rows, int) and isinstance(dimension, int) else None


def parameters_by_size(module: Module) -> int | None:
    """Parameters of a linear layer (in x out, and out more with a bias) or an embedding (rows x dimension)."""
    linear, embedding = linear_size(module), embedding_size(module)
    if linear is not None:
        return linear[0] * linear[1] + (linear[1] if module.details.get("bias") else 0)
    return embedding[0] * embedding[1] if embedding is not None else None


def missing_parameters(module: Module) -> int:
    """How many of its parameters by size the report left out: those that lie on other ranks."""
    expected, said = parameters_by_size(module), module.parameters
    if expected is None or said is None or said >= expected - 2 * rounding(expected):
        return 0
    return expected - round(said)


def tokens_through(module: Module) -> float | None:
    """Tokens that a linear layer was given, by its MACs / (in x out); None for anything else."""
    size = linear_size(module)
    return module.macs / (size[0] * size[1]) if size is not None and all(size) and module.macs else None


def shared_size(root: Module) -> tuple[int, int] | None:
    """(rows, dimension) of the token embedding: the largest one. Others of that size are the same matrix."""
    sizes = [size for _, module in root.walk() if (size := embedding_size(module))]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def matrix_of(path: str, module: Module, shared: tuple[int, int] | None) -> Hashable:
    """The same for modules that hold one matrix, the token embedding; a module's own path for all others.

    The report does not say what is shared. T5 and most language models give one matrix to the encoder's and the
    decoder's embedding and, without a bias, to the output layer.
    """
    linear = linear_size(module)
    is_head = linear is not None and shared == linear[::-1] and not module.details.get("bias")
    return shared if shared is not None and (embedding_size(module) == shared or is_head) else path
