"""What one process trains on: the sizes that memory and time follow from."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.parameters import BYTES, largest_tensor, t5_parameters
from zeropods.plan.shapes import T5Shape


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and the batch of one forward pass of one process, padding included."""

    shape: T5Shape
    rows: int
    source_tokens: int
    """A row."""
    target_tokens: int
    precision: str = "fp32"
    """`fp32`, or `bf16`: BF16 weights and gradients beside an FP32 master."""
    checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass."""
    dropout: bool = True
    own_rates: bool = False
    """Whether the optimizer's parameter groups are those of `train.rates`, not Trainer's."""
    accumulates: bool = False
    """Whether gradients of several passes are added up before a step."""

    @property
    def parameters(self) -> int:
        """Of the model, each counted once."""
        return t5_parameters(self.shape)

    @property
    def largest_tensor(self) -> int:
        """Elements of its largest parameter."""
        return largest_tensor(self.shape)

    @property
    def element_bytes(self) -> int:
        """Of a weight, a gradient, an activation."""
        return BYTES[self.precision]

    @property
    def is_half(self) -> bool:
        """Whether weights are kept a second time, as an FP32 master."""
        return self.precision != "fp32"
