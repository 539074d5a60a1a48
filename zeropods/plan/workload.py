"""What one process trains on, whatever the model: the sizes that memory and time follow from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from zeropods.plan.technique import Technique
from zeropods.plan.term import Term

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
