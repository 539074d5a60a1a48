"""AdamW over an FP32 master of BF16 parameters, and learning rates by kind of weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

# AdamW over an FP32 master of BF16 parameters.
#
# BF16 weights alone do not learn: an update smaller than a weight's last bit is rounded away. Autocast
# keeps FP32 weights instead, and casts all of them in every step. Here the casts happen once, after the
# update, and gradients are BF16, as in mixed precision training (Micikevicius et al., arXiv:1710.03740).

Model = TypeVar("Model", bound=nn.Module)


class MasterAdamW(AdamW):
    """AdamW that keeps an FP32 master of every parameter, and writes the rounded copy back.

    The optimizer's own groups hold the masters, so that its state (and a checkpoint of it) is FP32
    and complete: `state_dict` carries the masters as well.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        groups = [dict(group) for group in groups]
        self.copies: list[list[Tensor]] = [list(group["params"]) for group in groups]
        for group in groups:
            group["params"] = [p.detach().float().clone() for p in group["params"]]
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the masters from the copies' gradients, then round the masters into the copies."""
        masters, copies = self._pairs()
        _widen_gradients(masters, copies)
        result = super().step(closure)
        torch._foreach_copy_(copies, masters)
        for master in masters:
            master.grad = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the copies."""
        for copy in self._pairs()[1]:
            copy.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, and the masters in the order of the groups."""
        return {**super().state_dict(), "masters": self._pairs()[0]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the masters back from a state, and round them into the copies."""
        state = dict(state_dict)
        masters, copies = self._pairs()
        for master, saved in zip(masters, state.pop("masters"), strict=True):
            master.copy_(saved)
        super().load_state_dict(state)
        torch._foreach_copy_(copies, masters)

    def masters_by_copy(self) -> dict[int, Tensor]:
        """The master of each parameter, by `id(parameter)`."""
        masters, copies = self._pairs()
        return {id(copy): master for copy, master in zip(copies, masters, strict=True)}

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        masters = [p for group in self.param_groups for p in group["params"]]
        return masters, [copy for group in self.copies for copy in group]


def _widen_gradients(masters: list[Tensor], copies: list[Tensor]) -> None:
    """Give each master its copy's gradient in FP32; on a GPU a few kernels do it for all, not one for each."""
    narrow = [copy.grad for copy in copies if copy.grad is not None]
    wide = [torch.empty_like(master) for master, copy in zip(masters, copies, strict=True) if copy.grad is not None]
    if wide:
        torch._foreach_copy_(wide, narrow)
    trained = (master for master, copy in zip(masters, copies, strict=True) if copy.grad is not None)
    for master, gradient in zip(trained, wide, strict=True):
        master.grad = gradient


def round_to_bf16(model: Model) -> Model:
    """Round a model's parameters to BF16 in place. Buffers stay: rotary angles of long texts need all their bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


@torch.no_grad()
def load_masters(masters: dict[int, Tensor], model: nn.Module, weights: Path) -> None:
    """Set the masters of a model's parameters, by `id(parameter)`, to the FP32 weights in a safetensors file."""
    from safetensors.torch import load_file

    named = model.state_dict(keep_vars=True)
    for name, saved in load_file(weights).items():
        masters[id(named[name])].copy_(saved)


# Learning rates by kind of weight, for a T5 that starts from random weights.
#
# AdamW moves every weight by about the learning rate, whatever its size. T5 was made with Adafactor, which
# steps in proportion to a weight's size (Shazeer & Stern 2018, arXiv:1804.04235), and it is drawn for that:
# the embedding with deviation 1, norms at 1, others with about d_model ** -0.5. Above all the relative
# position bias must grow from 0.1 to several units before a head can look at the neighbouring token: at a
# common rate of 0.001 that alone takes thousands of steps. In trials of t5-tiny, after
# 1,000 steps of 16 rows, a target cost 8.8 nats with only the embedding raised, 4.3 with the position bias
# at 30 as well, 3.2 with all three: one run each, and the first had a longer schedule and another
# initialisation, so the size of the gain is rough. The factors were not searched further.

RATES = {"shared": 30.0, "relative_attention_bias": 100.0, "layer_norm": 10.0}
"""Rate over the common one, for weights whose name contains the key."""


def rate_groups(model: nn.Module, rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one for each factor of `RATES`, the common rate first."""
    by_factor: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, parameter in model.named_parameters():
        factor = next((factor for key, factor in RATES.items() if key in name), 1.0)
        by_factor.setdefault(factor, []).append(parameter)
    return [
        {"params": parameters, "lr": rate * factor, "weight_decay": weight_decay}
        for factor, parameters in by_factor.items()
    ]
