"""What one process trains a causal language model on: the sizes that memory and time follow from."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.attention import FUSED, kernel
from zeropods.plan.causal_flops import attention_products, causal_recomputed_flops, causal_training_flops
from zeropods.plan.causal_parameters import (
    causal_parameters,
    decay_groups,
    in_small_weights,
    largest_weight,
    matrices,
)
from zeropods.plan.causal_shapes import CausalShape
from zeropods.plan.causal_terms import causal_activation_terms, causal_moments
from zeropods.plan.flops import BACKWARD, FORWARD
from zeropods.plan.partitions import touched_of
from zeropods.plan.term import Term
from zeropods.plan.workload import Moments, Workload


@dataclass(frozen=True, kw_only=True)
class CausalJob(Workload):
    """A causal model and the batch of one forward pass of one process, padding included."""

    shape: CausalShape
    tokens: int
    """A row."""
    labels: int
    """Tokens a row that carry a loss."""
    attention: str = "sdpa"
    """One of `plan.attention.ATTENTIONS`."""
    before_ampere: bool = False
    """Whether the GPU is older than FlashAttention takes: a T4, a V100."""
    dropout: bool = False

    @property
    def kernel(self) -> str:
        """What attention really runs, of `plan.attention`."""
        return kernel(self.shape, self.attention, self.tokens, self.precision, self.before_ampere)

    @property
    def parameters(self) -> int:
        """Of the model, each counted once."""
        return causal_parameters(self.shape)

    @property
    def largest_tensor(self) -> int:
        """Elements of its largest parameter."""
        return largest_weight(self.shape)

    @property
    def matrices(self) -> int:
        """How many matrices a forward pass meets."""
        return matrices(self.shape)

    def in_small_tensors(self, threshold: int) -> int:
        """Parameters in tensors of at most `threshold` elements."""
        return in_small_weights(self.shape, threshold)

    def touched(self, ranks: int) -> int:
        """Elements of all tensors that a rank's share touches, in ZeRO's stages 1 and 2."""
        return touched_of(decay_groups(self.shape), ranks)

    def activation_terms(self) -> tuple[Term, ...]:
        """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
        return causal_activation_terms(self)

    def moments(self) -> Moments:
        """The same over the moments of a pass."""
        return causal_moments(self)

    def flops(self) -> tuple[float, float]:
        """Of a pass forward and backward, and of what checkpointing computes again.

        Behind a mask, and where scores are kept, the whole square is computed, at least twice what is needed.
        """
        beyond = 0.0 if self.kernel == FUSED else self._square() - attention_products(self.shape, self.tokens)
        both = causal_training_flops(self.shape, self.tokens, self.labels) + (FORWARD + BACKWARD) * beyond
        again = causal_recomputed_flops(self.shape, self.tokens) + FORWARD * beyond if self.checkpointing else 0.0
        return self.rows * both, self.rows * again

    def _square(self) -> float:
        return 2.0 * self.shape.layers * self.shape.heads * self.shape.head_size * self.tokens**2
