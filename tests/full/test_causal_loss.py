"""The loss of causal models against transformers' own, family by family, and what training needs besides."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.full.test_plan_built import MODELS, SHARED, SIZES
from zeropods.train.causal import causal_config, collate_causal, random_causal, with_causal_loss
from zeropods.train.sampler import Row

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLANNED = ("gpt2", "bloom", "llama", "qwen2", "qwen3", "mixtral", "gpt_neox", "opt")
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: MODELS[name] for name in PLANNED},
    # A window that is shorter than the rows.
    "mistral": {**SHARED, "sliding_window": 8},
    "phi": {**SIZES, "resid_pdrop": 0.0},
    "falcon": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    # Logits that are capped, in one multiplied as well.
    "gemma2": {**SHARED, "head_dim": 16, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "cohere": {**SHARED, "logit_scale": 0.25},
    "granite": {**SHARED, "logits_scaling": 8.0},
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "gptj": {**MODELS["gpt2"], "rotary_dim": 8},
    "gpt_bigcode": {**MODELS["gpt2"]},
}  # fmt: skip
TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}


def rows(*lengths: tuple[int, int]) -> list[Row]:
    """Rows of so many tokens, of which the last so many have a label."""
    generator = np.random.default_rng(0)
    made = []
    for tokens, labelled in lengths or ((12, 3), (20, 5), (20, 1), (7, 6)):
        ids = generator.integers(3, 60, tokens).astype(np.int32)
        made.append((ids, np.where(np.arange(tokens) < tokens - labelled, -100, ids).astype(np.int32)))
    return made


def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with our loss, and transformers' own with the same weights."""
    config = CONFIG_MAPPING[family](**{**FAMILIES[family], **ENDS})
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(0)
    theirs = model_class(config).train()
    ours = with_causal_loss(model_class)(config).train()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tiny() -> PreTrainedModel:
    return random_causal(causal_config(TINY, dropout=0.0), seed=1).train()


def test_rows_are_padded_on_the_right_and_predicting_positions_precede_their_labels() -> None:
    short = (np.array([5, 6]), np.array([-100, 6]))
    batch = collate_causal([short, (np.array([7, 8, 9]), np.array([7, 8, 9]))], pad=1)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100], [-100, 8, 9]]
    assert batch["label_positions"].tolist() == [0, 3, 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str) -> None:
    ours, theirs = pair(family)
    batch = collate_causal(rows(), pad=0)
    expected = theirs(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss
    loss = ours(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_a_batch_without_labels_costs_nothing() -> None:
    model = tiny()
    loss = model(**collate_causal(rows((5, 0)), 0)).loss
    loss.backward()
    assert loss == 0


def test_gradient_checkpointing_changes_no_gradient() -> None:
    plain, checkpointed = tiny(), tiny()
    checkpointed.activation_checkpointing_enable({"use_reentrant": False})
    for model in (plain, checkpointed):
        model(**collate_causal(rows(), 0)).loss.backward()
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_bf16_weights_have_a_loss_in_fp32() -> None:
    model, batch = tiny(), collate_causal(rows(), 0)
    expected = model(**batch).loss
    loss = model.to(torch.bfloat16)(**batch).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.0)
