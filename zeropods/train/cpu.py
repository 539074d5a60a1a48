"""A model in operations that suit a CPU: dropout in training, products in prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Dropout at a quarter of the cost: 16 random bits an element instead of a Bernoulli draw, and a mask of bits.
#
# On a CPU `bernoulli_` draws with one thread and takes a fifth of T5's training step. Sixteen bits of
# the same generator, compared with a threshold, give the rate to 1 in 65,536. The mask has all bits of
# an element or none, so that one `and` applies it: `where` takes three to seven times as long.

LEVELS = 1 << 16
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element."""


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rate: float) -> Tensor:
        kept, ctx.scale = _mask(values, rate)
        ctx.save_for_backward(kept)
        return _masked(values, kept, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _masked(gradients[0], kept, ctx.scale), None


class BitDropout(nn.Dropout):
    """Drops elements at the rate of `nn.Dropout`, on a CPU with cheaper masks."""

    def forward(self, input: Tensor) -> Tensor:
        """Zero each element with probability `p` while training, and scale the others by 1 / (1 - p)."""
        if not self.training or input.device.type != "cpu":
            return super().forward(input)
        return _Dropout.apply(input, self.p) if self.p else input


def _masked(values: Tensor, kept: Tensor, scale: float) -> Tensor:
    return (values.view(WORDS[values.element_size()]) & kept).view(values.dtype).mul_(scale)


def _mask(values: Tensor, rate: float) -> tuple[Tensor, float]:
    """-1, all bits set, for each element that stays, and 0 for the others: int16; and the scale that keeps the mean."""
    dropped = min(round(rate * LEVELS), LEVELS - 1)
    words = torch.empty((values.numel() + 3) // 4, dtype=torch.int64)
    # The range of all 64 bits; without it the top bit of every fourth element would be 0.
    bits = words.random_(-(1 << 63), None).view(torch.int16)[: values.numel()]
    kept = torch.ge(bits, dropped - LEVELS // 2, out=torch.empty_like(bits)).neg_()
    return kept.view(values.shape), LEVELS / (LEVELS - dropped)


# Products with weights that no longer change, laid out once as oneDNN multiplies them.
#
# MKL multiplies FP32 on an AMD without AVX-512, at half the speed; where there is none both are as fast.


class PackedLinear(nn.Module):
    """A linear layer without gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), layer.bias

    def forward(self, values: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return torch.ops.mkldnn._linear_pointwise(values, self.weight, self.bias, "none", [], "")


def prepack(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model that only predicts, in place, on a CPU with AVX-512.

    PyTorch's operations have no public name: where they are missing, layers stay as they are. The head stays, whose
    rows are embeddings too.
    """
    head, known = model.get_output_embeddings(), hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if model.device.type == "cpu" and known and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        _replace(model, nn.Linear, lambda layer: layer if layer is head else PackedLinear(layer))


# A model in operations that suit a CPU; names of parameters stay, and so do saved files.

Model = TypeVar("Model", bound=nn.Module)


def suit_cpu(model: Model) -> Model:
    """Replace every dropout, in place; those within attention are PyTorch's own."""
    _replace(model, nn.Dropout, lambda dropout: BitDropout(dropout.p))
    return model


def _replace(model: nn.Module, kind: type[nn.Module], made: Callable[[Any], nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is kind:
                setattr(module, name, made(child))
