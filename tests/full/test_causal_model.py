"""Causal models: published shapes, random and saved weights, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    T5Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from zeropods.data.tokenizers import train_byte_tokenizer
from zeropods.errors import UserError
from zeropods.plan.shapes import CAUSAL_SHAPES
from zeropods.train.arguments import CausalArguments
from zeropods.train.causal_models import (
    attention_for,
    causal_config,
    check_attention,
    load_causal,
    random_causal,
    set_dropout,
    shape_of,
)

WEIGHTS = "model.safetensors"


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


def loaded(
    name: object, tokenizer: PreTrainedTokenizerBase, *, precision: str = "fp32", **flags: Any
) -> PreTrainedModel:
    return load_causal(CausalArguments(model_name_or_path=str(name), **flags), tokenizer, precision=precision)


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


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("distilgpt2", 81_912_576), ("bloom-560m", 559_214_592), ("qwen3-0.6b", 596_049_920),
        ("mistral-7b", 7_241_732_096), ("llama-8b", 8_030_261_248),
    ],
)  # fmt: skip
def test_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(causal_config(CAUSAL_SHAPES[name]))
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters


@pytest.mark.parametrize("name", CAUSAL_SHAPES)
def test_a_configuration_gives_its_shape_back(name: str) -> None:
    assert shape_of(causal_config(CAUSAL_SHAPES[name])) == asdict(CAUSAL_SHAPES[name])


@pytest.mark.parametrize(
    "config", [Qwen2Config(), GPT2Config(add_cross_attention=True), LlamaConfig(attention_bias=True)]
)
def test_what_no_shape_describes_has_none(config: Any) -> None:
    assert shape_of(config) is None


def test_a_bloom_of_another_feed_forward_width_is_refused() -> None:
    with pytest.raises(UserError, match=r"ffn 100; BLOOM's is 4 x hidden = 256"):
        causal_config(replace(CAUSAL_SHAPES["bloom-tiny"], ffn=100))


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator() -> None:
    shape = replace(CAUSAL_SHAPES["llama-tiny"], layers=1)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = random_causal(shape, 3), random_causal(shape, 3)
    assert torch.rand(1) == expected
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_random_model_ends_texts_as_its_tokenizer_does(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    ends = tiny.generation_config
    assert (ends.eos_token_id, ends.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tiny.config.eos_token_id == tokenizer.eos_token_id


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


def test_dropout_for_a_family_without_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"--dropout 0\.1: mamba has no dropout"):
        set_dropout(MambaConfig(), 0.1)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CAUSAL_SHAPES, "small", replace(CAUSAL_SHAPES["gpt-tiny"], vocabulary=100))
    line = said("small", tokenizer, init="random", data="set")
    assert line.startswith(f"set: its tokenizer has {len(tokenizer)} tokens, small has 100 embedding rows;")


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bloom-tiny"])
def test_a_sequence_longer_than_the_positions_is_refused(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    line = said(name, tokenizer, init="random", max_seq_length=1_025)
    assert line == f"--max_seq_length 1025: {name} has 1024 positions; give at most 1024"


def test_a_missing_tensor_is_refused_without_a_table(
    saved: Path, tokenizer: PreTrainedTokenizerBase, capfd: pytest.CaptureFixture[str]
) -> None:
    change_weights(saved, "transformer.ln_f.weight", None)
    assert "its weights have no tensor 'transformer.ln_f.weight'" in said(saved, tokenizer)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_a_tensor_of_another_size_is_refused(saved: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    change_weights(saved, "transformer.ln_f.weight", torch.ones(3))
    line = said(saved, tokenizer)
    assert "its tensor 'transformer.ln_f.weight' is of size [3], its config.json says [64]" in line


def test_half_a_file_of_weights_is_refused(saved: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    whole = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in said(saved, tokenizer)


def test_pickled_weights_are_refused(saved: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (saved / WEIGHTS).rename(saved / "pytorch_model.bin")
    assert "no weights (*.safetensors) in this folder" in said(saved, tokenizer)


def test_an_index_that_names_pickled_weights_is_refused(saved: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "pytorch_model.bin"}}))
    assert "names 'pytorch_model.bin' as weights" in said(saved, tokenizer)


def test_a_damaged_configuration_is_refused(saved: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "n_layer": "two"}))
    assert "'n_layer' expected int, got str" in said(saved, tokenizer)


@pytest.mark.parametrize(("config", "kind"), [(T5Config(), "t5"), (BertConfig(), "bert")])
def test_a_model_that_is_not_causal_is_refused(
    config: Any, kind: str, saved: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config.save_pretrained(saved)
    assert f"{kind!r} is no causal language model" in said(saved, tokenizer)


def test_a_model_with_another_tokenizer_than_the_sets_is_refused(saved: Path) -> None:
    other = train_byte_tokenizer(["quite another text, of other words"], vocabulary=300)
    assert "prepare the data with --tokenizer" in said(saved, other)


def test_flash_attention_in_fp32_names_sdpa(tokenizer: PreTrainedTokenizerBase) -> None:
    line = said("gpt-tiny", tokenizer, init="random", attn_implementation="flash_attention_2")
    assert "FlashAttention-2 has no FP32 kernels" in line
    assert line.endswith("use --attn_implementation sdpa")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_flash_attention_without_a_gpu_names_sdpa() -> None:
    with pytest.raises(UserError, match=r"needs a CUDA GPU.*use --attn_implementation sdpa"):
        check_attention("flash_attention_2", "bf16")


def test_bloom_asked_for_sdpa_runs_with_eager_attention(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("bloom-tiny", tokenizer, init="random", attn_implementation="sdpa")
    assert model.config._attn_implementation == "eager"
    assert caplog.messages == ["bloom: no SDPA for this family; its attention runs as --attn_implementation eager"]


def test_flash_attention_for_a_family_without_it_is_refused() -> None:
    config = BloomConfig()
    with pytest.raises(UserError, match=r"bloom has no FlashAttention; use --attn_implementation sdpa"):
        attention_for(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, "flash_attention_2")
