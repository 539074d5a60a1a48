"""What one process trains on, whatever the model: the sizes that memory and time follow from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from zeropods.errors import UserError
from zeropods.plan.parameters import POSITION_BUCKETS, embedding
from zeropods.plan.shapes import CausalShape, T5Shape, window
from zeropods.techniques import Technique

# One part of a plan's memory: how many bytes, and from what.

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "context")
"""What the memory of a GPU is divided into."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Term:
    """Bytes of one process, with their formula."""

    name: str
    bytes: int
    formula: str
    """With the numbers put in: `4 B x 737.7 M / 3 ranks`."""
    part: str = "buffers"
    """One of `PARTS`."""


def total(terms: Iterable[Term], part: str | None = None) -> int:
    """Bytes of all terms, or of those of one part."""
    return sum(term.bytes for term in terms if part in (None, term.part))


def elements(size: int, number: float, ranks: int = 1) -> str:
    """The formula of `number` elements of `size` bytes, of which each of some ranks has its share."""
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    return f"{size} B x {short(number)}{shared}"


def share(number: int, ranks: int) -> int:
    """Elements of one rank where some share them; the last partition is padded to the size of the others."""
    return -(-number // ranks)


def short(number: float) -> str:
    """A count as people read it: `737.7 M`."""
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g}"


# What one process trains on, whatever the model: the sizes that memory and time follow from.

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Moments:
    """Bytes of activations and gradients at the moments of a pass at which there can be most of both."""

    loss: int
    """All that was saved, and the head's own gradients; there is no gradient of a parameter yet."""
    backward: tuple[tuple[int, int], ...]
    """In the order of the pass: what is saved and at work, and the gradients of parameters made by then."""


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A model and the batch of one forward pass of one process, padding included."""

    rows: int
    precision: str = "fp32"
    """`fp32`, or `bf16`: BF16 weights and gradients beside an FP32 master; `fp16`: alike, or by autocast."""
    checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass."""
    own_rates: bool = False
    """Whether the optimizer's parameter groups are those of `train.rates`, not Trainer's."""
    accumulates: bool = False
    """Whether gradients of several passes are added up before a step."""

    autocast: bool = False
    """Whether weights and gradients are FP32 and products alone FP16, of copies made in each pass."""

    def under(self, technique: Technique) -> Self:
        """The same as a technique trains it: without DeepSpeed FP16 is transformers' autocast."""
        return replace(self, autocast=self.precision == "fp16" and technique.stage == 0)

    @property
    def element_bytes(self) -> int:
        """Of a weight and a gradient."""
        return ELEMENT_BYTES["fp32" if self.autocast else self.precision]

    @property
    def activation_bytes(self) -> int:
        """Of an activation."""
        return ELEMENT_BYTES[self.precision]

    @property
    def is_half(self) -> bool:
        """Whether weights are kept a second time, as an FP32 master."""
        return self.precision != "fp32" and not self.autocast

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Of the model, each counted once."""

    @property
    @abstractmethod
    def largest_tensor(self) -> int:
        """Elements of its largest parameter."""

    @property
    @abstractmethod
    def matrices(self) -> int:
        """How many matrices a forward pass meets."""

    @abstractmethod
    def in_small_tensors(self, threshold: int) -> int:
        """Parameters in tensors of at most `threshold` elements."""

    @abstractmethod
    def touched(self, ranks: int) -> int:
        """Elements of all tensors that a rank's share touches, in ZeRO's stages 1 and 2 (`plan.partitions`)."""

    @abstractmethod
    def activation_terms(self) -> tuple[Term, ...]:
        """The most that there is at one time: everything saved, and the head's transient or that of one layer."""

    @abstractmethod
    def moments(self) -> Moments:
        """The same over the moments of a pass."""

    @abstractmethod
    def flops(self) -> tuple[float, float]:
        """Of a pass forward and backward, a third of them forward; and of what checkpointing computes again."""


# How attention is computed: by name, by what really runs, and the bytes that it saves for its backward pass.
#
# Source: transformers 5.23 (`integrations/sdpa_attention.py`, `masking_utils.py` and each family's
# `eager_attention_forward`); PyTorch 2.13's choice of a kernel (`sdp_utils.cpp`): FlashAttention takes FP16 and BF16
# on
# GPUs from Ampere on, without a mask; the memory-efficient kernel takes FP32, older GPUs and a mask too, but no keys
# that
# several heads share, and then the plain formula runs, in FP32. Behind a mask transformers repeats the keys itself.

ATTENTIONS = ("eager", "sdpa", "flash_attention_2")
FUSED, MASKED, PLAIN, EAGER = "fused", "masked", "plain", "eager"
"""What runs: a kernel that keeps no score, the same behind a window's mask, PyTorch's formula in FP32, the family's."""
FLOAT, MASK = 4, 1


def attentions(shape: CausalShape) -> tuple[str, ...]:
    """Those that transformers has for a family: BLOOM's position biases are in its own only."""
    return ("eager",) if shape.family == "bloom" else ATTENTIONS


def check_attention_of(shape: CausalShape, attention: str, precision: str, before_ampere: bool) -> None:
    """Refuse what cannot run.

    Raises:
        UserError: another name, one that the family lacks, or FlashAttention-2 in FP32 or on an older GPU.
    """
    if attention not in ATTENTIONS:
        raise UserError(f"--attention {attention}; expected {', '.join(ATTENTIONS)} or all")
    if attention not in attentions(shape):
        raise UserError(f"--attention {attention}: {shape.family} has eager only; give --attention eager")
    if attention == "flash_attention_2" and precision == "fp32":
        raise UserError("--attention flash_attention_2: it takes no fp32; give --precision bf16 or --attention sdpa")
    if attention == "flash_attention_2" and before_ampere:
        raise UserError("--attention flash_attention_2: it needs an Ampere GPU or a later one; give --attention sdpa")


def kernel(shape: CausalShape, attention: str, tokens: int, precision: str, before_ampere: bool) -> str:
    """What runs over rows of so many tokens: `FUSED`, `MASKED`, `PLAIN` or `EAGER`."""
    if attention == "eager":
        return EAGER
    if attention == "sdpa" and tokens >= (window(shape) or tokens + 1):
        return MASKED
    shares_keys = shape.kv_heads < shape.heads
    return PLAIN if shares_keys and (precision == "fp32" or before_ampere) else FUSED


def attention_bytes(shape: CausalShape, running: str, size: int, dropout: bool, rows: int, length: int) -> int:
    """Saved by one layer: queries, keys, values and, where scores are kept, probabilities; its output is not in it.

    Args:
        running: of `kernel`.
        size: bytes of an element.
        length: tokens a row.
    """
    tokens, scores = rows * length, rows * shape.heads * length * length
    queries, keys = tokens * shape.heads * shape.head_size, tokens * shape.kv_heads * shape.head_size
    if running == FUSED:
        return size * (queries + 2 * keys) + FLOAT * tokens * shape.heads
    # Keys and values are repeated for each head of queries.
    each = FLOAT if running == PLAIN else size
    if running == MASKED:
        return 3 * each * queries + FLOAT * tokens * shape.heads + size * rows * length * length
    return 3 * each * queries + score_bytes(shape, running, size, dropout) * scores


def score_bytes(shape: CausalShape, running: str, size: int, dropout: bool) -> int:
    """Saved for each score: the softmax's output, what the values are multiplied with if that is another, a mask."""
    softmax = softmax_bytes(shape, running, size)
    if dropout:
        return softmax + MASK + (softmax if running == PLAIN else size)
    return softmax if running == PLAIN or softmax == size else softmax + size


def softmax_bytes(shape: CausalShape, running: str, size: int) -> int:
    """Of one score in the softmax, which all but GPT-2's computes in FP32."""
    if running in (FUSED, MASKED):
        return 0
    return size if running == EAGER and shape.family == "gpt2" else FLOAT


# Gradients of a rank in ZeRO's stages 1 and 2: whole tensors, also those of which its share has only a part.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py: `get_partition_info` says which tensors a rank's share touches, in each
# parameter group of the optimizer; `copy_grads_in_partition` makes a buffer of the sum of their sizes.


def touched_of(groups: Sequence[Sequence[int]], ranks: int) -> int:
    """Elements of all tensors that the share of a rank touches, of the rank with most of them.

    Args:
        groups: the elements of each tensor by parameter group of the optimizer, in the model's order.
    """
    return max(map(sum, zip(*(_of_group(group, ranks) for group in groups if group), strict=True)))


def parameter_groups(shape: T5Shape, own_rates: bool) -> tuple[list[int], ...]:
    """Elements of each tensor of a T5 by parameter group, in the model's order.

    Args:
        own_rates: parameter groups as `train.rates` makes them: matrices, embedding, position biases, norms. Else as
            Trainer makes them: matrices with the embedding, and what is not decayed.
    """
    projection, feed_forward = shape.d_model * shape.heads * shape.d_kv, shape.d_model * shape.d_ff
    bias, norm = POSITION_BUCKETS * shape.heads, shape.d_model
    matrices, biases, norms, undecayed = [], [], [], []
    for attentions in (1, 2):
        sub_layers = shape.layers * (attentions + 1)
        matrices += shape.layers * (attentions * 4 * [projection] + 2 * [feed_forward])
        biases += [bias]
        norms += (sub_layers + 1) * [norm]
        undecayed += [bias, *(sub_layers + 1) * [norm]]
    if own_rates:
        return matrices, [embedding(shape)], biases, norms
    return [embedding(shape), *matrices], undecayed


def _of_group(sizes: Sequence[int], ranks: int) -> list[int]:
    """By rank; a group is cut into equal shares wherever a tensor ends."""
    part, held, begin = share(sum(sizes), ranks), [0] * ranks, 0
    for size in sizes:
        end = begin + size
        for rank in range(begin // part, min(ranks, share(end, part))):
            held[rank] += size
        begin = end
    return held
