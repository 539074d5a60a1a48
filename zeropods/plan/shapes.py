"""Architectures that the project knows by their published shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from zeropods.errors import UserError

# Architectures that the project knows by their published shape.


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


# Causal language models that the project knows by their published shape.

FAMILIES = ("gpt2", "bloom", "llama", "mistral", "qwen3")
ALIKE = frozenset({"gpt2", "bloom"})
"""Families whose heads all have keys and values of their own, and together are as wide as the model."""


@dataclass(frozen=True, kw_only=True)
class CausalShape:
    """The numbers of a decoder-only transformer, in the words of its published configuration.

    `gpt2`: learned positions, biases, GELU. `bloom`: ALiBi, a norm behind the embedding, biases, GELU. `llama` and
    `mistral`: rotary positions, RMS norms, gated feed-forward, no biases. `qwen3`: as those, with a norm of queries and
    one of keys.
    """

    family: str
    """One of `FAMILIES`."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and of values; each serves heads / kv_heads heads of queries."""
    head_size: int
    ffn: int
    """Width of the feed-forward part."""
    vocabulary: int
    """Rows of the embedding."""
    positions: int
    """The longest sequence: where they are learned so many exist, elsewhere so many were trained."""
    tied: bool
    """Whether the head's matrix is the embedding."""


WINDOWS = {"mistral": 4_096}
"""Tokens that attention looks back, where that is not all (Jiang et al. 2023, arXiv:2310.06825)."""


def window(shape: CausalShape) -> int | None:
    """Tokens that a token sees, itself included; None where it sees all before it."""
    return WINDOWS.get(shape.family)


def _tiny(family: str, kv_heads: int, tied: bool = True) -> CausalShape:
    return CausalShape(
        family=family,
        hidden=64,
        layers=2,
        heads=2,
        kv_heads=kv_heads,
        head_size=32,
        ffn=256,
        vocabulary=1_024,
        positions=1_024,
        tied=tied,
    )


CAUSAL_SHAPES = {
    "gpt-tiny": _tiny("gpt2", kv_heads=2),
    "bloom-tiny": _tiny("bloom", kv_heads=2),
    "llama-tiny": _tiny("llama", kv_heads=1, tied=False),
    "qwen3-tiny": _tiny("qwen3", kv_heads=1),
    "distilgpt2": CausalShape(
        family="gpt2", hidden=768, layers=6, heads=12, kv_heads=12, head_size=64, ffn=3_072,
        vocabulary=50_257, positions=1_024, tied=True,
    ),
    "bloom-560m": CausalShape(
        family="bloom", hidden=1_024, layers=24, heads=16, kv_heads=16, head_size=64, ffn=4_096,
        vocabulary=250_880, positions=2_048, tied=True,
    ),
    "qwen3-0.6b": CausalShape(
        family="qwen3", hidden=1_024, layers=28, heads=16, kv_heads=8, head_size=128, ffn=3_072,
        vocabulary=151_936, positions=40_960, tied=True,
    ),
    "mistral-7b": CausalShape(
        family="mistral", hidden=4_096, layers=32, heads=32, kv_heads=8, head_size=128, ffn=14_336,
        vocabulary=32_000, positions=32_768, tied=False,
    ),
    "llama-8b": CausalShape(
        family="llama", hidden=4_096, layers=32, heads=32, kv_heads=8, head_size=128, ffn=14_336,
        vocabulary=128_256, positions=8_192, tied=False,
    ),
}  # fmt: skip
"""The `-tiny` ones are ours, for tests and the embedded job; the others are the published configurations of
distilgpt2, bigscience/bloom-560m, Qwen/Qwen3-0.6B, mistralai/Mistral-7B-v0.1 and meta-llama/Meta-Llama-3-8B."""


PUBLISHED_AS = {"mistral-7b-v0.1": "mistral-7b", "meta-llama-3-8b": "llama-8b"}
"""Names on the hub that are not our own."""


def is_causal(name: str) -> bool:
    """Whether a name is that of a causal model whose shape is known."""
    return _key(name) in CAUSAL_SHAPES


def causal_shape(name: str) -> CausalShape:
    """The shape of a name, with or without an organisation before it (`bigscience/bloom-560m`)."""
    shape = CAUSAL_SHAPES.get(_key(name))
    if shape is None:
        raise UserError(f"model {name!r} has no shape known here; expected one of {', '.join(CAUSAL_SHAPES)}")
    return shape


def _key(name: str) -> str:
    last = name.rsplit("/", 1)[-1].lower()
    return PUBLISHED_AS.get(last, last)


def causal_shape_from(numbers: Mapping[str, Any]) -> CausalShape:
    """The shape that `dataclasses.asdict` has written, as a record holds it.

    Raises:
        UserError: a field is missing, unknown or of another kind, or the numbers make no such model.
    """
    fault = next(_faults(numbers), None)
    if fault is not None:
        raise UserError(f"shape: {fault}")
    return CausalShape(**numbers)


def _faults(numbers: Mapping[str, Any]) -> Iterator[str]:
    names = [field.name for field in fields(CausalShape)]
    if odd := set(names).symmetric_difference(numbers):
        name = min(odd)
        yield f"{name} {numbers.get(name, 'missing')!r:.40}; expected {', '.join(names)}"
        return
    if numbers["family"] not in FAMILIES:
        yield f"family {numbers['family']!r:.40}; expected one of {', '.join(FAMILIES)}"
    if type(numbers["tied"]) is not bool:
        yield f"tied {numbers['tied']!r:.40}; expected true or false"
    sizes = [name for name in names if name not in ("family", "tied")]
    wrong = next((name for name in sizes if type(numbers[name]) is not int or numbers[name] < 1), None)
    if wrong is not None:
        yield f"{wrong} {numbers[wrong]!r:.40}; expected a positive whole number"
    elif numbers["heads"] % numbers["kv_heads"]:
        yield f"kv_heads {numbers['kv_heads']}; expected a divisor of the {numbers['heads']} heads"
    elif numbers["family"] in ALIKE and not _heads_fill(numbers):
        yield f"{numbers['heads']} heads of {numbers['head_size']}; expected {numbers['hidden']} in all, each with keys"


def _heads_fill(numbers: Mapping[str, Any]) -> bool:
    whole = numbers["heads"] * numbers["head_size"] == numbers["hidden"]
    return whole and numbers["kv_heads"] == numbers["heads"]
