"""Causal models: published shapes, random and saved weights, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    MambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from zeropods.data.encoding import train_byte_tokenizer
from zeropods.errors import UserError
from zeropods.plan.models import known_config
from zeropods.train.arguments import CausalArguments
from zeropods.train.causal import causal_config, load_causal, random_causal, set_dropout

WEIGHTS, NORM = "model.safetensors", "transformer.ln_f.weight"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The bytes, an end and a pad."""
    return train_byte_tokenizer(["a small text"], vocabulary=300)


@pytest.fixture(scope="module")
def tiny(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A GPT-2 of random weights for the tokenizer."""
    return loaded("gpt-tiny", tokenizer, init="random")


@pytest.fixture
def saved(tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """It, and its tokenizer, in a folder."""
    folder = tmp_path / "saved"
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def loaded(name: object, tokenizer: PreTrainedTokenizerBase, **flags: Any) -> PreTrainedModel:
    return load_causal(CausalArguments(model_name_or_path=str(name), **flags), tokenizer)


def said(name: object, tokenizer: PreTrainedTokenizerBase, **flags: Any) -> str:
    """What is said where a model is refused: one line."""
    with pytest.raises(UserError) as refused:
        loaded(name, tokenizer, **flags)
    line = str(refused.value)
    assert "\n" not in line
    return line


def change_weights(folder: Path, name: str, value: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator() -> None:
    config = causal_config({**known_config("llama-tiny"), "num_hidden_layers": 1})
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = random_causal(config, 3), random_causal(config, 3)
    assert torch.rand(1) == expected
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_weights_of_a_folder_are_loaded_in_fp32(
    tiny: PreTrainedModel, saved: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    halved = {name: tensor.bfloat16() for name, tensor in load_file(saved / WEIGHTS).items()}
    save_file(halved, saved / WEIGHTS, metadata={"format": "pt"})
    again = loaded(saved, tokenizer)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert torch.equal(again.lm_head.weight, tiny.lm_head.weight.bfloat16().float())


def test_the_dropout_flag_reaches_every_rate_of_the_family(saved: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = loaded(saved, tokenizer, dropout=0.25).config
    assert {config.attn_pdrop, config.embd_pdrop, config.resid_pdrop} == {0.25}


def with_half_a_file(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def with_a_damaged_configuration(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": "two"}))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: change_weights(folder, NORM, None), "its weights have no tensor 'transformer.ln_f.weight'"),
        (lambda folder: change_weights(folder, NORM, torch.ones(3)), "is of size [3], its config.json says [64]"),
        (with_half_a_file, "cannot be loaded"),
        (with_a_damaged_configuration, "'n_layer' expected int, got str"),
        (BertConfig().save_pretrained, "'bert' is no causal language model"),
    ],
)
def test_a_folder_that_is_no_causal_model_is_refused_in_one_line(
    damage: Callable[[Path], None],
    line: str,
    saved: Path,
    tokenizer: PreTrainedTokenizerBase,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damage(saved)
    assert line in said(saved, tokenizer)
    # transformers would print a table beside it.
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_dropout_for_a_family_without_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"--dropout 0\.1: mamba has no dropout"):
        set_dropout(MambaConfig(), 0.1)


def test_a_model_with_another_tokenizer_than_the_sets_is_refused(saved: Path) -> None:
    other = train_byte_tokenizer(["quite another text, of other words"], vocabulary=300)
    assert "prepare the data with --tokenizer" in said(saved, other)


def test_bloom_asked_for_sdpa_runs_with_eager_attention(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("bloom-tiny", tokenizer, init="random", attn_implementation="sdpa")
    assert model.config._attn_implementation == "eager"
    assert caplog.messages == ["bloom: no SDPA for this family; its attention runs as --attn_implementation eager"]
