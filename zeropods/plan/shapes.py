"""Architectures that the project knows by their published shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from zeropods.errors import UserError


@dataclass(frozen=True, kw_only=True)
class T5Shape:
    """The numbers of a T5 v1.0 encoder-decoder with tied embeddings and ReLU feed-forward.

    Source: Raffel et al. 2020, arXiv:1910.10683, and the models' published configurations.
    """

    d_model: int
    d_kv: int
    d_ff: int
    layers: int
    """Encoder layers, and as many decoder layers."""
    heads: int
    vocabulary: int = 32_128
    """Rows of the embedding; the tokenizer uses 32,100 of them."""


T5_SHAPES = {
    "t5-tiny": T5Shape(d_model=128, d_kv=32, d_ff=512, layers=2, heads=4, vocabulary=1_024),
    "t5-small": T5Shape(d_model=512, d_kv=64, d_ff=2_048, layers=6, heads=8),
    "t5-base": T5Shape(d_model=768, d_kv=64, d_ff=3_072, layers=12, heads=12),
    "t5-large": T5Shape(d_model=1_024, d_kv=64, d_ff=4_096, layers=24, heads=16),
    "t5-3b": T5Shape(d_model=1_024, d_kv=128, d_ff=16_384, layers=24, heads=32),
}
"""`t5-tiny` is ours, for the embedded job; the others are the published ones."""


def is_t5(name: str) -> bool:
    """Whether a name is that of a T5 whose shape is known."""
    return name.rsplit("/", 1)[-1] in T5_SHAPES


def t5_shape(name: str) -> T5Shape:
    """The shape of a name, with or without an organisation before it (`google-t5/t5-small`)."""
    shape = T5_SHAPES.get(name.rsplit("/", 1)[-1])
    if shape is None:
        raise UserError(f"model {name!r} has no shape known here; expected one of {', '.join(T5_SHAPES)}")
    return shape


def shape_from(numbers: Mapping[str, int]) -> T5Shape:
    """The shape that `dataclasses.asdict` has written, as a record holds it.

    Raises:
        UserError: a number is missing, unknown, or not positive.
    """
    names = {field.name for field in fields(T5Shape)}
    wrong = names.symmetric_difference(numbers) or {name for name in names if not _is_size(numbers[name])}
    if wrong:
        name = min(wrong)
        raise UserError(
            f"shape: {name} {numbers.get(name, 'missing')}; expected positive whole numbers {', '.join(sorted(names))}"
        )
    return T5Shape(**numbers)


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
