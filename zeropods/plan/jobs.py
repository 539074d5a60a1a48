"""The workload of a T5 and of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.activations import activation_terms, causal_activation_terms, causal_moments, moments
from zeropods.plan.parameters import (
    BACKWARD,
    FORWARD,
    attention_products,
    causal_parameters,
    causal_recomputed_flops,
    causal_training_flops,
    decay_groups,
    in_small_tensors,
    in_small_weights,
    largest_tensor,
    largest_weight,
    matrices,
    recomputed_flops,
    t5_parameters,
    training_flops,
    weight_tensors,
)
from zeropods.plan.shapes import CausalShape, T5Shape
from zeropods.plan.workload import FUSED, Moments, Term, Workload, kernel, parameter_groups, touched_of

# What one process trains a T5 on: the sizes that memory and time follow from.


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


# What one process trains a causal language model on: the sizes that memory and time follow from.


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
