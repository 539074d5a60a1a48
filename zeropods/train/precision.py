"""Which number format a run uses, and whether the hardware multiplies it."""

from __future__ import annotations

import torch

from zeropods.errors import UserError

AMPERE = (8, 0)
"""The first compute capability with TF32."""
TINY = "-tiny"
"""How the names of our own smallest shapes end."""


def multiplies_bf16() -> bool:
    """Whether this machine has BF16 arithmetic; without it PyTorch's BF16 is 200 times slower than FP32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def check_tf32(asked: bool) -> None:
    """Refuse TF32 where the hardware has none."""
    if asked and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= AMPERE):
        raise UserError("--tf32 True: no GPU here has TF32 (Ampere or later); leave it out")


def choose_tf32(asked: bool) -> None:
    """Let FP32 products be taken in TF32; without that, PyTorch's own default stays: it takes none."""
    if asked:
        torch.set_float32_matmul_precision("high")


def resolve_precision(asked: str, fp16_fault: str | None, model_id: str) -> str:
    """`fp32`, `bf16` or `fp16`; `auto` takes BF16 where the hardware has it and the model gains by it.

    Args:
        fp16_fault: why the model does not train in FP16; None where it does. It needs a GPU.
        model_id: name or folder.
    """
    if asked == "fp16" and fp16_fault is not None:
        raise UserError(f"--precision fp16: {fp16_fault}; use bf16 or fp32")
    if asked == "fp16" and not torch.cuda.is_available():
        raise UserError("--precision fp16: there is no GPU here, and CPUs only emulate FP16; use bf16 or fp32")
    if asked == "auto":
        return "bf16" if multiplies_bf16() and not _gains_nothing(model_id) else "fp32"
    return asked


def _gains_nothing(model_id: str) -> bool:
    """A CPU makes a kernel of BF16 for each new length, keeps it, and takes longer for that than a tiny model saves."""
    return model_id.endswith(TINY) and not torch.cuda.is_available()
