"""The models' losses, dropout, precision and master weights against hand-made or independent figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedModel, T5ForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import SAFE_WEIGHTS_NAME

from tests.full.plan.test_plan_meta_model import MODELS, SHARED, SIZES
from zeropods.train import device
from zeropods.train.causal import causal_config, collate_causal, random_causal, with_causal_loss
from zeropods.train.device import BitDropout
from zeropods.train.engines.ddp import Ddp
from zeropods.train.flags import CausalArguments
from zeropods.train.master_adamw import MasterAdamW, round_to_bf16
from zeropods.train.sampler import LengthGroupedSampler, Row, TokenizedSplit, collate
from zeropods.train.text2sql import T5ForTextToSQL, random_t5
from zeropods.train.trainer import rate_groups

SMALL = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}


def rows(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    pairs = generator.integers(3, 12, (count, 2))
    return [tuple(generator.integers(3, 60, n).astype(np.int32) for n in pair) for pair in pairs]


def model(dropout: float = 0.0) -> T5ForTextToSQL:
    return random_t5(SMALL, seed=1, dropout=dropout).train()


def test_batches_are_padded_to_their_longest_row() -> None:
    batch = collate([(np.array([5, 1]), np.array([7, 8, 1])), (np.array([5, 6, 1]), np.array([1]))])
    assert batch["input_ids"].tolist() == [[5, 1, 0], [5, 6, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[7, 8, 1], [1, -100, -100]]
    assert batch["label_positions"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_rate_mean_and_mask(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.ones(400_001, dtype=dtype, requires_grad=True)
    dropped = BitDropout(0.1).train()(values)
    dropped.sum().backward()
    rate = (dropped == 0).double().mean().item()
    assert abs(rate - 0.1) < 5 * (0.1 * 0.9 / 400_001) ** 0.5
    assert torch.equal(values.grad == 0, dropped == 0)
    assert abs(dropped.double().mean().item() - 1) < 0.005


def steps(precision: torch.dtype, optimizer: type, count: int = 30) -> list[float]:
    trained, batch = model().to(precision), collate(rows(8))
    steps_of = optimizer([{"params": list(trained.parameters())}], lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(count):
        loss = trained(**batch).loss
        loss.backward()
        steps_of.step()
        steps_of.zero_grad()
        losses.append(loss.item())
    return losses


def test_masters_learn_like_fp32() -> None:
    full, masters = steps(torch.float32, torch.optim.AdamW), steps(torch.bfloat16, MasterAdamW)
    assert masters[-1] == pytest.approx(full[-1], rel=0.02)
    assert full[-1] < 0.8 * full[0]


def test_masters_go_on_from_a_saved_state_as_if_undisturbed() -> None:
    def train(restart: bool) -> list[float]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 8).bfloat16())
        optimizer = MasterAdamW([{"params": [weight]}], lr=1e-2)
        for step in range(6):
            if restart and step == 3:
                state, kept = optimizer.state_dict(), weight.detach().clone()
                weight = torch.nn.Parameter(kept)
                optimizer = MasterAdamW([{"params": [weight]}], lr=1e-2)
                optimizer.load_state_dict(state)
            weight.grad = weight.detach().sign() * (step + 1)
            optimizer.step()
        return optimizer.masters_by_copy()[id(weight)].tolist()

    # Memory that lies elsewhere may be worked on by other instructions.
    assert train(restart=True) == pytest.approx(train(restart=False), rel=1e-6)


def split_of(count: int) -> TokenizedSplit:
    sources, targets = zip(*rows(count), strict=True)
    return TokenizedSplit(list(sources), list(targets))


def test_saved_weights_go_into_the_masters_past_a_weight_that_is_not_trained(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    sizes = {"vocab_size": 64, "max_position_embeddings": 16, **layers}
    # RoFormer's sinusoids are a parameter without a gradient, which no optimizer has.
    config = causal_config({"model_type": "roformer", "is_decoder": True, **sizes})
    trained_model = round_to_bf16(random_causal(config, seed=1))
    trained = [parameter for parameter in trained_model.parameters() if parameter.requires_grad]
    assert len(trained) < len(list(trained_model.parameters()))
    optimizer = MasterAdamW([{"params": trained}], lr=1e-2)
    engine = Ddp(CausalArguments(model_name_or_path="gpt-tiny", init="random"))
    saved = engine.weights_to_save(trained_model, optimizer, is_writer=True)
    assert saved is not None
    save_file({name: weight.clone() for name, weight in saved.items()}, tmp_path / SAFE_WEIGHTS_NAME)
    best = [master.clone() for master in optimizer.masters]
    for master in optimizer.masters:
        master.add_(1.0)
    engine.load_masters(trained_model, optimizer, tmp_path)
    assert all(torch.equal(master, weight) for master, weight in zip(optimizer.masters, best, strict=True))


def test_each_epoch_holds_every_row_fills_the_last_step_and_has_an_order_of_its_own_as_has_each_seed() -> None:
    lengths = split_of(50).lengths()
    sampler, same, other = (LengthGroupedSampler(lengths, 16, seed=seed) for seed in (0, 0, 1))
    order = sampler.order()
    assert order.shape == (4, 16) and set(order.ravel().tolist()) == set(range(50))
    assert list(sampler) == list(same) != list(other)
    same.set_epoch(1)
    assert list(sampler) != list(same)


def test_batches_are_of_like_length_on_both_sides() -> None:
    lengths = split_of(640).lengths()
    grouped = lengths[LengthGroupedSampler(lengths, 16, seed=0).order()]
    plain = lengths.reshape(40, 16, 2)
    assert (grouped.max(1).sum(0) < 0.8 * plain.max(1).sum(0)).all()


def test_every_weight_has_one_rate_and_positions_have_the_highest() -> None:
    trained = model()
    groups = rate_groups(trained, rate=0.5, weight_decay=0.1)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in trained.parameters())
    assert {group["lr"] for group in groups} == {0.5, 15.0, 50.0, 5.0}


@pytest.mark.parametrize(
    ("model", "hardware", "taken"), [("t5-small", True, "bf16"), ("t5-tiny", True, "fp32"), ("t5-small", False, "fp32")]
)
def test_auto_takes_bf16_where_a_model_gains_by_it(
    model: str, hardware: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "multiplies_bf16", lambda: hardware)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    assert device.resolve_precision("auto", model) == taken


# Causal models, family by family.


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
    # Activations that are computed again.
    "gpt2 checkpointed": MODELS["gpt2"],
}  # fmt: skip
TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
TINY |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


def labelled_rows(lengths: Sequence[tuple[int, int]] = ((12, 3), (20, 5), (20, 1), (7, 6))) -> list[Row]:
    """Rows of so many tokens, of which the last so many have a label."""
    generator = np.random.default_rng(0)
    made = []
    for tokens, labelled in lengths:
        ids = generator.integers(3, 60, tokens).astype(np.int32)
        made.append((ids, np.where(np.arange(tokens) < tokens - labelled, -100, ids).astype(np.int32)))
    return made


def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with our loss, and transformers' own with the same weights."""
    if family == "t5":
        ours = model()
        theirs = T5ForConditionalGeneration(ours.config).train()
    else:
        config = CONFIG_MAPPING[family.split()[0]](**{**FAMILIES[family], **ENDS})
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        torch.manual_seed(0)
        ours, theirs = with_causal_loss(model_class)(config).train(), model_class(config).train()
    theirs.load_state_dict(ours.state_dict())
    if "checkpointed" in family:
        ours.activation_checkpointing_enable({"use_reentrant": False})
    return ours, theirs


def tiny() -> PreTrainedModel:
    return random_causal(causal_config(TINY), seed=1).train()


def test_rows_are_padded_on_the_right_and_predicting_positions_precede_their_labels() -> None:
    short = (np.array([5, 6]), np.array([-100, 6]))
    batch = collate_causal([short, (np.array([7, 8, 9]), np.array([7, 8, 9]))], pad=1)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100], [-100, 8, 9]]
    assert batch["label_positions"].tolist() == [0, 3, 4]


@pytest.mark.parametrize("family", ["t5", *FAMILIES])
def test_loss_and_gradients_are_those_of_transformers(family: str) -> None:
    ours, theirs = pair(family)
    batch = collate(rows(6)) if family == "t5" else collate_causal(labelled_rows(), pad=0)
    expected = theirs(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss
    loss = ours(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_a_batch_without_labels_costs_nothing() -> None:
    model = tiny()
    loss = model(**collate_causal(labelled_rows([(5, 0)]), 0)).loss
    loss.backward()
    assert loss == 0


def test_bf16_weights_have_a_loss_in_fp32() -> None:
    model, batch = tiny(), collate_causal(labelled_rows(), 0)
    expected = model(**batch).loss
    loss = model.to(torch.bfloat16)(**batch).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.0)
