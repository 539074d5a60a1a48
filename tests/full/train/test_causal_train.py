"""Runs of `causal_train.py` on questions and on text, by one process and two, and its models: what they refuse too."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
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

from tests.full.conftest import ROOT, run_several
from tests.full.train import test_train
from tests.full.train.test_train import losses
from zeropods.cli import main
from zeropods.data.encoding import train_byte_tokenizer
from zeropods.data.prepare import Preparation, prepare
from zeropods.errors import UserError
from zeropods.measure.record import BatchShape, Record, read_record
from zeropods.train import run_argv
from zeropods.train.causal import load_causal, set_dropout
from zeropods.train.flags import CausalArguments

TINY = [
    "--model_name_or_path", "gpt-tiny", "--init", "random", "--precision", "fp32", "--threads", "1", "--dropout", "0",
    "--logging_steps", "1", "--save_steps", "0", "--learning_rate", "3e-3", "--memory_interval", "0",
]  # fmt: skip
LM = ["--task", "lm", "--max_seq_length", "32"]
CURVE = ["--max_train_steps", "5", "--eval_steps", "0"]
WHOLE = [*CURVE, "--per_device_train_batch_size", "12", "--gradient_accumulation_steps", "1"]
ALSO = ["--eval_on_start", True, "--save_steps", 5, "--save_total_limit", 1, "--generation_prompt", "The town"]


def train(folder: Path, data: Path, *flags: object) -> Record:
    """Train in this process and return the record."""
    argv = [*TINY, "--data", str(data), "--outputdir", str(folder), *map(str, flags)]
    assert run_argv(["causal_train.py", *argv]) == 0
    return read_record(folder)


refused = partial(test_train.refused, script="causal_train.py", common=TINY)


@pytest.fixture(scope="module")
def text_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text, prepared and trained on by one run."""
    folder = tmp_path_factory.mktemp("runs") / "lm"
    train(folder, text, *LM, *WHOLE, *ALSO)
    return folder


@pytest.fixture(scope="module")
def questions(squad_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's first 60 questions of each split, prepared."""
    folder = tmp_path_factory.mktemp("squad") / "prepared"
    wanted = Preparation(task="squad", data=squad_sample, tokenizer="gpt-tiny", max_seq_length=96, limit=60)
    prepare(wanted, folder)
    return folder


@pytest.fixture(scope="module")
def squad_run(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on questions, in one batch a step."""
    folder = tmp_path_factory.mktemp("runs") / "squad"
    train(folder, questions, *WHOLE)
    return folder


def test_a_run_on_text_says_its_perplexity_and_a_command_that_works(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", text, *LM, "--max_train_steps", 2)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("ok: 2 steps, loss ") and re.search(r", perplexity [\d.]+ \(test\), ", last), last
    assert main(shlex.split(last.partition("next: zeropods ")[2])) == 0
    assert (tmp_path / "a-summary" / "index.html").is_file()


def test_every_token_but_a_blocks_first_carries_a_loss_and_none_is_padding(text_run: Path) -> None:
    rank = read_record(text_run).ranks[0]
    rows = 5 * 12
    assert (rank.source_tokens, rank.target_tokens, rank.padded_tokens) == (rows * 32, rows * 31, rows * 32)
    assert rank.largest_batch == BatchShape(rows=12, source_tokens=32, target_tokens=0, label_tokens=12 * 31)


def test_the_loss_falls_from_that_of_a_guess(text_run: Path) -> None:
    record = read_record(text_run)
    before, after = losses(record, "eval_losses")
    assert [entry.step for entry in record.eval_losses] == [0, 5]
    assert before == pytest.approx(math.log(1_024), rel=0.03)
    assert after < before - 0.5
    assert losses(record)[-1] < losses(record)[0]


def test_the_perplexity_is_that_of_every_token_of_dev_and_test(text_run: Path) -> None:
    score = json.loads((text_run / "score.dev.json").read_text())
    assert score["loss"] == pytest.approx(losses(read_record(text_run), "eval_losses")[-1])
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    splits = json.loads((text_run / "data" / "manifest.json").read_text())["splits"]
    for split in ("dev", "test"):
        counted = json.loads((text_run / f"score.{split}.json").read_text())["tokens"]
        assert counted == splits[split]["target"]["total"]


def test_the_model_can_be_loaded_by_anyone(text_run: Path, squad_run: Path) -> None:
    from transformers import AutoModelForCausalLM

    for run, prompt in ((text_run, None), (squad_run, "squad")):
        model, found = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
        assert (type(model).__name__, model.config.architectures) == ("GPT2LMHeadModel", ["GPT2LMHeadModel"])
        assert not found["missing_keys"]
        assert getattr(model.config, "prompt", None) == prompt


def test_data_that_a_run_has_prepared_are_not_replaced(
    text_run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(text_run / "data", run / "data")
    (run / "run.lock").touch()
    before = (run / "data" / "manifest.json").read_bytes()
    said = refused(capsys, "--data", text, "--outputdir", run, "--task", "lm", "--max_seq_length", 16, *WHOLE)
    assert f"{run}/data: was prepared from data or with settings that differ" in said
    assert (run / "data" / "manifest.json").read_bytes() == before


def test_only_answers_carry_a_loss_on_questions(squad_run: Path, questions: Path) -> None:
    record = read_record(squad_run)
    rank = record.ranks[0]
    assert (record.task, record.prompt, record.identity["loss_on"]) == ("squad", "squad", "answer")
    assert 0 < rank.target_tokens < rank.source_tokens / 4 < rank.padded_tokens / 4
    assert not list(squad_run.glob("score.*"))
    assert losses(record)[-1] < losses(record)[0]


def test_an_evaluation_of_a_part_claims_no_perplexity(text_run: Path, tmp_path: Path) -> None:
    data, some = text_run / "data", ("--max_eval_steps", 1, "--per_device_eval_batch_size", 3, "--subset", 8)
    record = train(tmp_path / "run", data, *WHOLE, "--max_train_steps", 1, *some)
    assert (record.dev_rows, record.train_rows) == (3, 8)
    assert not list((tmp_path / "run").glob("score.*"))


@pytest.fixture(scope="module")
def two_ranks(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on questions on two ranks: DDP, and the two causal DeepSpeed files."""
    folder = tmp_path_factory.mktemp("two")
    rows = ("--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2")
    schedules = {"causal_zero2_offload": "cosine", "causal_zero3_offload": "linear"}
    runs: list[tuple[int, Path, list[object]]] = [(2, folder / "ddp", [])]
    for name, schedule in schedules.items():
        config = ROOT / "dsconfig" / f"{name}.json"
        flags = ["--deepspeed", config, "--lr_scheduler_type", schedule, "--num_warmup_steps", 2]
        runs.append((2, folder / name, flags))
    run_several([*TINY, "--data", questions, *CURVE, *rows], *runs, script="causal_train.py")
    return folder


def test_two_ranks_train_as_one(two_ranks: Path, squad_run: Path) -> None:
    two, one = read_record(two_ranks / "ddp"), read_record(squad_run)
    assert (two.technique, two.world_size, two.effective_batch_size) == ("ddp", 2, 12)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(two, "eval_losses") == pytest.approx(losses(one, "eval_losses"), rel=1e-5)


@pytest.mark.parametrize("name", ["causal_zero2_offload", "causal_zero3_offload"])
def test_deepspeeds_optimizer_and_schedule_train_with_what_the_flags_say(
    name: str, two_ranks: Path, squad_run: Path
) -> None:
    record = read_record(two_ranks / name)
    assert (record.status, record.technique) == ("ok", name.removeprefix("causal_"))
    # The rate of DeepSpeed's schedules is 0 in the first step.
    assert losses(record)[0] == pytest.approx(losses(read_record(squad_run))[0], rel=1e-5)
    assert losses(record)[-1] < losses(record)[0] - 0.5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--attn_implementation", "flash_attention_2"), "use --attn_implementation sdpa"),
        (("--task", "lm"), "--task lm: --data {} was prepared with squad; leave the flag out"),
        (("--max_seq_length", 64), "--max_seq_length 64: --data {} was prepared with 96"),
        (("--tokenizer_name", "gpt2"), "--tokenizer_name gpt2: --data {} was prepared with gpt-tiny"),
        (("--text_field", "body"), "--text_field body: --data {} is a prepared set already"),
        (("--generation_prompt", " "), "--generation_prompt ' ': contains no words"),
    ],
)
def test_bad_flags_are_refused(
    capsys: pytest.CaptureFixture[str], questions: Path, tmp_path: Path, flags: tuple[object, ...], said: str
) -> None:
    run = tmp_path / "run"
    assert said.format(questions) in refused(capsys, "--data", questions, "--outputdir", run, *flags)


def test_the_best_model_needs_a_dev_split(capsys: pytest.CaptureFixture[str], text_run: Path, tmp_path: Path) -> None:
    shutil.copytree(text_run / "data", tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "dev")
    best = ("--load_best_model", True, "--eval_steps", 5, "--save_steps", 5)
    said = refused(capsys, "--data", tmp_path / "data", "--outputdir", tmp_path / "run", *best)
    assert "has no dev split" in said


def test_a_run_whose_raw_data_are_gone_goes_on_with_what_it_prepared(text_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(text_run, tmp_path / "run"))
    (run / "record.json").unlink()
    assert train(run, tmp_path / "gone", *LM, *WHOLE, *ALSO).status == "ok"


# Causal models: published shapes, random and saved weights, and what is refused.


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


def test_weights_of_a_folder_are_loaded_in_fp32(
    tiny: PreTrainedModel, saved: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    halved = {name: tensor.bfloat16() for name, tensor in load_file(saved / WEIGHTS).items()}
    save_file(halved, saved / WEIGHTS, metadata={"format": "pt"})
    again = loaded(saved, tokenizer)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert torch.equal(again.lm_head.weight, tiny.lm_head.weight.bfloat16().float())


def test_the_dropout_flag_reaches_every_rate_of_a_family_that_has_any(
    saved: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = loaded(saved, tokenizer, dropout=0.25).config
    assert {config.attn_pdrop, config.embd_pdrop, config.resid_pdrop} == {0.25}
    with pytest.raises(UserError, match=r"--dropout 0\.1: mamba has no dropout"):
        set_dropout(MambaConfig(), 0.1)


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
        (lambda folder: change_weights(folder, NORM, torch.ones(3)), "has size [3], but its config.json says [64]"),
        (with_half_a_file, "cannot be loaded"),
        (with_a_damaged_configuration, "'n_layer' expected int, got str"),
        (BertConfig().save_pretrained, "'bert' is not a causal language model"),
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


def test_a_model_with_another_tokenizer_than_the_sets_is_refused(saved: Path) -> None:
    other = train_byte_tokenizer(["quite another text, of other words"], vocabulary=300)
    assert "prepare the data with --tokenizer" in said(saved, other)


def test_bloom_asked_for_sdpa_runs_with_eager_attention(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("bloom-tiny", tokenizer, init="random", attn_implementation="sdpa")
    assert model.config._attn_implementation == "eager"
    assert caplog.messages == ["bloom: no SDPA for this family; its attention runs as --attn_implementation eager"]
