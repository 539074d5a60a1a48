"""Adapters in a plan, as a pass on the meta device shows them."""

import pytest

from zeropods.errors import UserError
from zeropods.plan.estimate import plan, request_for
from zeropods.plan.facts import shape_named


def test_an_adapter_has_the_inputs_and_outputs_of_its_matrix() -> None:
    # llama-tiny: width 64, keys and values 32, feed-forward 256, two layers.
    of_attention, of_feed_forward = 128 + 96 + 96 + 128, 3 * 320
    shape = shape_named("llama-tiny")
    traced = shape.trace("lora fused all-linear")
    assert (traced.adapter, list(traced.adapted)) == (2 * (of_attention + of_feed_forward), [14])
    assert shape.trace("lora fused q_proj,v_proj").adapter == 2 * (128 + 96)


def test_a_frozen_matrix_keeps_no_input_and_an_adapter_keeps_one() -> None:
    shape = shape_named("llama-tiny")
    whole, frozen = (shape.trace(way).layers[0]["110"] for way in ("bf16 fused", "lora fused lm_head,k_proj"))
    # Inputs of o, gate and up (one tensor), and down are not kept, 2 B each; q, k and v shared theirs.
    assert whole - frozen >= 2 * 2 * (64 + 64 + 256) - 2 * 2 * (64 + 1 + 1)


def test_a_layer_that_no_model_has_is_refused() -> None:
    with pytest.raises(UserError, match="--lora-targets nothing: no linear layer of this model is called so"):
        plan(request_for("llama-tiny", precision="bf16", adapter="lora", lora_targets="nothing"))
