"""How the weights are trained: the masters of BF16 weights, the optimizer, the loss, an adapter.

The defaults are what this project trains with. The rest is planned only: others train so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from zeropods.errors import UserError
from zeropods.techniques import STAGE_3, TECHNIQUES, Technique, technique_named

FP32_MASTERS, BF16_MASTERS, NO_MASTERS = "fp32", "bf16", "none"
MASTERS = (FP32_MASTERS, BF16_MASTERS, NO_MASTERS)
"""What is kept beside BF16 weights: an FP32 master, under DeepSpeed and in this project; a BF16
master with moments in BF16, DeepSpeed's `bf16_master_weights_and_grads` with
`bf16_optimizer_states` (runtime/base_optimizer.py, `_configure_master_weights`); or nothing, where
an optimizer steps the BF16 weights themselves."""
ADAMW, FOREACH, EIGHT_BIT = "adamw", "adamw_foreach", "adamw_8bit"
OPTIMIZERS = (ADAMW, FOREACH, EIGHT_BIT)
"""AdamW that works in place, as PyTorch's fused one does; PyTorch's `foreach` one, its default,
which takes the square roots of all second moments at one time (torch/optim/adam.py,
`_multi_tensor_adam`); bitsandbytes' 8-bit one."""
OF_LABELS, OF_TRANSFORMERS, FUSED_LOSS, CHUNKED = "labels", "transformers", "fused", "chunked"
LOSSES = (OF_LABELS, OF_TRANSFORMERS, FUSED_LOSS, CHUNKED)
"""This project's loss, which computes logits only where there is a label; that of transformers, of
all tokens (loss/loss_utils.py, `ForCausalLMLoss`); a kernel that writes the gradient where the FP32
logits were; one that computes head and loss for some tokens at a time."""
LORA, QLORA = "lora", "qlora"
ADAPTERS = (LORA, QLORA)
ALL_LINEAR = "all-linear"
"""Every linear layer but the head, as peft calls it."""
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight that QLoRA quantises: four bits, a scale of one byte for each block of 64, and
one of four bytes for each 256 such scales (Dettmers et al. 2023, arXiv:2305.14314, section 3)."""
EIGHT_BIT_MOMENTS = 2 + 2 * 4 / 256
"""Bytes of both moments of 8-bit Adam: one each, and a scale in FP32 for each block of 256
(bitsandbytes, optim/optimizer.py, `init_state`). Tensors of less than 4,096 elements keep theirs in
FP32, which is not counted."""
FSDP2 = Technique(name="fsdp2", engine="fsdp2", divides=STAGE_3)
"""PyTorch's `fully_shard` of every layer: FP32 shards of weights, gradients and moments; a layer is
gathered in BF16 for use, in the backward pass again."""
PLANNED_ONLY = (FSDP2,)
"""Techniques that are planned where they are named, and which this project cannot train with."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How weights are trained, whatever divides them."""

    masters: str = FP32_MASTERS
    """One of `MASTERS`; without BF16 weights it makes no difference."""
    optimizer: str = ADAMW
    loss: str = OF_LABELS
    adapter: str | None = None
    """One of `ADAPTERS`: the model's weights are frozen, and matrices of a low rank beside them are
    trained; None trains the model."""
    lora_rank: int = 16
    lora_targets: str = ALL_LINEAR
    """The linear layers with an adapter: `all-linear`, or the ends of their names, with commas."""

    @property
    def planned_only(self) -> list[str]:
        """The flags of what this project cannot train with, each with its value."""
        usual = Method()
        flags = []
        for field in fields(self):
            # These say nothing without an adapter, whose flag is there already.
            if field.name.startswith("lora_"):
                continue
            value = getattr(self, field.name)
            if value != getattr(usual, field.name):
                flags.append(f"--{field.name} {value}")
        return flags

    def fault_with(self, technique: Technique) -> str | None:
        """Why a technique cannot train by this method; None where it can."""
        if self.masters == BF16_MASTERS and not technique.uses_deepspeed:
            return "--masters bf16: is DeepSpeed's; give --masters none, or a technique of ZeRO"
        if self.masters == NO_MASTERS and technique.uses_deepspeed:
            return "--masters none: DeepSpeed keeps masters; give --masters bf16"
        if self.optimizer != ADAMW and technique.uses_deepspeed:
            optimizer = f"--optimizer {self.optimizer}"
            return f"{optimizer}: is planned without DeepSpeed; give --technique none, ddp or fsdp2"
        if self.adapter is not None and technique.offloads:
            return f"--adapter {self.adapter}: is not planned with offload; name another technique"
        return None


def planned_techniques(names: tuple[str, ...], method: Method, slots: int) -> list[Technique]:
    """The techniques that are named or, without names, all of this project's that are planned and
    can train by the method; in their usual order.

    Args:
        slots: processes of a pod. A technique that would be the same as another one with so few
            is left out, unless it is named.

    Raises:
        UserError: a name is unknown, or its technique cannot train by the method.
    """
    if not names:
        possible = []
        for technique in TECHNIQUES:
            differs_from_others = technique.least_slots <= slots
            if technique.is_planned and differs_from_others:
                possible.append(technique)
        return [technique for technique in possible if method.fault_with(technique) is None]
    usual_names = {technique.name for technique in TECHNIQUES}
    planned_only = {technique.name: technique for technique in PLANNED_ONLY}
    requested = set[Technique]()
    for name in names:
        # Once this project trains by a technique of such a name, that one is meant.
        if name in planned_only and name not in usual_names:
            technique = planned_only[name]
        else:
            technique = technique_named(name)
        fault = method.fault_with(technique)
        if fault is not None:
            raise UserError(f"technique {name!r}: {fault}")
        requested.add(technique)
    return [technique for technique in (*TECHNIQUES, *PLANNED_ONLY) if technique in requested]
