"""A model with adapters of rank 1 beside its frozen matrices, to trace what a pass of it saves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zeropods.errors import UserError
from zeropods.plan.methods import ALL_LINEAR


class Adapted(nn.Module):
    """A frozen linear layer beside an adapter of rank 1, as peft's LoRA runs it
    (peft/tuners/lora/layer.py, `Linear.forward`): the adapter is FP32, and so is its input, until
    autocast casts both."""

    def __init__(self, frozen: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.narrow = nn.Linear(inputs, 1, bias=False, device="meta", dtype=torch.float32)
        self.wide = nn.Linear(1, outputs, bias=False, device="meta", dtype=torch.float32)

    @property
    def weight(self) -> Any:
        """The frozen matrix, for code of a model that looks at it."""
        return self.frozen.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output with the adapter's added."""
        result: Tensor = self.frozen(hidden)
        low_rank = self.wide(self.narrow(hidden.to(torch.float32)))
        # peft scales by alpha / rank. Any factor saves as much.
        return (result + 2.0 * low_rank).to(result.dtype)

    @property
    def elements(self) -> int:
        """Number of elements of the adapter."""
        return self.narrow.weight.numel() + self.wide.weight.numel()


def adapted(model: PreTrainedModel, targets: str) -> PreTrainedModel:
    """A copy of the model in FP16, frozen, with adapters of rank 1 beside its target layers.

    The embedding's output needs a gradient, as it must with checkpointing
    (`enable_input_require_grads`).

    Args:
        targets: the layers with an adapter, as in `Method.lora_targets`.

    Raises:
        UserError: no layer of the model is a target.
    """
    model = copy.deepcopy(model)
    model.to(torch.float16)
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    ends = tuple(targets.split(","))
    # They are replaced after the walk, so that it does not come to what is inside of them.
    target_layers = []
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D) and module is not head
        is_target = targets == ALL_LINEAR or name.endswith(ends)
        if is_linear and is_target:
            target_layers.append((name, module))
    if not target_layers:
        raise UserError(
            f"--lora-targets {targets}: no linear layer of this model is called so; "
            f"give {ALL_LINEAR}, or ends of names such as q_proj,v_proj"
        )
    for name, module in target_layers:
        inputs, outputs = _sizes(module)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(module, inputs, outputs))
    model.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, hidden: hidden.requires_grad_(True)
    )
    return model


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Number of inputs and of outputs of a linear layer."""
    matrix = module.get_parameter("weight")
    rows, columns = matrix.shape
    # transformers' Conv1D holds its matrix transposed.
    if isinstance(module, Conv1D):
        return int(rows), int(columns)
    return int(columns), int(rows)
