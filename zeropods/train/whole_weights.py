"""The weights of a model that ZeRO has divided among the ranks, put together."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """FP32 weights by name, on the CPU, a tied one once, and what else a model keeps; every rank must call it.

    DeepSpeed's own gathering gives ZeRO-3's BF16 copies, which have lost their low bits, and a copy for
    each name of a tied weight. Here the optimizer's masters are gathered, one at a time.

    Args:
        keep: False for a rank that only takes part; its result is empty.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    whole = {}
    for name, parameter in model.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        if keep:
            # Stage 0 has no master beside the parameter itself.
            gathered = parameter.detach() if master is None else master
            whole[name] = gathered.to("cpu", torch.float32, copy=True).view(_shape(parameter))
    return {**whole, **_kept_buffers(model)} if keep else whole


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What is no weight, but is saved with them; ZeRO does not divide it."""
    return {
        f"{place}.{name}".lstrip("."): buffer.to("cpu", copy=True)
        for place, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _shape(parameter: nn.Parameter) -> torch.Size:
    """The whole shape, also of a parameter that ZeRO-3 has divided."""
    return getattr(parameter, "ds_shape", parameter.shape)
