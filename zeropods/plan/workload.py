"""What is trained: a model's tensors and products, and what a pass saves; ZeRO's settings; the
batch of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from zeropods.errors import UserError
from zeropods.plan.methods import (
    BF16_MASTERS,
    EIGHT_BIT,
    EIGHT_BIT_MOMENTS,
    FP32_MASTERS,
    FSDP2,
    NF4_BYTES,
    NO_MASTERS,
    OF_LABELS,
    QLORA,
    Method,
)
from zeropods.techniques import (
    HPZ,
    QUANTIZED_GRADIENTS,
    QUANTIZED_WEIGHTS,
    TECHNIQUES,
    Technique,
    block,
    lookup,
)

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
NVME = "nvme"
MASTER = 4
"""Bytes per parameter of an FP32 master."""
FORWARD, BACKWARD = 2, 4
"""FLOPs per matmul parameter and token: one product forward, two backward (Kaplan et al. 2020,
arXiv:2001.08361)."""
ATTENTIONS = ("eager", "sdpa", "flash_attention_2")
FUSED, MASKED, PLAIN, EAGER = "fused", "masked", "plain", "eager"
"""How attention runs: in a kernel that keeps no scores, in the same behind a window's mask, by
PyTorch's formula in FP32, or by the family's own code."""
Polynomial = Mapping[str, float]
"""Coefficients by the exponents of rows, tokens and labels: `120` is rows x tokens^2. For an
encoder-decoder, labels are the tokens of the target."""


def value_at(polynomial: Polynomial, rows: float, tokens: float, labels: float) -> float:
    """The value of the polynomial at these sizes."""
    value = 0.0
    for exponents, coefficient in polynomial.items():
        of_rows, of_tokens, of_labels = map(int, exponents)
        value += coefficient * rows**of_rows * tokens**of_tokens * labels**of_labels
    return value


class Weight(NamedTuple):
    """One parameter tensor."""

    size: int
    """Number of elements."""
    kind: str
    """`embedding`, `matrix`, `bias` or `norm`; weight decay leaves out the last two."""

    @property
    def is_matrix(self) -> bool:
        """Whether weight decay applies to the tensor, and a forward pass uses it as a matrix."""
        return self.kind in ("embedding", "matrix")


class Saved(NamedTuple):
    """Bytes that one forward pass saves for its backward pass, parameters left out."""

    layers: list[Polynomial]
    """Bytes of all layers together, in the encoder and in the decoder, or in the only stack."""
    inputs: list[Polynomial]
    """Bytes of the input of one layer, for the same stacks."""
    held: Polynomial
    """Bytes that layers are given beside their input, the same for all: masks, rotations.
    Checkpointing keeps them."""
    ends: Polynomial
    """Bytes saved outside the layers: embedding, the last norm, the head's input."""
    scores: int
    """Bytes per row and pair of tokens of a layer's largest tensor that grows with the square of
    tokens."""
    adapter: int = 0
    """Elements of all adapters of rank 1, in a pass with adapters."""
    adapted: Sequence[int] = ()
    """Number of linear layers with an adapter, in the same stacks."""

    def with_rank(self, rank: int) -> Saved:
        """The same with adapters of this rank; they were traced with rank 1.

        Beside what it keeps at rank 1, an adapter keeps an element in 16 bits for each token and
        each further rank: its narrow output.
        """
        layers = list[Polynomial]()
        for side, polynomial in enumerate(self.layers):
            # Rows x tokens in the encoder or the only stack, rows x labels in the decoder.
            exponents = "110" if side == 0 else "101"
            added_bytes = 2 * (rank - 1) * self.adapted[side]
            coefficient = polynomial.get(exponents, 0) + added_bytes
            layers.append({**polynomial, exponents: coefficient})
        return self._replace(layers=layers, adapter=rank * self.adapter)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """A model, as a pass on the meta device shows it (`plan.meta_model`)."""

    family: str
    """Type of the model, as configurations call it: `t5`, `llama`."""
    is_decoder_only: bool
    """Whether it has one stack of layers, so that source and target are one row."""
    is_encoder_only: bool = False
    """Whether this stack sees whole rows, and a row has one label, its class."""
    layers: list[int]
    """Number of layers in the encoder and in the decoder, or in the only stack."""
    layer_parameters: list[int]
    """Number of parameters of all these layers."""
    heads: int
    kv_heads: int
    """Number of heads of keys and of values; each serves heads / kv_heads heads of queries."""
    head_size: int
    inner: int
    """Width of the feed-forward part, all active experts together."""
    vocabulary: int
    positions: int | None
    """Tokens of the longest sequence: the positions that exist where they are learned, elsewhere
    the trained length."""
    window: int | None
    """Number of tokens that a token sees, itself included, in layers with a window."""
    windowed: int
    """Number of layers that see no further than the window."""
    drops: bool
    """Whether the model was published with dropout."""
    attentions: list[str]
    """Those of `ATTENTIONS` that transformers has for the model."""
    tied: bool
    """Whether the head's matrix is the embedding."""
    experts: str | None
    """Experts that a token uses, of all there are, as `2 of 8`."""
    weights: list[Weight]
    """All parameter tensors, in the model's order; a matrix that is used twice is listed once."""
    products: Polynomial
    """Multiply-adds of the layers' matrices in a forward pass."""
    trace: Callable[[str], Saved]
    """Gives what a pass saves, by its name: precision (`fp32`, `bf16`, `autocast`), kernel, and
    ` dropout`."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions in which the model can be trained."""
        return ("fp32", "bf16", "fp16") if self.is_decoder_only else ("fp32", "bf16")

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model, each counted once."""
        return sum(weight.size for weight in self.weights)

    @cached_property
    def matrices(self) -> int:
        """Number of elements of all matrices but embedding and head."""
        return sum(weight.size for weight in self.weights if weight.kind == "matrix")

    @cached_property
    def largest_matrix(self) -> int:
        """Number of elements of the largest matrix but embedding and head."""
        return max(weight.size for weight in self.weights if weight.kind == "matrix")

    @property
    def width(self) -> int:
        """Elements of a token's embedding."""
        return self.embedding // self.vocabulary

    @cached_property
    def embedding(self) -> int:
        """Number of elements of the embedding; an untied head has as many."""
        return next(weight.size for weight in self.weights if weight.kind == "embedding")

    @cached_property
    def largest_tensor(self) -> int:
        """Number of elements of the largest single parameter."""
        return max(weight.size for weight in self.weights)

    def layer_products(self, tokens: float, labels: float, *, whole: bool = False) -> float:
        """Multiply-adds of all layers in a forward pass over one row: matrices by token, and
        attention's products.

        Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) count the whole square of attention;
        under a causal mask half of it is needed, and only that is counted here: each token of a
        causal row attends to itself and those before it, 2 x layers x heads x head size x tokens^2
        / 2; with a window, only to those within it. An encoder needs the whole square, its decoder
        half of one, and cross-attention source x target. With mean lengths the result is a lower
        bound where lengths differ.

        Args:
            tokens: tokens of the source; for a causal model, of the whole row.
            labels: tokens of the target; for a causal model, those with a loss.
            whole: for a causal model, whether its kernel computes the whole square.
        """
        if not self.is_decoder_only:
            encoder, decoder = self.layers
            square = 2 * encoder * tokens**2 + decoder * (labels**2 + 2 * tokens * labels)
        elif whole:
            square = 2 * self.layers[0] * tokens**2
        else:
            unseen = max(0.0, tokens - (self.window or tokens))
            square = self.layers[0] * tokens**2 - self.windowed * unseen**2
        return value_at(self.products, 1, tokens, labels) + self.heads * self.head_size * square

    def training_flops(self, tokens: float, labels: float, *, whole: bool = False) -> float:
        """FLOPs to train on one row, forward and backward, without recomputation: 6 x (products of
        layers and head).

        The loss computes logits only where there is a label. The arguments are those of
        `layer_products`.
        """
        return (FORWARD + BACKWARD) * (
            self.layer_products(tokens, labels, whole=whole) + self.embedding * labels
        )


# The keys of a DeepSpeed configuration that its memory and traffic depend on.


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Settings of ZeRO that a plan depends on; defaults are those of the files in `dsconfig/`,
    equal in every stage."""

    reduce_elements: int = 10_000_000
    """`reduce_bucket_size`: number of elements of a reduce bucket."""
    overlap: bool = True
    """`overlap_comm`: gradients are reduced while the backward pass runs, from two buckets in
    turn."""
    contiguous: bool = True
    """`contiguous_gradients`: stages 1 and 2 make their reduce buckets whole, however small the
    model is. Otherwise they copy together what there is to reduce, at most a bucket of it.
    DeepSpeed of 2022 and 2023 ignored it in stage 1, and `overlap_comm` too: neither was on there
    (engine.py, "meaningless in stage 1 and are ignored")."""
    multi_rank_all_reduce: bool = True
    """`use_multi_rank_bucket_allreduce` (DeepSpeed's default): stages 1 and 2 send a gradient to
    every rank, not only to its owner. DeepSpeed before 0.12 did not have it."""
    prefetch_elements: int = 10_000_000
    live_elements: int = 100_000_000
    """Number of parameters that stage 3 keeps gathered: the smaller of `stage3_max_live_parameters`
    and `stage3_max_reuse_distance`."""
    persistent_elements: int = 100_000
    """`stage3_param_persistence_threshold`: stage 3 keeps tensors of at most this many elements
    whole on every rank."""
    sub_group_elements: int = 1_000_000_000
    """`sub_group_size`: number of elements of a rank's share from which on stage 3 closes a
    sub-group; it steps one after the other."""
    secondary_ranks: int = 1
    """`zero_hpz_partition_size`: number of processes, those of a pod, among which ZeRO++ divides
    all parameters a second time; 1 where it does not."""
    quantizes_weights: bool = False
    """`zero_quantized_weights`: stage 3 sends parameters as INT8."""
    quantizes_gradients: bool = False
    """`zero_quantized_gradients`: stage 3 sends gradients of matrices as INT4, where there are
    several pods."""
    on_nvme: bool = False
    """`offload_optimizer.device` is `nvme`: what stage 3 offloads of the optimizer lies on a disk,
    and a sub-group of it at a time in host memory."""
    nvme_buffers: int = 4
    """`offload_optimizer.buffer_count`: number of buffers in host memory for what lies there."""
    pins: bool = True
    """`pin_memory`: whether what is offloaded lies in pinned memory."""


def read_zero_settings(config: Mapping[str, Any]) -> ZeroSettings:
    """The settings of an effective DeepSpeed configuration; where a key is missing, DeepSpeed's own
    default (zero/config.py), and not that of `ZeroSettings`. `nvme_buffers` is not read.

    Raises:
        UserError: a size is not a number of elements (`auto`, say), or what should be an object is
            not one.
    """
    zero = block(config, "zero_optimization")
    optimizer = block(zero, "offload_optimizer")
    overlap = zero.get("overlap_comm")
    if overlap is None:
        # DeepSpeed's own default.
        overlap = zero.get("stage") == 3

    def elements(name: str, default: float) -> int:
        # A key of stage 3 may be written with or without `stage3_` before it.
        key = f"stage3_{name}" if f"stage3_{name}" in zero else name
        number = zero.get(key, default)
        # A truth value is no number here, though it is an `int` of Python.
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise UserError(
                f"zero_optimization.{key} {number!r:.60}; expected a number of elements"
            )
        return int(number)

    # `contiguous_gradients` is always on with offload (stage_1_and_2.py).
    is_contiguous = bool(zero.get("contiguous_gradients", True)) or bool(optimizer)
    return ZeroSettings(
        reduce_elements=elements("reduce_bucket_size", 5e8),
        overlap=bool(overlap),
        contiguous=is_contiguous,
        multi_rank_all_reduce=zero.get("use_multi_rank_bucket_allreduce", True),
        prefetch_elements=elements("prefetch_bucket_size", 5e7),
        live_elements=min(
            elements("max_live_parameters", 1e9), elements("max_reuse_distance", 1e9)
        ),
        persistent_elements=elements("param_persistence_threshold", 1e5),
        sub_group_elements=elements("sub_group_size", 1e9),
        secondary_ranks=_secondary_ranks(config),
        quantizes_weights=lookup(config, QUANTIZED_WEIGHTS) is True,
        quantizes_gradients=lookup(config, QUANTIZED_GRADIENTS) is True,
        on_nvme=optimizer.get("device") == NVME,
        pins=bool(optimizer.get("pin_memory", False)),
    )


def _secondary_ranks(config: Mapping[str, Any]) -> int:
    """Among how many processes ZeRO++ divides parameters a second time; 1 where it does not, or
    where the configuration says `auto`, which is replaced when a run starts."""
    number = lookup(config, HPZ)
    return number if type(number) is int and number > 1 else 1


# What one process trains on, whatever the model.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the batch of one forward pass of one process, padding included; and how its
    states are divided."""

    shape: Shape
    batch_size: int
    """Rows of one pass of one process."""
    tokens: int
    """Tokens per row; for a T5, those of the source."""
    labels: int
    """Tokens per row that carry a loss; for a T5, all of the target."""
    label_tokens: int | None = None
    """Tokens of all rows that really carry a loss, where they are known: the loss skips padding.
    None: all `labels`."""
    precision: str = "fp32"
    """`fp32`; `bf16`: BF16 weights and gradients beside an FP32 master; `fp16`: the same in FP16,
    or by autocast."""
    checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass."""
    rates_by_kind: bool = False
    """Whether the optimizer's parameter groups are those of `train.trainer`, not Trainer's."""
    technique: Technique = TECHNIQUES[0]
    ranks: int = 1
    """Number of processes that share the work."""
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    gradient_accumulation: int = 1
    """Forward and backward passes per step, whose gradients are added up."""
    attention: str = "sdpa"
    """One of `ATTENTIONS`."""
    before_ampere: bool = False
    """Whether the GPU is too old for FlashAttention, as a T4 or a V100 is."""
    dropout: bool | None = None
    """Whether there is dropout; if not given, as the model was published."""
    method: Method = field(default_factory=Method)
    """Masters, optimizer, loss and adapter."""

    def __post_init__(self) -> None:
        if not self.technique.is_planned:
            planned = ", ".join(technique.name for technique in TECHNIQUES if technique.is_planned)
            name = self.technique.name
            raise UserError(f"technique {name!r}: not planned yet; expected one of {planned}")

    @property
    def logit_rows(self) -> int:
        """Number of tokens for which the loss computes logits."""
        if self.method.loss != OF_LABELS:
            return self.batch_size * self.tokens
        if self.label_tokens is None:
            return self.batch_size * self.labels
        return self.label_tokens

    @property
    def head_tokens(self) -> int:
        """Tokens per row that the head is multiplied with, padding included."""
        return self.labels if self.method.loss == OF_LABELS else self.tokens

    @property
    def autocast(self) -> bool:
        """Whether weights and gradients are FP32 and only products FP16, on copies made in each
        pass: transformers' way of FP16 without DeepSpeed."""
        return self.precision == "fp16" and not self.technique.uses_deepspeed

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of a gradient."""
        return ELEMENT_BYTES["fp32" if self.autocast else self.precision]

    @property
    def is_half(self) -> bool:
        """Whether weights and gradients are BF16 or FP16; `method` says whether there is a master
        beside them."""
        return self.precision != "fp32" and not self.autocast

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 divides the states."""
        return self.technique.engine == FSDP2.engine

    @property
    def trained(self) -> int:
        """Number of elements that are trained: all of the model's or, with adapters, only
        theirs."""
        if self.method.adapter is None:
            return self.shape.parameters
        return self.saved().adapter

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained element, and of its gradient, where they lie between steps.

        peft makes adapters in FP32, DeepSpeed makes them BF16 again. FSDP's shards are FP32, unless
        the weights are BF16 through and through.
        """
        if self.technique.uses_deepspeed:
            return self.element_bytes
        if self.method.adapter is not None:
            return ELEMENT_BYTES["fp32"]
        if self.is_fsdp and self.method.masters != NO_MASTERS:
            return ELEMENT_BYTES["fp32"]
        return self.element_bytes

    @property
    def frozen_bytes(self) -> int:
        """Bytes of all weights that are not trained, which are the whole model with adapters, and 0
        without. QLoRA quantises matrices, and leaves all else in BF16."""
        shape = self.shape
        if self.method.adapter is None:
            return 0
        if self.method.adapter != QLORA:
            return self.element_bytes * shape.parameters
        other_elements = shape.parameters - shape.matrices
        return round(NF4_BYTES * shape.matrices) + self.element_bytes * other_elements

    @property
    def master_bytes(self) -> int:
        """Bytes of a trained element's master; 0 where the optimizer steps the weights."""
        if self.technique.uses_deepspeed:
            return 2 if self.method.masters == BF16_MASTERS else MASTER
        # FSDP keeps FP32 weights and casts them; adapters are FP32 themselves.
        if self.is_fsdp or self.method.adapter is not None:
            return 0
        has_masters = self.is_half and self.method.masters == FP32_MASTERS
        return MASTER if has_masters else 0

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments of a trained element: they have the type of what the optimizer
        steps, the master or else the element itself, unless they are quantised."""
        if self.method.optimizer == EIGHT_BIT:
            return EIGHT_BIT_MOMENTS
        stepped_bytes = self.master_bytes or self.trained_bytes
        return 2 * stepped_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes of a trained element in the model that is saved: of its master, where it has one.

        Adapters are saved as they are used.
        """
        if self.method.adapter is not None:
            return self.trained_bytes
        return self.master_bytes or self.trained_bytes

    @property
    def kernel(self) -> str:
        """The kernel that attention really runs: `FUSED`, `MASKED`, `PLAIN` or `EAGER`.

        Source: transformers 5.23 (`integrations/sdpa_attention.py`, `masking_utils.py`); PyTorch
        2.13's choice (`sdp_utils.cpp`): FlashAttention takes FP16 and BF16 on GPUs from Ampere on,
        without a mask; the memory-efficient kernel also takes FP32, older GPUs and a mask, but no
        keys that several heads share; for these the plain formula runs, in FP32. With a mask
        transformers repeats the keys itself.
        """
        shape = self.shape
        if self.attention == "eager":
            return EAGER
        if not shape.is_decoder_only:
            return FUSED
        reaches_window = shape.window is not None and self.tokens >= shape.window
        if self.attention == "sdpa" and reaches_window:
            return MASKED
        shares_keys = shape.kv_heads < shape.heads
        has_flash_attention = self.precision != "fp32" and not self.before_ampere
        if shares_keys and not has_flash_attention:
            return PLAIN
        return FUSED

    def saved(self) -> Saved:
        """What one forward pass of this workload keeps for its backward pass: traced at the first
        call for a kind of pass, which takes seconds unless its facts are shipped or cached."""
        if self.method.adapter is not None:
            pass_name = f"lora {self.kernel} {self.method.lora_targets}"
        elif self.autocast:
            pass_name = f"autocast {self.kernel}"
        elif self.is_half:
            # FP16 has the same sizes.
            pass_name = f"bf16 {self.kernel}"
        else:
            pass_name = f"fp32 {self.kernel}"
        # A dropout of None is the one that the model was published with.
        if self.shape.drops and self.dropout is not False:
            pass_name += " dropout"
        traced = self.shape.trace(pass_name)
        if self.method.adapter is None:
            return traced
        return traced.with_rank(self.method.lora_rank)

    def frozen_flops(self) -> float:
        """FLOPs by which a backward pass with adapters is shorter than one without: frozen weights
        need no gradient, while the adapters' own products, forward and backward, are added. 0
        without adapters."""
        if self.method.adapter is None:
            return 0.0
        shape = self.shape
        products = value_at(shape.products, 1, self.tokens, self.labels)
        frozen = FORWARD * self.batch_size * (products + shape.embedding * self.head_tokens)
        added = (FORWARD + BACKWARD) * self.batch_size * self.tokens * self.trained
        return frozen - added

    def flops(self) -> tuple[float, float]:
        """FLOPs of a forward and backward pass, a third of them forward; and FLOPs of what
        checkpointing computes again in the backward pass, 0 without it.

        Padding is computed too. With a mask, and where scores are kept, the whole square of
        attention is computed, at least twice what is needed.
        """
        whole = self.kernel != FUSED or self.shape.is_encoder_only
        of_a_row = self.shape.training_flops(self.tokens, self.labels, whole=whole)
        # `training_flops` has the head only where there is a label.
        unlabelled = self.head_tokens - self.labels
        of_a_row += (FORWARD + BACKWARD) * self.shape.embedding * unlabelled
        recomputed_of_a_row = 0.0
        if self.checkpointing:
            products = self.shape.layer_products(self.tokens, self.labels, whole=whole)
            recomputed_of_a_row = FORWARD * products
        return self.batch_size * of_a_row, self.batch_size * recomputed_of_a_row


def share(number: int, ranks: int) -> int:
    """Number of elements, or bytes, of one rank's share, rounded up: the last rank's is padded to
    the size of the others."""
    return -(-number // ranks)
