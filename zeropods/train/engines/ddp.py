"""PyTorch alone: one process by itself, or several under DistributedDataParallel.

Every rank holds the whole model and the whole optimizer. BF16 weights have FP32 masters of our own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers.utils import SAFE_WEIGHTS_NAME

from zeropods.train.engines.base import Engine
from zeropods.train.flags import RunArguments
from zeropods.train.master_adamw import MasterAdamW, round_to_bf16


class Ddp(Engine):
    """One process by itself, or several whose gradients PyTorch averages."""

    def prepare_model(self, model: nn.Module, precision: str) -> None:
        """Round the parameters to BF16 where that was asked for.

        FP16 is transformers' autocast, which needs FP32 weights.
        """
        if precision == "bf16":
            round_to_bf16(model)

    def optimizer(self, precision: str) -> tuple[type[Optimizer], dict[str, object]]:
        """AdamW: for BF16 this project's, which keeps FP32 masters, otherwise torch's."""
        optimizer_class: type[Optimizer] = AdamW
        if precision == "bf16":
            optimizer_class = MasterAdamW
        return optimizer_class, adamw_settings(self.arguments)

    def weights_to_save(
        self, model: nn.Module, optimizer: object, *, is_writer: bool
    ) -> dict[str, Tensor] | None:
        """The FP32 masters, since the BF16 copies have lost their low bits.

        Returns:
            None where there are no masters; an empty dict on a rank that does not write.
        """
        masters = masters_of(optimizer)
        if not masters:
            return None
        weights: dict[str, Tensor] = {}
        if is_writer:
            for name, value in model.state_dict(keep_vars=True).items():
                weights[name] = masters.get(id(value), value.detach())
        return weights

    @torch.no_grad()
    def load_masters(self, model: nn.Module, optimizer: object, checkpoint: Path) -> None:
        """Load a checkpoint's weights into the masters, where there are any."""
        masters = masters_of(optimizer)
        if not masters:
            return
        parameters = model.state_dict(keep_vars=True)
        for name, weight in load_file(checkpoint / SAFE_WEIGHTS_NAME).items():
            parameter = parameters[name]
            # A buffer, or a parameter that is not trained, has no master.
            if parameter.requires_grad:
                masters[id(parameter)].copy_(weight)


def masters_of(optimizer: object) -> dict[int, Tensor]:
    """The FP32 master of each parameter, by `id(parameter)`; empty where there are none."""
    # Once training has begun, accelerate has wrapped the optimizer.
    innermost = getattr(optimizer, "optimizer", optimizer)
    if isinstance(innermost, MasterAdamW):
        return innermost.masters_by_copy()
    return {}


def adamw_settings(arguments: RunArguments) -> dict[str, object]:
    """Arguments of AdamW, of either kind.

    Weight decay comes with the parameter groups.
    """
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return {"lr": arguments.learning_rate, "betas": betas, "fused": True}
