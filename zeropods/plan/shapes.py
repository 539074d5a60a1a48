"""Architectures that the project knows by their published shape: their tensors, and the operations of training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from zeropods.errors import UserError

FORWARD, BACKWARD = 2, 4
"""FLOPs per matmul parameter and token: one product forward, two backward (Kaplan et al. 2020, arXiv:2001.08361)."""
POSITION_BUCKETS = 32
"""Relative positions of T5, one bias per head for each; the first layer of encoder and decoder holds them."""
FAMILIES = ("gpt2", "bloom", "llama", "mistral", "qwen3")
WINDOWS = {"mistral": 4_096}
"""Tokens that attention looks back, where that is not all (Jiang et al. 2023, arXiv:2310.06825)."""
ATTENTIONS = ("eager", "sdpa", "flash_attention_2")
FUSED, MASKED, PLAIN, EAGER = "fused", "masked", "plain", "eager"
"""What attention runs: a kernel that keeps no score, the same behind a window's mask, PyTorch's formula in FP32, the
family's own code."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor."""

    size: int
    """Elements."""
    kind: str = "matrix"
    """`embedding`, `matrix`, `bias` or `norm`; weight decay leaves out the last two."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is decayed, and met as a matrix by a forward pass."""
        return self.kind in ("embedding", "matrix")


class Shape(ABC):
    """What a plan has to know of an architecture: `T5Shape`, `CausalShape`, or `BuiltShape` of any other."""

    family: str
    """As configurations call it: `t5`, `llama`."""
    layers: int
    heads: int
    vocabulary: int
    positions: int | None
    """The longest sequence: where they are learned so many exist, elsewhere so many were trained."""
    kv_heads: int
    """Heads of keys and of values; each serves heads / kv_heads heads of queries."""

    @property
    @abstractmethod
    def joint(self) -> bool:
        """Whether source and target are one row: it is a decoder alone."""

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "a causal model" if self.joint else "an encoder-decoder"

    @property
    def precisions(self) -> tuple[str, ...]:
        """In which it can be trained."""
        return ("fp32", "bf16", "fp16") if self.joint else ("fp32", "bf16")

    @property
    @abstractmethod
    def width(self) -> int:
        """Width of the residual stream."""

    @abstractmethod
    def tensors(self) -> tuple[Weight, ...]:
        """All tensors, in the model's order; a matrix that is used twice is there once."""

    @abstractmethod
    def layer_products(self, tokens: float, labels: float) -> float:
        """Multiply-adds of all layers in a forward pass over one row.

        Args:
            tokens: of the source; of a causal model all of the row.
            labels: of the target; of a causal model those with a loss.
        """

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The same as `tensors`, counted once."""
        return self.tensors()

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model, each counted once."""
        return sum(weight.size for weight in self.weights)

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.width

    @cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest single parameter."""
        return max(weight.size for weight in self.weights)

    @property
    def matrices(self) -> int:
        """How many matrices a forward pass meets."""
        return sum(weight.is_matrix for weight in self.weights)

    def in_small_tensors(self, threshold: int) -> int:
        """Parameters in tensors of at most `threshold` elements."""
        return sum(weight.size for weight in self.weights if weight.size <= threshold)

    def groups(self, own_rates: bool = False) -> list[list[int]]:
        """Elements of each tensor by parameter group of the optimizer, in the model's order.

        Args:
            own_rates: parameter groups as `train.trainer` makes them for a T5: embedding, matrices, position biases,
                norms. Else as Trainer makes them: what is decayed, and what is not.
        """
        found: dict[str | bool, list[int]] = {}
        for weight in self.weights:
            found.setdefault(weight.kind if own_rates else weight.is_matrix, []).append(weight.size)
        return list(found.values())

    def training_flops(self, tokens: float, labels: float) -> float:
        """FLOPs to train on one row, forward and backward, without recomputation: 6 x (products of layers and head).

        The loss makes logits where there is a label and nowhere else. Of mean lengths it gives the mean of what is
        linear in them; the arguments are those of `layer_products`.
        """
        return (FORWARD + BACKWARD) * (self.layer_products(tokens, labels) + self.embedding * labels)

    def recomputed_flops(self, tokens: float, labels: float) -> float:
        """FLOPs that gradient checkpointing adds to a row: a second forward pass of all layers, not of the head."""
        return FORWARD * self.layer_products(tokens, labels)

    @property
    def attentions(self) -> tuple[str, ...]:
        """The ways to compute attention that transformers has for it."""
        return ("sdpa",)

    def kernel(self, attention: str, tokens: int, precision: str, before_ampere: bool) -> str:
        """What runs over rows of so many tokens.

        Source: transformers 5.23 (`integrations/sdpa_attention.py`, `masking_utils.py`); PyTorch 2.13's choice
        (`sdp_utils.cpp`): FlashAttention takes FP16 and BF16 on GPUs from Ampere on, without a mask; the
        memory-efficient kernel takes FP32, older GPUs and a mask too, but no keys that several heads share, and then
        the plain formula runs, in FP32. Behind a mask transformers repeats the keys itself.
        """
        if attention == "eager":
            return EAGER
        if not self.joint:
            return FUSED
        if attention == "sdpa" and tokens >= (self.window or tokens + 1):
            return MASKED
        return PLAIN if self.kv_heads < self.heads and (precision == "fp32" or before_ampere) else FUSED

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None where it sees all before it."""
        return None

    @property
    def remark(self) -> str | None:
        """What a reader of its plan has to know, in one line."""
        return None

    def unneeded_products(self, tokens: float) -> float:
        """Multiply-adds that a kernel which looks at the whole square of attention does beyond what is needed."""
        return 0.0

    @property
    def drops(self) -> bool:
        """Whether it was published with dropout."""
        return True


@dataclass(frozen=True, kw_only=True)
class T5Shape(Shape):
    """The numbers of a T5 v1.0 encoder-decoder with tied embeddings and ReLU feed-forward.

    Source: Raffel et al. 2020, arXiv:1910.10683, and the models' published configurations.
    """

    joint: ClassVar[bool] = False
    family, positions = "t5", None

    d_model: int
    d_kv: int
    d_ff: int
    layers: int
    """Encoder layers, and as many decoder layers."""
    heads: int
    vocabulary: int = 32_128
    """Rows of the embedding; the tokenizer uses 32,100 of them."""

    @property
    def width(self) -> int:
        return self.d_model

    def tensors(self) -> tuple[Weight, ...]:
        """One matrix for input, output and decoder embeddings; encoder; decoder."""
        return (Weight(self.embedding, "embedding"), *self.stack(attentions=1), *self.stack(attentions=2))

    def stack(self, attentions: int) -> tuple[Weight, ...]:
        """The encoder (one attention per layer) or the decoder (two), without the embedding."""
        norm, bias = Weight(self.d_model, "norm"), Weight(POSITION_BUCKETS * self.heads, "bias")
        projections = 4 * (Weight(self.d_model * self.heads * self.d_kv),)
        feed_forward = 2 * (Weight(self.d_model * self.d_ff),)
        layer = (*attentions * (*projections, norm), *feed_forward, norm)
        return (*projections, bias, *layer[4:], *(self.layers - 1) * layer, norm)

    def layer_products(self, tokens: float, labels: float) -> float:
        """Each side meets six projections and a feed-forward in each layer.

        Of the decoder's eight projections cross-attention's keys and values work on source tokens. Products of queries
        with keys are left out: they grow with the square of a length, and are 2 % at 96 tokens. Linear in both counts:
        of means it gives a mean, of totals a total.
        """
        projection = self.d_model * self.heads * self.d_kv
        return self.layers * (6 * projection + 2 * self.d_model * self.d_ff) * (tokens + labels)


@dataclass(frozen=True, kw_only=True)
class CausalShape(Shape):
    """The numbers of a decoder-only transformer, in the words of its published configuration.

    `gpt2`: learned positions, biases, GELU. `bloom`: ALiBi, a norm behind the embedding, biases, GELU. `llama` and
    `mistral`: rotary positions, RMS norms, gated feed-forward, no biases. `qwen3`: as those, with a norm of queries and
    one of keys.

    Raises:
        UserError: the numbers make no such model.
    """

    joint: ClassVar[bool] = True

    family: str
    """One of `FAMILIES`."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Width of the feed-forward part."""
    vocabulary: int
    """Rows of the embedding."""
    positions: int
    tied: bool
    """Whether the head's matrix is the embedding."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(f"shape: kv_heads {self.kv_heads}; expected a divisor of the {self.heads} heads")
        inner = (self.heads * self.head_size, self.kv_heads)
        if self.has_biases and inner != (self.hidden, self.heads):
            raise UserError(
                f"shape: {self.heads} heads of {self.head_size}; expected {self.hidden} in all, each with keys"
            )

    @property
    def width(self) -> int:
        return self.hidden

    @property
    def has_biases(self) -> bool:
        """Whether it has biases and plain norms; its heads then all have keys and values of their own."""
        return self.family in ("gpt2", "bloom")

    @property
    def drops(self) -> bool:
        return self.family == "gpt2"

    @property
    def window(self) -> int | None:
        return WINDOWS.get(self.family)

    def tensors(self) -> tuple[Weight, ...]:
        """Embedding; learned positions or BLOOM's norm; layers; last norm; the head, unless it is the embedding."""
        table = Weight(self.embedding, "embedding")
        first = {"gpt2": (Weight(self.positions * self.hidden),), "bloom": self._norm()}.get(self.family, ())
        return (table, *first, *self.layers * self.layer(), *self._norm(), *(() if self.tied else (table,)))

    def layer(self) -> tuple[Weight, ...]:
        """The tensors of one layer."""
        d, f = self.hidden, self.ffn
        if self.has_biases:
            # Queries, keys and values in one, output; feed-forward up and down.
            attention, feed_forward = (*_linear(d, 3 * d), *_linear(d, d)), (*_linear(d, f), *_linear(f, d))
            return (*self._norm(), *attention, *self._norm(), *feed_forward)
        # Queries, keys, values, output; gate, up and down.
        queries, keys = Weight(d * self.heads * self.head_size), Weight(d * self.kv_heads * self.head_size)
        of_heads = 2 * (Weight(self.head_size, "norm"),) if self.family == "qwen3" else ()
        return (queries, keys, keys, queries, *of_heads, *3 * (Weight(d * f),), *self._norm(), *self._norm())

    @cached_property
    def layer_matmul(self) -> int:
        """Parameters of all layers that each token is multiplied with."""
        return self.layers * sum(weight.size for weight in self.layer() if weight.is_matrix)

    def layer_products(self, tokens: float, labels: float) -> float:
        """Parameters by token, and attention's products.

        Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) count the whole square of attention; a causal model needs
        half of it, and only that is counted here: of mean lengths it is a lower bound where lengths differ.
        """
        return self.layer_matmul * tokens + self.attention_products(tokens)

    def attention_products(self, tokens: float) -> float:
        """Multiply-adds of queries with keys, and of probabilities with values, in a forward pass over one row.

        Each token meets itself and those before it, half of the square: 2 x layers x heads x head size x tokens^2 / 2;
        behind a window's end only those within it.
        """
        beyond = max(0.0, tokens - (self.window or tokens))
        return self.layers * self.heads * self.head_size * (tokens**2 - beyond**2)

    def unneeded_products(self, tokens: float) -> float:
        return 2.0 * self.layers * self.heads * self.head_size * tokens**2 - self.attention_products(tokens)

    @property
    def attentions(self) -> tuple[str, ...]:
        """BLOOM's position biases are in its own code only."""
        return ("eager",) if self.family == "bloom" else ATTENTIONS

    def _norm(self) -> tuple[Weight, ...]:
        """Scale; where the family has biases, a bias too."""
        return (1 + self.has_biases) * (Weight(self.hidden, "norm"),)


def _linear(inputs: int, outputs: int) -> tuple[Weight, ...]:
    return Weight(inputs * outputs), Weight(outputs, "bias")


# The known ones by name.

T5_SHAPES = {
    "t5-tiny": T5Shape(d_model=128, d_kv=32, d_ff=512, layers=2, heads=4, vocabulary=1_024),
    "t5-large-tiny": T5Shape(d_model=256, d_kv=32, d_ff=1_024, layers=4, heads=8, vocabulary=1_024),
    "t5-3b-tiny": T5Shape(d_model=256, d_kv=64, d_ff=2_048, layers=4, heads=8, vocabulary=1_024),
    "t5-efficient-mini": T5Shape(d_model=384, d_kv=64, d_ff=1_536, layers=4, heads=8),
    "t5-small": T5Shape(d_model=512, d_kv=64, d_ff=2_048, layers=6, heads=8),
    "t5-base": T5Shape(d_model=768, d_kv=64, d_ff=3_072, layers=12, heads=12),
    "t5-large": T5Shape(d_model=1_024, d_kv=64, d_ff=4_096, layers=24, heads=16),
    "t5-3b": T5Shape(d_model=1_024, d_kv=128, d_ff=16_384, layers=24, heads=32),
}
"""The `-tiny` ones are ours: `t5-tiny` for the embedded job, the others for trials of what is run with larger models.
Those without are the published ones; `t5-efficient-mini` is of Tay et al. 2021, arXiv:2109.10686."""


def _tiny(family: str, kv_heads: int, tied: bool = True) -> CausalShape:
    return CausalShape(
        family=family, hidden=64, layers=2, heads=2, kv_heads=kv_heads, head_size=32, ffn=256, vocabulary=1_024,
        positions=1_024, tied=tied,
    )  # fmt: skip


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
T5_TINY, CAUSAL_TINY = (tuple(n for n in names if n.endswith("-tiny")) for names in (T5_SHAPES, CAUSAL_SHAPES))
"""Ours: they have no pretrained weights, and a tokenizer that is trained on the data."""
Kind = TypeVar("Kind", bound=Shape)


def shape_named(name: str) -> Shape:
    """The shape of a name, with or without an organisation before it; `UserError` where none is known.

    `google-t5/t5-small`, `bigscience/bloom-560m`.
    """
    return _known(name, {**T5_SHAPES, **CAUSAL_SHAPES})


def tiny_name(name: str) -> str:
    """The tiny model of ours that stands for a known one in a trial; `UserError` where none is known."""
    shape, last = shape_named(name), name.rsplit("/", 1)[-1].lower()
    if isinstance(shape, CausalShape):
        return {"gpt2": "gpt-tiny", "mistral": "llama-tiny"}.get(shape.family, f"{shape.family}-tiny")
    return next((tiny for tiny in (last, f"{last}-tiny") if tiny in T5_TINY), "t5-tiny")


def t5_shape(name: str) -> T5Shape:
    """The same of a T5."""
    return _known(name, T5_SHAPES)


def causal_shape(name: str) -> CausalShape:
    """The same of a causal model."""
    return _known(name, CAUSAL_SHAPES)


def _known(name: str, shapes: Mapping[str, Kind]) -> Kind:
    last = name.rsplit("/", 1)[-1].lower()
    shape = shapes.get(PUBLISHED_AS.get(last, last))
    if shape is None:
        raise UserError(f"model {name!r} has no shape known here; expected one of {', '.join(shapes)}")
    return shape


def shape_from(numbers: Mapping[str, Any]) -> Shape:
    """The shape that `dataclasses.asdict` has written, as a record holds it: a causal one names its `family`.

    Raises:
        UserError: a field is missing, unknown or of another kind, or the numbers make no such model.
    """
    kind = CausalShape if "family" in numbers else T5Shape
    names = [field.name for field in fields(kind)]
    odd = min(numbers.keys() ^ set(names), default=None)
    if odd is not None:
        raise UserError(f"shape: {odd} {numbers.get(odd, 'missing')!s:.40}; expected {', '.join(names)}")
    for name, value in numbers.items():
        if expected := _expected(name, value):
            raise UserError(f"shape: {name} {value!r:.40}; expected {expected}")
    return kind(**numbers)


def _expected(name: str, value: object) -> str | None:
    """What a field of a shape should be; None where it is that."""
    if name == "family":
        return None if value in FAMILIES else f"one of {', '.join(FAMILIES)}"
    if name == "tied":
        return None if type(value) is bool else "true or false"
    return None if type(value) is int and value > 0 else "a positive whole number"
