"""What is trained: a model's tensors, its products and what a pass of it saves; and the batch of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from zeropods.techniques import TECHNIQUES, Technique, ZeroSettings

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTER, MOMENTS = 4, 8
"""Bytes per parameter of an FP32 master, and of Adam's two moments."""
FORWARD, BACKWARD = 2, 4
"""FLOPs per matmul parameter and token: one product forward, two backward (Kaplan et al. 2020, arXiv:2001.08361)."""
ATTENTIONS = ("eager", "sdpa", "flash_attention_2")
FUSED, MASKED, PLAIN, EAGER = "fused", "masked", "plain", "eager"
"""What attention runs: a kernel that keeps no score, the same behind a window's mask, PyTorch's formula in FP32, the
family's own code."""
Polynomial = Mapping[str, float]
"""Coefficients by the exponents of rows, tokens and labels: `120` is rows x tokens^2. Of an encoder-decoder labels are
the tokens of the target."""


def value(terms: Polynomial, rows: float, tokens: float, labels: float) -> float:
    """The polynomial at these sizes."""
    return sum(f * rows ** int(p[0]) * tokens ** int(p[1]) * labels ** int(p[2]) for p, f in terms.items())


class Weight(NamedTuple):
    """One parameter tensor."""

    size: int
    """Elements."""
    kind: str
    """`embedding`, `matrix`, `bias` or `norm`; weight decay leaves out the last two."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is decayed, and met as a matrix by a forward pass."""
        return self.kind in ("embedding", "matrix")


class Saved(NamedTuple):
    """Bytes that one forward pass saves for its backward pass, parameters left out."""

    layers: list[Polynomial]
    """Of all layers together, of the encoder and of the decoder, or of all there are."""
    inputs: list[Polynomial]
    """The input of one layer."""
    held: Polynomial
    """What layers are given beside it, the same for all: masks, rotations. A checkpoint keeps it."""
    ends: Polynomial
    """Outside the layers: embedding, the last norm, the head's input."""
    scores: int
    """The largest tensor of a layer that grows with the square of tokens: bytes of a row and pair of tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """A model, as a pass on the meta device has shown it (`plan.built`)."""

    family: str
    """As configurations call it: `t5`, `llama`."""
    joint: bool
    """Whether source and target are one row: it is a decoder alone."""
    layers: list[int]
    """Of the encoder and of the decoder, or all."""
    layer_parameters: list[int]
    """Parameters of all these."""
    heads: int
    kv_heads: int
    """Heads of keys and of values; each serves heads / kv_heads heads of queries."""
    head_size: int
    inner: int
    """Width of the feed-forward part, all active experts together."""
    vocabulary: int
    positions: int | None
    """The longest sequence: where they are learned so many exist, elsewhere so many were trained."""
    window: int | None
    """Tokens that a token sees, itself included, in layers with a window."""
    windowed: int
    """Layers that see no further than the window."""
    drops: bool
    """Whether it was published with dropout."""
    attentions: list[str]
    """Those of `ATTENTIONS` that transformers has for it."""
    tied: bool
    """Whether the head's matrix is the embedding."""
    experts: str | None
    """`2 of 8`: experts of a token, and all."""
    weights: list[Weight]
    """All tensors, in the model's order; a matrix that is used twice is there once."""
    products: Polynomial
    """Multiply-adds of the layers' matrices."""
    trace: Callable[[str], Saved]
    """What a pass saves in a way of training: precision (`fp32`, `bf16`, `autocast`), kernel, and ` dropout`."""

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "a causal model" if self.joint else "an encoder-decoder"

    @property
    def precisions(self) -> tuple[str, ...]:
        """In which it can be trained."""
        return ("fp32", "bf16", "fp16") if self.joint else ("fp32", "bf16")

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model, each counted once."""
        return sum(weight.size for weight in self.weights)

    @cached_property
    def embedding(self) -> int:
        """Elements of the embedding, and of the head."""
        return next(weight.size for weight in self.weights if weight.kind == "embedding")

    @cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest single parameter."""
        return max(weight.size for weight in self.weights)

    @cached_property
    def matrices(self) -> int:
        """How many matrices a forward pass meets."""
        return sum(weight.is_matrix for weight in self.weights)

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

    def layer_products(self, tokens: float, labels: float, *, whole: bool = False) -> float:
        """Multiply-adds of all layers in a forward pass over one row: matrices by token, and attention's products.

        Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) count the whole square of attention; behind a mask of
        causality half of it is needed, and only that is counted here: each token of a causal row meets itself and those
        before it, 2 x layers x heads x head size x tokens^2 / 2; behind a window's end only those within it. An encoder
        needs the whole square, its decoder half of one, and cross-attention source x target. Of mean lengths the result
        is a lower bound where lengths differ.

        Args:
            tokens: of the source; of a causal model all of the row.
            labels: of the target; of a causal model those with a loss.
            whole: of a causal model, whether its kernel computes the whole square.
        """
        if not self.joint:
            encoder, decoder = self.layers
            square = 2 * encoder * tokens**2 + decoder * (labels**2 + 2 * tokens * labels)
        elif whole:
            square = 2 * self.layers[0] * tokens**2
        else:
            square = self.layers[0] * tokens**2 - self.windowed * max(0.0, tokens - (self.window or tokens)) ** 2
        return value(self.products, 1, tokens, labels) + self.heads * self.head_size * square

    def training_flops(self, tokens: float, labels: float, *, whole: bool = False) -> float:
        """FLOPs to train on one row, forward and backward, without recomputation: 6 x (products of layers and head).

        The loss makes logits where there is a label and nowhere else. The arguments are those of `layer_products`.
        """
        return (FORWARD + BACKWARD) * (self.layer_products(tokens, labels, whole=whole) + self.embedding * labels)


# What one process trains on, whatever the model.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the batch of one forward pass of one process, padding included; and how its states are divided."""

    shape: Shape
    rows: int
    tokens: int
    """Tokens per row; of a T5 those of the source."""
    labels: int
    """Tokens per row that carry a loss; of a T5 all of the target."""
    precision: str = "fp32"
    """`fp32`, or `bf16`: BF16 weights and gradients beside an FP32 master; `fp16`: alike, or by autocast."""
    checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass."""
    own_rates: bool = False
    """Whether the optimizer's parameter groups are those of `train.trainer`, not Trainer's."""
    technique: Technique = TECHNIQUES[0]
    ranks: int = 1
    """Processes that it is divided among."""
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    passes: int = 1
    """Forward and backward passes of a step, whose gradients are added up."""
    attention: str = "sdpa"
    """One of `ATTENTIONS`."""
    before_ampere: bool = False
    """Whether the GPU is older than FlashAttention takes: a T4, a V100."""
    dropout: bool | None = None
    """Whether there is dropout; as the model was published if not given."""

    @property
    def autocast(self) -> bool:
        """Whether weights and gradients are FP32 and products alone FP16, of copies made in each pass: transformers'
        way of FP16 without DeepSpeed."""
        return self.precision == "fp16" and self.technique.stage == 0

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of a gradient."""
        return ELEMENT_BYTES["fp32" if self.autocast else self.precision]

    @property
    def is_half(self) -> bool:
        """Whether weights are kept a second time, as an FP32 master."""
        return self.precision != "fp32" and not self.autocast

    @property
    def kernel(self) -> str:
        """What attention really runs: `FUSED`, `MASKED`, `PLAIN` or `EAGER`.

        Source: transformers 5.23 (`integrations/sdpa_attention.py`, `masking_utils.py`); PyTorch 2.13's choice
        (`sdp_utils.cpp`): FlashAttention takes FP16 and BF16 on GPUs from Ampere on, without a mask; the
        memory-efficient kernel takes FP32, older GPUs and a mask too, but no keys that several heads share, and then
        the plain formula runs, in FP32. Behind a mask transformers repeats the keys itself.
        """
        shape = self.shape
        if self.attention == "eager":
            return EAGER
        if not shape.joint:
            return FUSED
        if self.attention == "sdpa" and self.tokens >= (shape.window or self.tokens + 1):
            return MASKED
        is_plain = self.precision == "fp32" or self.before_ampere
        return PLAIN if shape.kv_heads < shape.heads and is_plain else FUSED

    def saved(self) -> Saved:
        """What a pass saves."""
        precision = "autocast" if self.autocast else "bf16" if self.is_half else "fp32"
        drops = self.shape.drops and self.dropout is not False
        return self.shape.trace(f"{precision} {self.kernel}{' dropout' * drops}")

    def flops(self) -> tuple[float, float]:
        """FLOPs of a pass forward and backward, a third of them forward; and of what checkpointing computes again.

        Padding is computed too. Behind a mask, and where scores are kept, the whole square of attention is computed, at
        least twice what is needed.
        """
        sizes, whole = (self.tokens, self.labels), self.kernel != FUSED
        again = FORWARD * self.shape.layer_products(*sizes, whole=whole) if self.checkpointing else 0.0
        return self.rows * self.shape.training_flops(*sizes, whole=whole), self.rows * again


def share(number: int, ranks: int) -> int:
    """Elements of one rank where some share them; the last partition is padded to the size of the others."""
    return -(-number // ranks)
