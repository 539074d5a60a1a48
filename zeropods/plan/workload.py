"""What is trained: a model's tensors and products, and what a pass saves; ZeRO's settings; the batch of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from zeropods.errors import UserError
from zeropods.techniques import TECHNIQUES, Technique, block

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
    """A model, as a pass on the meta device has shown it (`plan.meta_model`)."""

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


# The keys of a DeepSpeed configuration that its memory and traffic depend on.


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Those keys; the defaults are those of the files in `dsconfig/`, which are equal in every stage."""

    reduce_elements: int = 10_000_000
    """`reduce_bucket_size`."""
    overlap: bool = True
    """`overlap_comm`: gradients are reduced while the backward pass goes on, from two buckets in turn."""
    contiguous: bool = True
    """`contiguous_gradients`: stages 1 and 2 make their reduce buckets whole, however small the model is. Else they
    copy together what there is to reduce, at most a bucket of it. DeepSpeed of 2022 and 2023 took no notice of it, nor
    of `overlap_comm`, in stage 1: neither was on there (engine.py, "meaningless in stage 1 and are ignored")."""
    multi_rank_all_reduce: bool = True
    """`use_multi_rank_bucket_allreduce` (DeepSpeed's default): stages 1 and 2 send a gradient to every rank, not only
    to its owner. DeepSpeed before 0.12 did not have it."""
    prefetch_elements: int = 10_000_000
    live_elements: int = 100_000_000
    """Parameters that stage 3 keeps gathered: the smaller of `stage3_max_live_parameters` and
    `stage3_max_reuse_distance`."""
    persistent_elements: int = 100_000
    """`stage3_param_persistence_threshold`: stage 3 keeps tensors of at most so many whole on every rank."""
    pins: bool = True
    """`pin_memory` of what is offloaded."""


def read_zero_settings(config: Mapping[str, Any]) -> ZeroSettings:
    """Those of an effective DeepSpeed configuration; DeepSpeed's own default where it does not say (zero/config.py).

    Raises:
        UserError: a size is no number of elements (`auto`, say), or what should be an object is none.
    """
    zero = block(config, "zero_optimization")
    overlap, optimizer = zero.get("overlap_comm"), block(zero, "offload_optimizer")

    def elements(name: str, default: float) -> int:
        # A key of stage 3 may be written with `stage3_` before it, and without.
        name = f"stage3_{name}" if f"stage3_{name}" in zero else name
        size = zero.get(name, default)
        if type(size) not in (int, float) or not 0 <= size < math.inf:
            raise UserError(f"zero_optimization.{name} {size!r:.60}; expected a number of elements")
        return int(size)

    return ZeroSettings(
        reduce_elements=elements("reduce_bucket_size", 5e8),
        overlap=zero.get("stage") == 3 if overlap is None else bool(overlap),
        contiguous=bool(zero.get("contiguous_gradients", True)) or bool(optimizer),
        multi_rank_all_reduce=zero.get("use_multi_rank_bucket_allreduce", True),
        prefetch_elements=elements("prefetch_bucket_size", 5e7),
        live_elements=min(elements("max_live_parameters", 1e9), elements("max_reuse_distance", 1e9)),
        persistent_elements=elements("param_persistence_threshold", 1e5),
        pins=bool(optimizer.get("pin_memory", False)),
    )


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
