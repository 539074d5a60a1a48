"""`zeropods plan --model` of a folder, a file or a hub id: any model that transformers builds."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from zeropods.cli import main
from zeropods.plan.facts import shape_for, shape_recorded
from zeropods.train.causal import causal_config, random_causal
from zeropods.train.pretrained import configuration_of

ROWS, TOKENS = 3, 72
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160, "vocab_size": 1_009,
    "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SHARED = {**SIZES, "num_key_value_heads": 2}
T5 = {"d_model": 64, "d_kv": 24, "d_ff": 160, "num_layers": 2, "num_heads": 4, "vocab_size": 1_009, "dropout_rate": 0.0}
GATED = {**T5, "feed_forward_proj": "gated-gelu"}
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192, "rope_theta": 5e5,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MODELS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "t5-v1.1": {**GATED, "tie_word_embeddings": False},
    "mt5": {**GATED, "tie_word_embeddings": False},
    "bart": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 1_009,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "dropout": 0.0,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1_009, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
             "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1},
    "gpt_neox": SIZES,
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1_009},
    "opt": {**SIZES, "ffn_dim": 160, "word_embed_proj_dim": 48, "dropout": 0.0},
    "llama": {**SHARED, "rope_parameters": LLAMA_3},
    "mistral": {**SHARED, "sliding_window": 48},
    "qwen2": {**SHARED, "tie_word_embeddings": True},
    "qwen3": {**SHARED, "head_dim": 24},
    "gemma2": {**SHARED, "head_dim": 24, "sliding_window": 48},
    "gemma3_text": {**SHARED, "head_dim": 24, "sliding_window": 48, "num_hidden_layers": 7},
    "phi3": {**SHARED, "rope_scaling": LONG, "original_max_position_embeddings": 4_096},
    "mixtral": {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **SIZES, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 72, "v_head_dim": 40, "first_k_dense_replace": 2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, name: str, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    document = {"model_type": name.split("-")[0], **MODELS[name], **more}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def planned(capsys: pytest.CaptureFixture[str], model: Path, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", "--model", str(model), "--json", *argv]) == 0
    return dict(json.loads(capsys.readouterr().out))


def real(name: str, folder: Path) -> PreTrainedModel:
    """The model with weights, on the CPU."""
    given = json.loads((folder / "config.json").read_text())
    config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    config._attn_implementation = "eager"
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config).train()


def saved_bytes(model: PreTrainedModel, forward: Callable[[], object]) -> int:
    """Bytes that a forward pass saves for its backward pass, each piece of memory once, the model's own left out."""
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        # Indices are no activations: they are a thousandth of them in a model that is not tiny.
        if storage not in own and tensor.is_floating_point() | (tensor.dtype is torch.bool):
            saved.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_is_planned_as_its_model_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "model", name)
    model = real(name, folder)
    has_encoder = model.config.is_encoder_decoder
    lengths = ["--source-length", "--target-length"] if has_encoder else ["--seq-length", "--label-length"]
    argv = ["--batch-size", str(ROWS), "--technique", "none", *(f"{flag}={TOKENS}" for flag in lengths)]
    found = planned(capsys, folder, *argv, *([] if has_encoder else ["--attention", "eager"]))
    (estimate,) = found["techniques"]
    # transformers ties the head of a T5 until it meets a checkpoint that does not.
    untied = model.get_input_embeddings().weight.numel() if MODELS[name].get("tie_word_embeddings") is False else 0
    parameters = sum(parameter.numel() for parameter in model.parameters()) + untied
    assert estimate["bytes"]["parameters"] == 4 * parameters
    if not has_encoder:
        terms = {each["name"]: each["bytes"] for each in estimate["terms"] if each["part"] == "activations"}
        known = sum(size for name, size in terms.items() if not name.startswith("log-softmax"))
        ids, counter = torch.ones(ROWS, TOKENS, dtype=torch.long), FlopCounterMode(display=False)
        with counter:
            assert known == pytest.approx(saved_bytes(model, lambda: model(input_ids=ids, use_cache=False)), rel=0.02)
        shape = shape_for(str(folder))
        forward = shape.training_flops(TOKENS, TOKENS, whole=True) / 3
        # Products outside layers and head are left out; PyTorch counts none of a grouped product.
        assert name == "mixtral" or ROWS * forward == pytest.approx(counter.get_total_flops(), rel=0.05)
    says = "2 of 4 experts" if name == "mixtral" else None
    assert says is None or says in found["remark"]


BERT = {**SIZES, "max_position_embeddings": 128, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def test_an_encoder_only_model_sees_whole_rows_and_has_one_label_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **BERT}))
    asked = ["--batch-size", str(ROWS), "--seq-length", str(TOKENS), "--technique", "none", "--attention", "eager"]
    found = planned(capsys, tmp_path, *asked)
    config = CONFIG_MAPPING["bert"].from_dict(BERT)
    config._attn_implementation = "eager"
    model = AutoModelForSequenceClassification.from_config(config).train()
    (estimate,) = found["techniques"]
    assert estimate["bytes"]["parameters"] == 4 * model.num_parameters()
    kept = sum(
        each["bytes"] for each in estimate["terms"] if each["name"] in ("layers", "ends, masks, weights in FP16")
    )
    ids, counter = torch.ones(ROWS, TOKENS, dtype=torch.long), FlopCounterMode(display=False)
    with counter:
        saved = saved_bytes(model, lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)))
    # The CPU's dropout keeps its mask in FP32, a GPU's in a byte: one for each probability and for three hidden states.
    masks = 2 * ROWS * TOKENS * (4 * TOKENS + 2 * 64) + ROWS * TOKENS * 64
    assert kept == pytest.approx(saved - 3 * masks, rel=0.02)
    shape = shape_for(str(tmp_path))
    assert shape.is_encoder_only and ROWS * shape.training_flops(TOKENS, 1, whole=True) / 3 == pytest.approx(
        counter.get_total_flops(), rel=0.05
    )
    assert f"--model {tmp_path}: planned only" in found["remark"]
    assert main(["plan", "--model", str(tmp_path), "--loss", "transformers"]) == 1
    assert "is an encoder-only model; leave it out" in capsys.readouterr().err


def test_a_recorded_configuration_leads_to_the_model_it_is_of() -> None:
    sizes = {"model_type": "bloom", **MODELS["bloom"]}
    model = random_causal(causal_config(sizes), seed=0)
    shape = shape_recorded(json.dumps(configuration_of(model)))
    assert shape is not None and shape.parameters == model.num_parameters()
    assert shape_recorded(json.dumps({"model_type": "none such"})) is None


def test_the_second_plan_of_a_configuration_needs_no_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "model", "llama", vocab_size=1_013) / "config.json"
    found = planned(capsys, file)
    # As a run folder has it: its own file of that name is not the model's.
    (tmp_path / "config.json").write_text("{}")
    assert planned(capsys, tmp_path)["techniques"] == found["techniques"]
    code = "import sys; from zeropods.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "plan", "--model", str(file), "--json", "--batch-size", "9"]
    again = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert again["techniques"][0]["bytes"]["parameters"] == found["techniques"][0]["bytes"]["parameters"]
    assert again["techniques"][0]["bytes"]["activations"] > 2 * found["techniques"][0]["bytes"]["activations"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A hub with one model, `somebody/llama`."""
    served = tmp_path / "hub" / "somebody" / "llama" / "resolve" / "main"
    served.mkdir(parents=True)
    write(served, "llama")
    about = tmp_path / "hub" / "api" / "models" / "somebody"
    about.mkdir(parents=True)
    (about / "llama").write_text('{"id": "somebody/llama", "modelId": "somebody/llama", "sha": "1", "siblings": []}')

    class Hub(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("ETag", '"abc"')
            super().end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(tmp_path / "hub")))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_hub_id_is_fetched_once_and_a_hub_that_is_away_said(hub: str, tmp_path: Path) -> None:
    def plan(model: str, endpoint: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "zeropods", "plan", "--model", model, "--json", "--technique", "none"]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    away = "http://127.0.0.1:9"
    refused = plan("somebody/llama", away)
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert "cannot be fetched from the hub" in refused.stderr and "give that file" in refused.stderr
    for endpoint in (hub, away):
        done = plan("somebody/llama", endpoint)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["request"]["model"] == "somebody/llama"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "nothing"}, "transformers cannot build this model"),
        ({"model_type": None}, "no model_type; expected a config.json"),
        ({"num_attention_heads": 5}, "transformers cannot build this model|cannot be traced"),
        ({"model_type": "mistral", "sliding_window": 4}, "a window of 4 tokens is too small to trace"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "layers of type conv; only attention"),
        (
            {"model_type": "rwkv", "num_hidden_layers": 1, "rope_parameters": None},
            "keeps states whose size does not depend",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights are quantised.*name the original"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            "own needs the model's own code.*--trust-remote-code",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "model", "llama", **change)
    assert main(["plan", "--model", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line


def test_code_of_a_model_runs_where_that_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    folder = write(tmp_path / "model", "llama", model_type="own", auto_map=own)
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    found = planned(capsys, folder, "--trust-remote-code", "--technique", "none")
    plain = planned(capsys, write(tmp_path / "plain", "llama"), "--technique", "none")
    assert found["techniques"][0]["bytes"] == plain["techniques"][0]["bytes"]
