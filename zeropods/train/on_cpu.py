"""A model in operations that suit a CPU; names of parameters stay, and so do saved files."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm, T5PreTrainedModel

from zeropods.train.cpu_attention import use_cheap_attention
from zeropods.train.cpu_norm import CheapNorm
from zeropods.train.dropout import BitDropout

Model = TypeVar("Model", bound=nn.Module)


def suit_cpu(model: Model) -> Model:
    """Replace every dropout, and a T5's norms and attention, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, BitDropout(child.p))
            elif type(child) is T5LayerNorm:
                setattr(module, name, CheapNorm(child))
    if isinstance(model, T5PreTrainedModel):
        use_cheap_attention(model)
    return model
