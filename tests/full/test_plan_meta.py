"""The plan's counts against transformers' own T5, built on the meta device: shapes without weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from zeropods.plan.activations import activations
from zeropods.plan.jobs import Job
from zeropods.plan.parameters import (
    decoder_parameters,
    embedding,
    encoder_parameters,
    in_small_tensors,
    largest_tensor,
    matmul_parameters,
    t5_parameters,
    weight_tensors,
)
from zeropods.plan.shapes import T5_SHAPES, t5_shape
from zeropods.train.text2sql import T5ForTextToSQL, t5_config

each_shape = pytest.mark.parametrize("name", T5_SHAPES)
ROWS, SOURCE, TARGET = 32, 96, 80


def on_meta(name: str) -> T5ForTextToSQL:
    with torch.device("meta"):
        return T5ForTextToSQL(t5_config(t5_shape(name)))


def count(parameters: Iterator[nn.Parameter]) -> int:
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


def linear(module: nn.Module, ending: str = "") -> int:
    named = module.named_modules()
    return sum(one.weight.numel() for name, one in named if isinstance(one, nn.Linear) and name.endswith(ending))


@each_shape
def test_parameters_are_those_of_the_model(name: str) -> None:
    model, shape = on_meta(name), t5_shape(name)
    shared = count(model.shared.parameters())
    assert embedding(shape) == shared
    assert encoder_parameters(shape) == count(model.encoder.parameters()) - shared
    assert decoder_parameters(shape) == count(model.decoder.parameters()) - shared
    assert t5_parameters(shape) == count(model.parameters())


@each_shape
def test_matmul_parameters_are_those_of_the_linear_layers(name: str) -> None:
    model, parts = on_meta(name), matmul_parameters(t5_shape(name))
    cross = linear(model.decoder, "EncDecAttention.k") + linear(model.decoder, "EncDecAttention.v")
    assert (parts.encoder, parts.decoder) == (linear(model.encoder), linear(model.decoder))
    assert (parts.cross_keys_values, parts.head) == (cross, model.lm_head.weight.numel())


@each_shape
def test_tensors_are_those_of_the_model(name: str) -> None:
    model, shape = on_meta(name), t5_shape(name)
    matrices = {id(p): p for module in model.modules() for p in _weight(module)}
    assert weight_tensors(shape) == len(matrices)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert largest_tensor(shape) == max(sizes)
    assert in_small_tensors(shape, 100_000) == sum(size for size in sizes if size <= 100_000)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["t5-small", "t5-large"])
def test_activations_are_what_autograd_saves(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", memory_efficient)
    job = Job(shape=t5_shape(name), rows=ROWS, source_tokens=SOURCE, target_tokens=TARGET, precision=precision)
    a, layers = activations(job), job.shape.layers
    expected = layers * (a.encoder_layer + a.decoder_layer) + a.encoder_ends + a.decoder_ends + a.head
    model = as_on_a_gpu(on_meta(name).train())
    assert saved_bytes(model.to(torch.bfloat16) if precision == "bf16" else model) == pytest.approx(expected, rel=0.005)


def test_checkpointed_activations_are_what_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", memory_efficient)
    job = Job(shape=t5_shape("t5-large"), rows=ROWS, source_tokens=SOURCE, target_tokens=TARGET, checkpointing=True)
    a, layers = activations(job), job.shape.layers
    expected = layers * (a.encoder_input + a.decoder_input) + a.encoder_ends + a.decoder_ends + a.head
    model = as_on_a_gpu(on_meta("t5-large").train())
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert saved_bytes(model) == pytest.approx(expected, rel=0.01)


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


def _weight(module: nn.Module) -> list[nn.Parameter]:
    is_matrix = isinstance(module, nn.Linear | nn.Embedding) and min(module.weight.shape) > 64
    return [module.weight] if is_matrix else []
