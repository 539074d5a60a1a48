"""Which number format a run uses, and whether the hardware multiplies it."""

from __future__ import annotations

import torch

from zeropods.errors import UserError


def multiplies_bf16() -> bool:
    """Whether this machine has BF16 arithmetic; without it PyTorch's BF16 is 200 times slower than FP32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def resolve_precision(asked: str) -> str:
    """`fp32` or `bf16`; `auto` takes BF16 where the hardware has it. FP16 is refused."""
    if asked == "fp16":
        raise UserError("--precision fp16: T5's activations overflow FP16, the loss becomes NaN; use bf16 or fp32")
    if asked == "auto":
        return "bf16" if multiplies_bf16() else "fp32"
    return asked
