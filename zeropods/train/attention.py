"""Which implementation of attention a model can run with here."""

from __future__ import annotations

import importlib.util
import logging

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from zeropods.errors import UserError

NAMES = ("eager", "sdpa", "flash_attention_2")
AMPERE = (8, 0)
"""Compute capability that FlashAttention-2 needs."""
log = logging.getLogger(__name__)


def check_attention(name: str, precision: str) -> None:
    """Refuse an implementation that this machine cannot run.

    Args:
        precision: as it is resolved: `fp32`, `bf16` or `fp16`.
    """
    if name not in NAMES:
        raise UserError(f"--attn_implementation {name!r}; expected {', '.join(NAMES)}")
    reason = _without_flash(precision) if name == "flash_attention_2" else None
    if reason is not None:
        raise UserError(f"--attn_implementation {name}: {reason}; use --attn_implementation sdpa")


def attention_for(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str) -> str:
    """The implementation for a family: SDPA becomes `eager` where the family has none, which is logged.

    Raises:
        UserError: FlashAttention-2 for a family without it.
    """
    if name == "flash_attention_2" and not model_class._supports_flash_attn:
        raise UserError(
            f"--attn_implementation {name}: {config.model_type} has no FlashAttention; use --attn_implementation sdpa"
        )
    soft_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if name == "sdpa" and (soft_capped or not model_class._supports_sdpa):
        log.warning("%s: no SDPA for this family; its attention runs as --attn_implementation eager", config.model_type)
        return "eager"
    return name


def _without_flash(precision: str) -> str | None:
    if precision == "fp32":
        return "FlashAttention-2 has no FP32 kernels (--precision bf16 or fp16)"
    if not torch.cuda.is_available():
        return "FlashAttention-2 needs a CUDA GPU, and this process has none"
    capability = torch.cuda.get_device_capability()
    if capability < AMPERE:
        have = ".".join(map(str, capability))
        return (
            f"FlashAttention-2 needs a GPU of compute capability 8.0 or more, {torch.cuda.get_device_name()} has {have}"
        )
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return None
