"""Tensors, operations and activations of known architectures: by hand for smallest ones, and as published."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.plan.activations import CausalActivations, T5Activations
from zeropods.plan.machines import published_flops
from zeropods.plan.shapes import (
    CAUSAL_SHAPES,
    T5_SHAPES,
    CausalShape,
    Shape,
    T5Shape,
    shape_from,
    shape_named,
    t5_shape,
)
from zeropods.plan.workload import Workload

T5 = T5Shape(d_model=2, d_kv=1, d_ff=3, layers=1, heads=2, vocabulary=5)
"""Projections of 2 x 2, feed-forward 2 x 3: encoder 4 x 4 + 12 = 28, decoder 8 x 4 + 12 = 44, head 10."""
LLAMA = CausalShape(
    family="llama", hidden=4, layers=1, heads=2, kv_heads=1, head_size=2, ffn=3, vocabulary=5, positions=8, tied=False
)
"""Projections of 16, 8, 8 and 16 elements, three feed-forward matrices of 12, table and head of 20, norms of 4."""
GPT = replace(LLAMA, family="gpt2", kv_heads=2, tied=True)
T5_WORK = Workload(shape=T5, rows=1, tokens=2, labels=1)
LLAMA_WORK = Workload(shape=LLAMA, rows=1, tokens=2, labels=1, precision="bf16")


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (shape_named("distilgpt2"), 81_912_576),
        (shape_named("bigscience/bloom-560m"), 559_214_592),
        (shape_named("Qwen/Qwen3-0.6B"), 596_049_920),
        (shape_named("mistralai/Mistral-7B-v0.1"), 7_241_732_096),
        (shape_named("meta-llama/Meta-Llama-3-8B"), 8_030_261_248),
        (shape_named("google-t5/t5-large"), 737_668_096),
        # Embedding; encoder with 2 norms of 2, decoder with 3; each end a norm of 2 and 32 x 2 position biases.
        (T5, 10 + (28 + 4 + 2 + 64) + (44 + 6 + 2 + 64)),
        (LLAMA, 20 + (48 + 36 + 8) + 4 + 20),
        # Positions of 8 x 4; 48 + 12, 16 + 4, 12 + 3 and 12 + 4 with biases; three norms of 8.
        (GPT, 20 + 32 + (60 + 20 + 15 + 16 + 16) + 8),
    ],
)
def test_parameters_are_the_published_ones_or_those_counted_by_hand(shape: Shape, parameters: int) -> None:
    assert shape.parameters == parameters


@pytest.mark.parametrize("name", [*T5_SHAPES, *CAUSAL_SHAPES])
def test_a_shape_written_into_a_record_reads_back(name: str) -> None:
    assert shape_from(asdict(shape_named(name))) == shape_named(name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t5-small", {"heads": 0}, "heads 0; expected a positive whole number"),
        ("t5-small", {"heads": True}, "heads True; expected"),
        ("t5-small", {"experts": 4}, "experts 4; expected d_model, "),
        ("llama-tiny", {"family": "mamba"}, "family 'mamba'; expected one of gpt2, "),
        ("llama-tiny", {"tied": 1}, "tied 1; expected true or false"),
        ("llama-tiny", {"kv_heads": 3}, "kv_heads 3; expected a divisor of the 2 heads"),
        ("llama-tiny", {"family": "bloom"}, "2 heads of 32; expected 64 in all, each with keys"),
    ],
)
def test_a_shape_that_can_be_none_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^shape: {message}"):
        shape_from({**asdict(shape_named(name)), **change})


@pytest.mark.parametrize(
    ("shape", "tokens", "labels", "products", "head"),
    [
        # Encoder by source token; cross-attention's keys and values, 2 x 4 parameters, too; the rest by target token.
        (T5, 3, 2, 28 * 3 + 8 * 3 + (44 - 8) * 2, 10 * 2),
        # 84 matmul parameters a token, and 1 layer x 2 heads x 2 x 3^2 for half the square of attention.
        (LLAMA, 3, 2, 84 * 3 + 36, 20 * 2),
    ],
)
def test_flops_of_a_smallest_model_by_hand(shape: Shape, tokens: int, labels: int, products: int, head: int) -> None:
    assert shape.training_flops(tokens, labels) == 6 * (products + head)
    assert shape.recomputed_flops(tokens, labels) == 2 * products


def test_a_padded_sample_of_t5_large_with_recomputation_is_as_the_published_times_have_it() -> None:
    shape = t5_shape("t5-large")
    assert shape.training_flops(96, 96) + shape.recomputed_flops(96, 96) == pytest.approx(566e9, rel=0.03)


def test_a_window_bounds_what_attention_needs() -> None:
    # In units of a window's square: half of it for the first window, all of it for each of the two behind; doubled.
    mistral = replace(LLAMA, family="mistral")
    whole, third = mistral.attention_products(4_096), mistral.attention_products(3 * 4_096)
    assert (whole, third) == (4 * 4_096**2, 4 * (1 + 2 + 2) * 4_096**2)


@pytest.mark.parametrize(
    ("model", "attention", "tokens", "precision", "before_ampere", "kernel"),
    [
        ("t5-small", "sdpa", 512, "fp32", False, "fused"),
        ("distilgpt2", "sdpa", 512, "fp16", True, "fused"),
        ("llama-8b", "sdpa", 512, "bf16", False, "fused"),
        ("llama-8b", "sdpa", 512, "fp32", False, "plain"),
        ("llama-8b", "sdpa", 512, "fp16", True, "plain"),
        ("mistral-7b", "sdpa", 4_095, "bf16", False, "fused"),
        ("mistral-7b", "sdpa", 4_096, "bf16", False, "masked"),
        ("mistral-7b", "flash_attention_2", 4_096, "bf16", False, "fused"),
        ("bloom-560m", "eager", 512, "bf16", False, "eager"),
    ],
)
def test_what_attention_really_runs(
    model: str, attention: str, tokens: int, precision: str, before_ampere: bool, kernel: str
) -> None:
    assert shape_named(model).kernel(attention, tokens, precision, before_ampere) == kernel


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        # Two RMS norms of FP32 copy, quotient and result; queries, keys, values; log-sums; output; four of width 3.
        ({}, 2 * 2 * (8 * 4 + 4) + 2 * (8 + 8) + 16 + 16 + 4 * 2 * 6),
        # Keys and values repeated; each of 8 scores in FP32 and in BF16.
        ({"attention": "eager"}, 2 * 2 * (8 * 4 + 4) + 48 + 8 * (4 + 2) + 16 + 4 * 2 * 6),
        # FP32 with shared keys takes the plain formula: each score once.
        ({"precision": "fp32"}, 2 * 2 * (12 * 4 + 4) + 96 + 8 * 4 + 32 + 4 * 4 * 6),
        # GPT-2: norms, a third of each for queries, keys and values, masks of dropout, five of width 3.
        ({"shape": GPT, "precision": "fp32"}, 2 * 2 * (8 * 4 + 8) + 96 + 16 + 32 + 2 * 8 + 5 * 4 * 6),
    ],
)
def test_activations_of_a_smallest_causal_layer_by_hand(change: dict[str, Any], layer: int) -> None:
    assert CausalActivations(replace(LLAMA_WORK, **change), change.get("shape", LLAMA)).layers.layer == layer


def test_activations_of_a_smallest_encoder_layer_by_hand() -> None:
    # Two tokens of width 2, heads of width 1, feed-forward 3, FP32, dropout masks of one byte.
    norm = 2 * (3 * 2 * 4 + 4)
    attention = norm + 4 * (4 * 2 * 2) + 4 * 2 * 2 + 4 * (2 * 2 * 2) + 4
    assert T5Activations(T5_WORK, T5).encoder.layer == attention + norm + 2 * 4 * (2 * 3) + 6 + 4


@pytest.mark.parametrize(
    ("gpu", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("A100-40GB", "fp16", 312.0),
        ("NVIDIA A10G", "fp32", 35.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H200", "fp32", 66.9),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "fp32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp32", None),
        ("a card of the future", "fp32", None),
    ],
)
def test_a_published_peak_is_that_of_the_very_card(gpu: str, precision: str, tera: float | None) -> None:
    assert published_flops(gpu, precision) == (None if tera is None else tera * 1e12)
