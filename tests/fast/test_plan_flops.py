"""Counts of parameters and operations by arithmetic, against figures published or worked out by hand."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from zeropods.errors import UserError
from zeropods.plan.machines import published_flops
from zeropods.plan.parameters import largest_tensor, matmul_parameters, recomputed_flops, t5_parameters, training_flops
from zeropods.plan.shapes import T5_SHAPES, T5Shape, shape_from, t5_shape

SMALLEST = T5Shape(d_model=2, d_kv=1, d_ff=3, layers=1, heads=2, vocabulary=5)
"""Projections of 2 x 2, feed-forward 2 x 3: encoder 4 x 4 + 12 = 28, decoder 8 x 4 + 12 = 44, head 10."""


@pytest.mark.parametrize(
    ("model", "encoder", "decoder", "head"),
    [("t5-small", 18.9e6, 25.2e6, 16.4e6), ("t5-large", 302.0e6, 402.7e6, 32.9e6)],
)
def test_matmul_parameters_are_the_published_ones(model: str, encoder: float, decoder: float, head: float) -> None:
    parts = matmul_parameters(t5_shape(model))
    assert (parts.encoder, parts.decoder, parts.head) == pytest.approx((encoder, decoder, head), rel=0.005)


def test_flops_of_a_smallest_model_by_hand() -> None:
    # 6 x (28 x 3 + 8 x 3 + (44 - 8) x 2 + 10 x 2): cross-attention's keys and values are 2 x 4 parameters.
    assert training_flops(SMALLEST, source_tokens=3, target_tokens=2) == 6 * (84 + 24 + 72 + 20)


def test_recomputation_is_a_forward_pass_without_the_head() -> None:
    assert recomputed_flops(SMALLEST, source_tokens=3, target_tokens=2) == 2 * (84 + 24 + 72)


def test_a_padded_sample_of_t5_large_with_recomputation_is_as_the_published_times_have_it() -> None:
    shape = t5_shape("t5-large")
    flops = training_flops(shape, 96, 96) + recomputed_flops(shape, 96, 96)
    assert flops == pytest.approx(566e9, rel=0.03)


def test_flops_are_linear_in_tokens() -> None:
    shape = t5_shape("t5-base")
    both = training_flops(shape, 10.0, 4.0) + training_flops(shape, 20.0, 8.0)
    assert training_flops(shape, 30.0, 12.0) == pytest.approx(both)


def test_parameters_of_a_smallest_model_by_hand() -> None:
    # Embedding 10; encoder 28 + 2 norms of 2, decoder 44 + 3 norms; each end a norm of 2 and 32 x 2 position biases.
    assert t5_parameters(SMALLEST) == 10 + (28 + 4 + 2 + 64) + (44 + 6 + 2 + 64)


def test_the_largest_tensor_is_embedding_or_feed_forward() -> None:
    assert largest_tensor(t5_shape("t5-small")) == 32_128 * 512
    assert largest_tensor(SMALLEST) == 10


@pytest.mark.parametrize("name", T5_SHAPES)
def test_a_shape_written_into_a_record_reads_back(name: str) -> None:
    assert shape_from(asdict(t5_shape(name))) == t5_shape(name)


@pytest.mark.parametrize("change", [{"heads": 0}, {"heads": 8.0}, {"experts": 4}, {"heads": True}])
def test_a_shape_with_a_wrong_number_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"shape: (heads|experts)"):
        shape_from({**asdict(t5_shape("t5-small")), **change})


def test_a_shape_without_a_number_is_refused() -> None:
    numbers = asdict(t5_shape("t5-small"))
    del numbers["d_kv"]
    with pytest.raises(UserError, match="d_kv missing"):
        shape_from(numbers)


@pytest.mark.parametrize(
    ("gpu", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("A100-40GB", "fp16", 312e12),
        ("NVIDIA A10G", "fp32", 35e12),
        ("NVIDIA A10", "fp32", 31.2e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H200", "fp32", 66.9e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-PCIE-16GB", "fp32", 14e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "fp32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp32", None),
        ("a card of the future", "fp32", None),
    ],
)
def test_published_peaks_by_the_name_of_a_gpu(gpu: str, precision: str, peak: float | None) -> None:
    assert published_flops(gpu, precision) == (None if peak is None else pytest.approx(peak))


@pytest.mark.parametrize(
    ("gpu", "precision", "tera"),
    [
        ("NVIDIA H800 PCIe", "bf16", 756.0),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA GeForce RTX 3090", "fp32", 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", "fp32", None),
        ("NVIDIA GeForce RTX 4090 D", "fp32", None),
    ],
)
def test_a_peak_is_that_of_the_very_card(gpu: str, precision: str, tera: float | None) -> None:
    assert published_flops(gpu, precision) == (None if tera is None else tera * 1e12)
