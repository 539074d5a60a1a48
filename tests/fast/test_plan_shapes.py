"""Tensors, operations and activations of models: by hand for smallest ones, and as published."""

import json
from typing import Any

import pytest

from zeropods.plan.facts import shape_named, shape_recorded
from zeropods.plan.machines import published_flops
from zeropods.plan.models import known_config
from zeropods.plan.workload import Saved, Shape, Weight, Workload

KINDS = {"e": "embedding", "m": "matrix", "b": "bias", "n": "norm"}


def made(weights: str, saved: Saved, **facts: Any) -> Shape:
    """A shape of tensors that are written as kind and size: `m4`."""
    tensors = [Weight(int(each[1:]), KINDS[each[0]]) for each in weights.split()]
    usual = {"positions": 8, "window": None, "windowed": 0, "drops": False, "experts": None, "heads": 2, "inner": 3}
    given = {**usual, **facts, "vocabulary": 5, "weights": tensors}
    return Shape(**given, trace=lambda way: saved)


T5 = made(
    "e10 m4 m4 m4 m4 b64 n2 m6 m6 n2 n2 m4 m4 m4 m4 b64 n2 m4 m4 m4 m4 n2 m6 m6 n2 n2",
    Saved([{"110": 100, "120": 10}, {"101": 100, "111": 10}], [{"110": 8}, {"101": 8}], {"111": 5}, {"110": 30}, 4),
    family="t5", joint=False, layers=[1, 1], layer_parameters=[96, 114], kv_heads=2, head_size=1, attentions=["sdpa"],
    tied=True, products={"110": 36, "101": 36},
)  # fmt: skip
"""Width 2, two heads of 1. Projections of 2 x 2, feed-forward 2 x 3: encoder 4 x 4 + 12 = 28, decoder 8 x 4 + 12 = 44,
of which cross-attention's keys and values are 8; position biases of 32 x 2; head 10."""
LLAMA = made(
    "e20 m16 m8 m8 m16 m12 m12 m12 n4 n4 n4 e20",
    Saved([{"110": 200, "120": 20}], [{"110": 8}], {"120": 4}, {"110": 40}, 8),
    family="llama", joint=True, layers=[1], layer_parameters=[92], kv_heads=1, head_size=2,
    attentions=["eager", "sdpa", "flash_attention_2"], tied=False, products={"110": 84},
)  # fmt: skip
"""Width 4. Projections of 16, 8, 8 and 16, three feed-forward matrices of 12, table and head of 20, norms of 4."""
T5_WORK = Workload(shape=T5, rows=1, tokens=2, labels=1)
LLAMA_WORK = Workload(shape=LLAMA, rows=1, tokens=2, labels=1, precision="bf16")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("t5-small", 60_506_624),
        ("google-t5/t5-base", 222_903_552),
        ("google-t5/t5-large", 737_668_096),
        ("distilgpt2", 81_912_576),
        ("bigscience/bloom-560m", 559_214_592),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert shape_named(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("t5-tiny", known_config("t5-tiny") | {"dropout_rate": 0.0, "is_gated_act": False}),
        # The numbers of earlier records.
        ("t5-tiny", {"d_model": 128, "d_kv": 32, "d_ff": 512, "layers": 2, "heads": 4, "vocabulary": 1_024}),
        ("t5-3b-tiny", {"d_model": 256, "d_kv": 64, "d_ff": 2_048, "layers": 4, "heads": 8, "vocabulary": 1_024}),
    ],
)  # fmt: skip
def test_what_a_record_says_of_a_model_leads_to_what_is_known_of_it(name: str, recorded: dict[str, Any]) -> None:
    assert shape_recorded(json.dumps(recorded)) is shape_named(name)


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
    way = {"attention": attention, "precision": precision, "before_ampere": before_ampere}
    assert Workload(shape=shape_named(model), rows=1, tokens=tokens, labels=1, **way).kernel == kernel


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
