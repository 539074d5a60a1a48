"""What a plan has to know of a model: its tensors, its products, and what a forward pass of it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from zeropods.plan.workload import Workload

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
    """What a pass saves in a way of training that `saved` names."""

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
    def largest_matrix(self) -> int:
        """Elements of the largest matrix that is no embedding."""
        return max(weight.size for weight in self.weights if weight.kind == "matrix")

    @cached_property
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

    def layer_products(self, tokens: float, labels: float) -> float:
        """Multiply-adds of all layers in a forward pass over one row: matrices by token, and attention's products.

        Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) count the whole square of attention; behind a mask of
        causality half of it is needed, and only that is counted here. Of mean lengths the result is a lower bound where
        lengths differ.

        Args:
            tokens: of the source; of a causal model all of the row.
            labels: of the target; of a causal model those with a loss.
        """
        return value(self.products, 1, tokens, labels) + self.attention_products(tokens, labels)

    def attention_products(self, tokens: float, labels: float) -> float:
        """Multiply-adds of queries with keys, and of probabilities with values, in a forward pass over one row.

        Each token of a causal row meets itself and those before it, half of the square: 2 x layers x heads x head size
        x tokens^2 / 2; behind a window's end only those within it. An encoder needs the whole square, its decoder half
        of one, and cross-attention source x target.
        """
        each = self.heads * self.head_size
        if not self.joint:
            encoder, decoder = self.layers
            return each * (2 * encoder * tokens**2 + decoder * (labels**2 + 2 * tokens * labels))
        beyond = max(0.0, tokens - (self.window or tokens))
        return each * (self.layers[0] * tokens**2 - self.windowed * beyond**2)

    def unneeded_products(self, tokens: float) -> float:
        """Multiply-adds that a kernel which looks at the whole square of attention does beyond what is needed."""
        whole = 2.0 * self.layers[0] * self.heads * self.head_size * tokens**2
        return whole - self.attention_products(tokens, 0) if self.joint else 0.0

    def training_flops(self, tokens: float, labels: float) -> float:
        """FLOPs to train on one row, forward and backward, without recomputation: 6 x (products of layers and head).

        The loss makes logits where there is a label and nowhere else. The arguments are those of `layer_products`.
        """
        return (FORWARD + BACKWARD) * (self.layer_products(tokens, labels) + self.embedding * labels)

    def recomputed_flops(self, tokens: float, labels: float) -> float:
        """FLOPs that gradient checkpointing adds to a row: a second forward pass of all layers, not of the head."""
        return FORWARD * self.layer_products(tokens, labels)

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
    def remark(self) -> str | None:
        """What a reader of its plan has to know, in one line."""
        if self.experts is None:
            return None
        return f"each token meets {self.experts} experts: memory is planned with all, time with those"

    def saved(self, work: Workload) -> Saved:
        """What a pass of this workload saves."""
        precision = "autocast" if work.autocast else "bf16" if work.is_half else "fp32"
        return self.trace(f"{precision} {work.kernel}{' dropout' * (work.drops and self.drops)}")


def shape_of(facts: Mapping[str, Any], trace: Callable[[str], Saved]) -> Shape:
    """The shape of facts as `plan.built` finds them."""
    weights = [Weight(size, kind) for size, kind in facts["weights"]]
    return Shape(**{**facts, "weights": weights}, trace=trace)
