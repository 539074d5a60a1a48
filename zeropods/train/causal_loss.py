"""A causal model's loss: right on any number of processes, with logits only where there is a label."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


def with_causal_loss(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class with another loss in its `forward`; everything else, its name too, stays as it is.

    `forward` takes `labels` (rows, tokens), not shifted, -100 where there is no loss; `label_positions`, (n,) flat
    positions p of tokens whose successor p + 1 has a label; and `num_items_in_batch`, the labels of the whole optimizer
    step, over all ranks (the batch's own count if None). It returns the sum of the token losses / `num_items_in_batch`,
    in nats, without logits. Without labels it is the class's own.

    The model's own head and whatever it does to its logits (scale, soft cap) are used, on the positions that predict a
    label and no others: a loss on answers alone would otherwise spend most of its memory on logits that nobody reads.
    Submodules are called through the model's own `forward`, so hooks of DDP, ZeRO-3 and checkpointing see all of them.
    """
    own = model_class.forward

    def forward(
        self: PreTrainedModel,
        *args: Any,
        labels: Tensor | None = None,
        label_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return own(self, *args, **kwargs)
        if label_positions is None:
            label_positions = predicting_positions(labels)
        else:
            # Rows are padded on the right: nothing that has a loss can see a pad. Without a mask attention may take its
            # fast causal path.
            kwargs.pop("attention_mask", None)
        with _OnlyAt(self.get_output_embeddings(), label_positions, labels.shape) as head:
            output = own(self, *args, **kwargs, use_cache=False, return_dict=True)
        logits = output.logits.flatten(0, 1)
        if not head.applied:
            logits = logits.index_select(0, label_positions)
        return CausalLMOutput(loss=_summed(logits, labels, label_positions, num_items_in_batch))

    # generate() asks the signature what the model takes.
    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    members = {"__module__": model_class.__module__, "forward": forward, "accepts_loss_kwargs": True}
    return type(model_class.__name__, (model_class,), members)


def predicting_positions(labels: Tensor) -> Tensor:
    """Flat positions of the tokens whose successor in the row has a label: (n,) int64."""
    follows = torch.zeros_like(labels, dtype=torch.bool)
    follows[:, :-1] = labels[:, 1:] != -100
    return follows.flatten().nonzero().squeeze(1)


class _OnlyAt:
    """While it is entered, the head sees the hidden states of some positions only: (1, n, hidden)."""

    def __init__(self, head: nn.Module | None, positions: Tensor, shape: torch.Size) -> None:
        self.head = head
        self.positions = positions
        self.shape = shape
        self.applied = False
        self._hook: Any = None

    def __enter__(self) -> _OnlyAt:
        if self.head is not None:
            self._hook = self.head.register_forward_pre_hook(self._select)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _select(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        if hidden.shape[:-1] != self.shape:
            return inputs
        self.applied = True
        return hidden.flatten(0, 1).index_select(0, self.positions)[None], *others


def _summed(logits: Tensor, labels: Tensor, positions: Tensor, count: Tensor | int | None) -> Tensor:
    wanted = labels.flatten().index_select(0, positions + 1)
    total = nn.functional.cross_entropy(logits.float(), wanted, reduction="sum")
    return total / (max(wanted.numel(), 1) if count is None else count)
