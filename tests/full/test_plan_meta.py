"""The plan's counts against transformers' own T5, built on the meta device: shapes without weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeropods.plan.activations import T5Activations
from zeropods.plan.shapes import T5_SHAPES, t5_shape
from zeropods.plan.workload import Workload
from zeropods.train.text2sql import T5ForTextToSQL, t5_config

each_shape = pytest.mark.parametrize("name", T5_SHAPES)
ROWS, SOURCE, TARGET = 32, 96, 80


def on_meta(name: str) -> T5ForTextToSQL:
    with torch.device("meta"):
        return T5ForTextToSQL(t5_config(t5_shape(name)))


@each_shape
def test_tensors_are_those_of_the_model(name: str) -> None:
    model, shape = on_meta(name), t5_shape(name)
    named = {path: parameter.numel() for path, parameter in model.named_parameters()}
    assert [weight.size for weight in shape.stack(1)] == [n for path, n in named.items() if path.startswith("encoder")]
    assert [weight.size for weight in shape.stack(2)] == [n for path, n in named.items() if path.startswith("decoder")]
    assert [weight.size for weight in shape.weights] == list(named.values())


@each_shape
def test_products_are_those_of_the_linear_layers(name: str) -> None:
    model, shape = on_meta(name), t5_shape(name)
    linear = {path: m.weight.numel() for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    # Of the decoder cross-attention's keys and values work on source tokens.
    of_source = ("EncDecAttention.k", "EncDecAttention.v")
    on_source = [n for path, n in linear.items() if path.startswith("encoder") or path.endswith(of_source)]
    on_target = sum(linear.values()) - sum(on_source) - linear["lm_head"]
    assert shape.layer_products(1, 0) == sum(on_source)
    assert shape.layer_products(0, 1) == on_target
    assert shape.embedding == linear["lm_head"]


@pytest.mark.parametrize(
    ("name", "precision", "checkpointing"),
    [("t5-small", "fp32", False), ("t5-small", "bf16", False), ("t5-large", "bf16", False), ("t5-large", "fp32", True)],
)
def test_activations_are_what_autograd_saves(
    name: str, precision: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", memory_efficient)
    shape = t5_shape(name)
    work = Workload(
        shape=shape, rows=ROWS, tokens=SOURCE, labels=TARGET, precision=precision, checkpointing=checkpointing
    )
    planned = T5Activations(work, shape)
    model = as_on_a_gpu(on_meta(name).train())
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    saved = saved_bytes(model.to(torch.bfloat16) if precision == "bf16" else model)
    # The head's gradients come with the backward pass.
    assert saved == pytest.approx(planned.in_loss() - 2 * planned.head, rel=0.01 if checkpointing else 0.005)


class FusedDropout(nn.Module):
    """What `nn.Dropout` runs on a GPU: its mask has one byte an element; on the meta device it would have four."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, values: Tensor) -> Tensor:
        return torch.native_dropout(values, self.rate, True)[0]


def as_on_a_gpu(model: T5ForTextToSQL) -> T5ForTextToSQL:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                setattr(module, name, FusedDropout(child.p))
    return model


def memory_efficient(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, dropout_p: float, scale: float,
                     is_causal: bool) -> Tensor:  # fmt: skip
    """The kernel that SDPA chooses on a GPU where there is a bias; the meta device would take the plain formula."""
    bias = attn_mask.expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def saved_bytes(model: T5ForTextToSQL) -> int:
    """Bytes that a forward pass saves for its backward pass, each piece of memory once, parameters left out."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in own:
            saved.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.device("meta"):
        model(
            input_ids=torch.ones(ROWS, SOURCE, dtype=torch.long),
            # Made for attention already: the meta device cannot look whether a mask hides anything.
            attention_mask=torch.ones(ROWS, 1, 1, SOURCE, dtype=torch.bool),
            labels=torch.ones(ROWS, TARGET, dtype=torch.long),
            label_positions=torch.ones(ROWS * TARGET, dtype=torch.long),
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
