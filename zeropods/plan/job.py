"""What one process trains a T5 on: the sizes that memory and time follow from."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.activations import activation_terms
from zeropods.plan.flops import recomputed_flops, training_flops
from zeropods.plan.moments import moments
from zeropods.plan.parameters import in_small_tensors, largest_tensor, t5_parameters, weight_tensors
from zeropods.plan.partitions import parameter_groups, touched_of
from zeropods.plan.shapes import T5Shape
from zeropods.plan.term import Term
from zeropods.plan.workload import Moments, Workload


@dataclass(frozen=True, kw_only=True)
class Job(Workload):
    """A T5 and the batch of one forward pass of one process, padding included."""

    shape: T5Shape
    source_tokens: int
    """A row."""
    target_tokens: int
    dropout: bool = True

    @property
    def parameters(self) -> int:
        """Of the model, each counted once."""
        return t5_parameters(self.shape)

    @property
    def largest_tensor(self) -> int:
        """Elements of its largest parameter."""
        return largest_tensor(self.shape)

    @property
    def matrices(self) -> int:
        """How many matrices a forward pass meets."""
        return weight_tensors(self.shape)

    def in_small_tensors(self, threshold: int) -> int:
        """Parameters in tensors of at most `threshold` elements."""
        return in_small_tensors(self.shape, threshold)

    def touched(self, ranks: int) -> int:
        """Elements of all tensors that a rank's share touches, in ZeRO's stages 1 and 2."""
        return touched_of(parameter_groups(self.shape, self.own_rates), ranks)

    def activation_terms(self) -> tuple[Term, ...]:
        """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
        return activation_terms(self)

    def moments(self) -> Moments:
        """The same over the moments of a pass."""
        return moments(self)

    def flops(self) -> tuple[float, float]:
        """Of a pass forward and backward, and of what checkpointing computes again; padding is computed too."""
        source, target = self.rows * self.source_tokens, self.rows * self.target_tokens
        again = recomputed_flops(self.shape, source, target) if self.checkpointing else 0.0
        return training_flops(self.shape, source, target), again
