"""AdamW over an FP32 master of BF16 parameters.

BF16 weights alone do not learn: an update smaller than a weight's last bit is rounded away.
Autocast keeps FP32 weights instead, and casts all of them in every step. Here the casts happen
once, after the update, and gradients are BF16, as in mixed precision training (Micikevicius et
al., arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

Model = TypeVar("Model", bound=nn.Module)


class MasterAdamW(AdamW):
    """AdamW that keeps an FP32 master of every parameter, and writes the rounded copy back.

    The optimizer's own groups hold the masters, so that its state (and a checkpoint of it) is FP32
    and complete: `state_dict` carries the masters as well.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        """Make the masters from the parameters of these groups, which stay in `copies`."""
        self.copies: list[Tensor] = []
        groups_of_masters = []
        for group in groups:
            self.copies.extend(group["params"])
            masters = [copy.detach().float().clone() for copy in group["params"]]
            groups_of_masters.append({**group, "params": masters})
        super().__init__(groups_of_masters, **options)

    @property
    def masters(self) -> list[Tensor]:
        """The masters in the order of the groups, which is that of `copies`."""
        masters: list[Tensor] = []
        for group in self.param_groups:
            masters.extend(group["params"])
        return masters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the masters from the copies' gradients, then round the masters into the copies.

        A parameter without a gradient stays as it is.
        """
        updated_masters = []
        bf16_gradients = []
        for master, copy in zip(self.masters, self.copies, strict=True):
            if copy.grad is not None:
                updated_masters.append(master)
                bf16_gradients.append(copy.grad)
        gradients = [torch.empty_like(master) for master in updated_masters]
        if gradients:
            # On a GPU this takes a few kernels for all gradients, not one for each.
            torch._foreach_copy_(gradients, bf16_gradients)
        for master, gradient in zip(updated_masters, gradients, strict=True):
            master.grad = gradient
        result = super().step(closure)
        torch._foreach_copy_(self.copies, self.masters)
        # The masters' gradients: those of the copies are dropped by `zero_grad` below.
        super().zero_grad()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the copies, whatever `set_to_none` says; masters keep none."""
        for copy in self.copies:
            copy.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, and the masters in the order of the groups."""
        return {**super().state_dict(), "masters": self.masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masters from a state, and round them into the copies."""
        state = dict(state_dict)
        saved_masters = state.pop("masters")
        for master, saved in zip(self.masters, saved_masters, strict=True):
            master.copy_(saved)
        super().load_state_dict(state)
        torch._foreach_copy_(self.copies, self.masters)

    def masters_by_copy(self) -> dict[int, Tensor]:
        """The master of each parameter, by `id(parameter)`."""
        masters = {}
        for copy, master in zip(self.copies, self.masters, strict=True):
            masters[id(copy)] = master
        return masters


def round_to_bf16(model: Model) -> Model:
    """Round a model's parameters to BF16 in place.

    Buffers stay: rotary angles of long texts need all their bits.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model
