"""What one process trains on, whatever the model: the sizes that memory and time follow from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from zeropods.plan.shapes import BACKWARD, FORWARD, FUSED, Shape
from zeropods.techniques import Technique

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "context")
"""What the memory of a GPU is divided into."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the batch of one forward pass of one process, padding included."""

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
    accumulates: bool = False
    """Whether gradients of several passes are added up before a step."""
    attention: str = "sdpa"
    """One of `plan.shapes.ATTENTIONS`."""
    before_ampere: bool = False
    """Whether the GPU is older than FlashAttention takes: a T4, a V100."""
    dropout: bool | None = None
    """Whether there is dropout; as the model was published if not given."""
    autocast: bool = False
    """Whether weights and gradients are FP32 and products alone FP16, of copies made in each pass."""

    def under(self, technique: Technique) -> Self:
        """The same as a technique trains it: without DeepSpeed FP16 is transformers' autocast."""
        return replace(self, autocast=self.precision == "fp16" and technique.stage == 0)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of a gradient."""
        return ELEMENT_BYTES["fp32" if self.autocast else self.precision]

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return ELEMENT_BYTES[self.precision]

    @property
    def is_half(self) -> bool:
        """Whether weights are kept a second time, as an FP32 master."""
        return self.precision != "fp32" and not self.autocast

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        return self.shape.drops if self.dropout is None else self.dropout

    @property
    def kernel(self) -> str:
        """What attention really runs: `FUSED`, `MASKED`, `PLAIN` or `EAGER`."""
        return self.shape.kernel(self.attention, self.tokens, self.precision, self.before_ampere)

    def touched(self, ranks: int) -> int:
        """Elements of all tensors that a rank's share touches in ZeRO's stages 1 and 2, of the rank with most of them.

        Source: DeepSpeed 0.19.8, stage_1_and_2.py: `get_partition_info` says which tensors a rank's share touches, in
        each parameter group of the optimizer; `copy_grads_in_partition` makes a buffer of the sum of their sizes.
        """
        changes: Counter[int] = Counter()
        for sizes in self.shape.groups(self.own_rates):
            # A parameter group is cut into equal shares wherever a tensor ends.
            part, begin = share(sum(sizes), ranks), 0
            for size in sizes:
                changes[begin // part] += size
                begin += size
                changes[min(ranks, share(begin, part))] -= size
        return max(accumulate(change for _, change in sorted(changes.items())))

    def flops(self) -> tuple[float, float]:
        """FLOPs of a pass forward and backward, a third of them forward; and of what checkpointing computes again.

        Padding is computed too. Behind a mask, and where scores are kept, the whole square of attention is computed, at
        least twice what is needed.
        """
        shape = self.shape
        beyond = 0.0 if self.kernel == FUSED else shape.unneeded_products(self.tokens)
        both = shape.training_flops(self.tokens, self.labels) + (FORWARD + BACKWARD) * beyond
        again = shape.recomputed_flops(self.tokens, self.labels) + FORWARD * beyond if self.checkpointing else 0.0
        return self.rows * both, self.rows * again


# One part of a plan's memory: how many bytes, and from what.


@dataclass(frozen=True)
class Term:
    """Bytes of one process, with their formula."""

    name: str
    bytes: int
    formula: str
    """With the numbers put in: `4 B x 737.7 M / 3 ranks`."""
    part: str = "buffers"
    """One of `PARTS`."""

    @classmethod
    def of(cls, name: str, size: int, number: int, ranks: int = 1, part: str = "buffers") -> Term:
        """`number` elements of `size` bytes, of which each of some ranks has its share."""
        shared = f" / {ranks} ranks" if ranks > 1 else ""
        return cls(name, size * share(number, ranks), f"{size} B x {short(number)}{shared}", part)


def total(terms: Iterable[Term], part: str | None = None) -> int:
    """Bytes of all terms, or of those of one part."""
    return sum(term.bytes for term in terms if part in (None, term.part))


def share(number: int, ranks: int) -> int:
    """Elements of one rank where some share them; the last partition is padded to the size of the others."""
    return -(-number // ranks)


def short(number: float) -> str:
    """A count as people read it: `737.7 M`."""
    size, prefix = next(((size, f" {prefix}") for size, prefix in PREFIXES if number >= size), (1, ""))
    return f"{number / size:.4g}{prefix}"
