"""A misspelled flag, a model or data that are not there: said in one line, before anything starts or is written."""

import json
import os
import resource
import shlex
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from zeropods.cli import main, parser
from zeropods.data.manifest import SCHEMA_VERSION, Manifest
from zeropods.errors import UserError, guarded
from zeropods.files import write_text
from zeropods.launch import command
from zeropods.train.flags import NO_FP16, PROJECT, SCRIPTS, CausalArguments, TextToSQLArguments, parse_flags

MANIFEST = Manifest(
    schema_version=SCHEMA_VERSION, content_key="0", task="text2sql", prompt="schema", tokenizer="mine",
    tokenizer_fingerprint="0", vocabulary_size=2_000, max_source_tokens=256, max_target_tokens=96, limit=None, copies=1,
    source_sha256={}, splits={}, versions={}, data="raw",
)  # fmt: skip
DSCONFIG = PROJECT / "dsconfig"
RAW = {"data": "raw", "dataset_path": None}
WORDS = "--init random --model_id t5-small --dataset_path set"


def a_set(folder: Path, manifest: Manifest) -> None:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)))
    Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, "<unk>")).save(str(folder / "tokenizer" / "tokenizer.json"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: two sets, a model with another tokenizer, one without weights."""
    monkeypatch.chdir(tmp_path)
    a_set(tmp_path / "set", MANIFEST)
    a_set(tmp_path / "questions", replace(MANIFEST, task="squad", max_seq_length=64, loss_on="answer"))
    for name, words in (("other", {"<unk>": 0, "b": 1}), ("small", {"<unk>": 0, "a": 1}), ("bare", {"<unk>": 0})):
        (tmp_path / name).mkdir()
        Tokenizer(models.WordLevel(words, "<unk>")).save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 2 if name == "small" else 4_000}))
        if name != "bare":
            (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    (tmp_path / "pair" / "model.safetensors").touch()
    (tmp_path / "raw").mkdir()
    return tmp_path


WRONG = [
    (f"textsql_train.py {WORDS} --max_step 3", "--max_step: not a flag of textsql_train.py; did you mean --max_steps?"),
    (f"textsql_train.py {WORDS} --model_id t5-huge", "model 't5-huge' is unknown"),
    (f"textsql_train.py {WORDS} --dataset_path nowhere", "nowhere: no prepared data set there"),
    (f"textsql_train.py {WORDS} --dataset_path questions", "prepared for squad; train on it with causal_train.py"),
    (f"textsql_train.py {WORDS} --model_id t5-tiny", "its tokenizer has 2000 tokens, t5-tiny has 1024 embedding rows"),
    ("textsql_train.py --model_id other --dataset_path set", "its tokenizer gives 'b' id 1, the prepared set's"),
    ("textsql_train.py --model_id small --dataset_path set", "has 2000 tokens, small has 2 embedding rows"),
    ("textsql_train.py --model_id bare --dataset_path set", "bare: no weights (*.safetensors) in this folder"),
    (f"textsql_train.py {WORDS} --precision fp16", "--precision fp16: T5's activations overflow FP16"),
    ("causal_train.py --data set", "prepared for text2sql; train on it with textsql_train.py"),
    ("causal_train.py --data raw --max_steps 3", "not a flag of causal_train.py; did you mean --max_train_steps?"),
    (f"causal_train.py --data raw --deepspeed {DSCONFIG}/causal_zero2_offload.json", "give --lr_scheduler_type cosine"),
    ("causal_train.py --data nowhere", "--data nowhere: no such folder; give a prepared set, or fetch raw data"),
    ("causal_train.py --data raw --model_name_or_path pair", "--model_name_or_path pair: 't5' is not a causal lang"),
    (f"textsql_train.py {WORDS} --deepspeed raw", "--deepspeed raw: a folder; expected one like dsconfig/zero1.json"),
    (f"textsql_train.py {WORDS} --outputdir small/config.json", "small/config.json is a file; name a folder"),
    (f"textsql_train.py {WORDS} --outputdir small/config.json/run", "small/config.json is a file; name a folder"),
    (f"textsql_train.py {WORDS} --outputdir /proc/run", "--outputdir /proc/run: /proc cannot be written to (No such"),
    (f"textsql_train.py {WORDS} --resume maybe", "--resume maybe: no such checkpoint; give auto, never or the folder"),
    (f"textsql_train.py {WORDS} --resume small/config.json", "--resume small/config.json: no such checkpoint; give"),
    (f"textsql_train.py {WORDS} --learning_rate nan", "--learning_rate nan; expected a finite number, at least 0"),
    (f"textsql_train.py {WORDS} --dropout 1.5", "--dropout 1.5; expected at least 0 and less than 1"),
    (f"textsql_train.py {WORDS} --save_steps 0.5", "--save_steps: '0.5'; expected a whole number"),
    (f"textsql_train.py {WORDS} --precision int8", "--precision 'int8'; expected auto, fp32, bf16, fp16"),
    (
        f"textsql_train.py {WORDS} --fp16 True --bf16 True",
        "--fp16: not a flag of textsql_train.py; did you mean --prec",
    ),
    (f"textsql_train.py {WORDS} --optim sgd", "--optim: not a flag of textsql_train.py; every run trains with AdamW"),
    (f"textsql_train.py {WORDS} --lr_scheduler_type wavy", "--lr_scheduler_type 'wavy'; expected linear, cosine"),
    (f"textsql_train.py {WORDS} --threads 100000", "--threads 100000; expected at least 0 and at most 1024"),
    (f"textsql_train.py {WORDS} extra words", "extra: not a flag of textsql_train.py, nor the value of one"),
    (
        f"textsql_train.py {WORDS} --deepspeed zero2",
        "--deepspeed zero2: no such file; expected one like dsconfig/zero1",
    ),
    ("causal_train.py --data pair/config.json", "--data pair/config.json: a file; give a prepared set"),
    ("python textsql_train.py", "; name the script itself, as in -- textsql_train.py"),
    ("notebooks/00_plan.ipynb", "notebooks/00_plan.ipynb: a notebook; run it with papermill"),
    ("causal_train.py --data questions --loss_on all", "--loss_on all: --data questions was prepared with answer"),
]


@pytest.mark.parametrize("launcher", ["--launcher none", "--launcher none --dry-run", "--launcher slurm --dry-run"])
@pytest.mark.parametrize(("script", "said"), WRONG)
def test_a_launch_looks_before_anything_starts(
    launcher: str, script: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    assert main(["launch", *launcher.split(), "--", *script.split()]) == 1
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and out == ""
    assert sorted(here.rglob("*")) == before


@pytest.mark.usefixtures("here")
def test_fp16_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "own_gpus", lambda: 0)
    script = ["causal_train.py", "--precision", "fp16", "--init", "random", "--data", "raw"]
    assert main(["launch", "--launcher", "none", "--dry-run", "--", *script]) == 1
    assert NO_FP16 in capsys.readouterr().err


@pytest.mark.parametrize(
    ("slots", "size", "said"),
    [
        (3, 2, "zero_hpz_partition_size 2: does not divide the 3 slots of a pod;"),
        (1, '"auto"', 'zero_hpz_partition_size "auto": a pod of 1 slot has nothing to divide;'),
    ],
)
def test_a_second_division_that_does_not_fit_the_slots_is_refused_before_anything_starts(
    slots: int, size: object, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        (DSCONFIG / "zero3++.json")
        .read_text()
        .replace('"zero_hpz_partition_size": "auto"', f'"zero_hpz_partition_size": {size}')
    )
    (here / "mine.json").write_text(text)
    words = ["textsql_train.py", *WORDS.split(), "--deepspeed", "mine.json"]
    before = sorted(here.rglob("*"))
    assert main(["launch", "--launcher", "none", "--slots", str(slots), "--", *words]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("zeropods: --deepspeed mine.json: zero_optimization.") and said in err
    assert err.count("\n") == 1 and out == "" and sorted(here.rglob("*")) == before


def test_what_zeropp_quantizes_is_refused_without_a_gpu(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "own_gpus", lambda: 0)
    zero = '"stage": 3, "zero_quantized_weights": true'
    (here / "mine.json").write_text((DSCONFIG / "zero3.json").read_text().replace('"stage": 3', zero))
    words = ["textsql_train.py", *WORDS.split(), "--deepspeed", "mine.json"]
    assert main(["launch", "--launcher", "none", "--dry-run", "--", *words]) == 1
    said = "zero_quantized_weights true: DeepSpeed quantizes by operations of CUDA, and there is no GPU here; remove it"
    assert capsys.readouterr().err == f"zeropods: --deepspeed mine.json: zero_optimization.{said}\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "other-none-1-pod-schema: --model_id other: its tokenizer gives 'b' id 1"),
        ({"dataset_path": "questions"}, "prepared for squad; train on it with causal_train.py"),
        ({"flags": {"max_step": 3}}, "--max_step: not a flag of textsql_train.py; did you mean --max_steps?"),
        ({"cells": [{"flags": {"max_step": 3}}]}, "--max_step: not a flag of textsql_train.py; did you mean --max_s"),
        ({"flags": {"learning_rate": "fast"}}, "--learning_rate: 'fast'; expected a number"),
        (
            {"model": "t5-large-tiny", **RAW},
            "t5-large-tiny-none-1-pod-schema: --model_id t5-large-tiny: has no pretrained weights",
        ),
        ({"model": "t5-giant", "flags": {"init": "random"}, **RAW}, "model 't5-giant' is unknown"),
        ({"technique": "ddp", "pods": 2, "flags": {"max_train_seconds": 9}}, "clocks of several processes differ"),
        ({"script": "causal_train.py", "flags": {"max_steps": 3}}, "--max_steps: not a flag of causal_train.py"),
        ({"model": "t5-tiny", "flags": {"init": "random"}, **RAW}, "raw/train.jsonl: no such file; give a folder"),
        (
            {"model": "t5-small", "flags": {"init": "random"}, "prompt": "question"},
            "set: was prepared with prompt schema, but the matrix has question; name another set",
        ),
    ],
)
def test_a_dry_run_of_a_sweep_looks_too(
    changes: dict[str, object], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = {"model": "other", "technique": "none", "pods": 1, "dataset_path": "set", "flags": {"max_steps": 3}}
    document = {key: value for key, value in {**matrix, **changes}.items() if value is not None}
    (here / "m.yaml").write_text(json.dumps(document))
    assert main(["sweep", "m.yaml", "--dry-run"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_a_script_says_it_once_and_before_it_imports_torch(rank: str | None, here: Path) -> None:
    script = str(PROJECT / "textsql_train.py")
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, '--modle_id', 'x']\n"
        "try:\n"
        f"    runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    print(ended.code, 'torch' in sys.modules)\n"
    )
    environment = {**os.environ, **({} if rank is None else {"RANK": rank})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "1 False\n"
    said = "zeropods: --modle_id: not a flag of textsql_train.py; did you mean --model_id?\n"
    assert done.stderr == ("" if rank == "1" else said)


@pytest.mark.parametrize(
    "words",
    [
        "launch --launcher none --dry-run -- textsql_train.py --dataset_path 'my set'",
        "launch --launcher none --dry-run -- causal_train.py --data nowhere",
        "score p.jsonl --data other --split test",
        "score a.jsonl --data other --split test",
    ],
)
def test_a_command_that_a_message_names_can_be_pasted(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "p.jsonl").write_text('{"index": 0, "question": "q", "prediction": "p", "query": null}\n')
    (here / "a.jsonl").write_text('{"index": 0, "id": "i", "question": "q", "prediction": "p"}\n')
    assert main(shlex.split(words)) == 1
    _, _, command = capsys.readouterr().err.removeprefix("zeropods: ").partition("zeropods ")
    assert parser().parse_args(shlex.split(command)).run


def test_a_hidden_name_of_a_file_that_is_being_written_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = PermissionError(13, "Permission denied", "/there/.out.a1b2c3d4/new/train.jsonl")

    def fails() -> int:
        raise hidden

    assert guarded(fails) == 1
    assert capsys.readouterr().err == "zeropods: /there/out/train.jsonl: Permission denied\n"


def test_a_path_of_the_wrong_kind_is_named_with_the_kind_that_is_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    cases = {
        tmp_path: "a folder; name a file",
        tmp_path / "file" / "below": "a file, or below one; name a folder",
    }
    for path, words in cases.items():
        assert guarded(lambda path=path: len(path.read_bytes())) == 1  # type: ignore[misc]
        assert capsys.readouterr().err == f"zeropods: {path}: {words}\n"


def test_a_file_that_cannot_be_written_whole_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        assert guarded(lambda: write_text(tmp_path / "predictions.jsonl", "x" * 2_000)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err == f"zeropods: {tmp_path}/predictions.jsonl: File too large\n"
    assert not list(tmp_path.iterdir())


# Flags of the training scripts, as the scripts, a launch and a sweep read them: without torch.

T5, CAUSAL = TextToSQLArguments, CausalArguments


def test_without_flags_it_is_the_workshop() -> None:
    a = parse_flags(CausalArguments, [])
    assert (a.model_id, a.per_device_train_batch_size, a.gradient_accumulation_steps) == ("bigscience/bloom-560m", 4, 4)
    assert (a.epochs, a.learning_rate, a.weight_decay, a.gradient_checkpointing) == (3.0, 5e-5, 0.01, False)


def test_flags_are_read_in_every_form() -> None:
    argv = ["--model_id", "a", "--max-steps=5", "--dropout=0.2", "--scaled_rates", "false", "--load_best_model"]
    read = parse_flags(TextToSQLArguments, [*argv, "--local_rank=0", "--max_steps", "-1"])
    assert (read.model_id, read.max_steps, read.dropout) == ("a", -1, 0.2)
    assert (read.scaled_rates, read.load_best_model, read.seed) == (False, True, 42)


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (T5, "--epoch 3", "--epoch: not a flag of textsql_train.py; did you mean --epochs?"),
        (T5, "--model_name_or_path x", "_or_path: not a flag of textsql_train.py; did you mean --model_id?"),
        (CAUSAL, "--dataset_paht x", "--dataset_paht: not a flag of causal_train.py; did you mean --data?"),
        (T5, "--save_checkpoint", "checkpoints are saved every epoch; --save_steps N saves every N steps, 0 never"),
        (T5, "--max_length 128", "--max_length: not a flag of textsql_train.py; rows are cut when they are prepared"),
        (CAUSAL, "--max_length 128", "--max_length: not a flag of causal_train.py; did you mean --max_seq_length?"),
        (
            T5,
            "--deepspeed",
            "--deepspeed: needs a file; give dsconfig/TECHNIQUE.json, as in --deepspeed dsconfig/zero2",
        ),
        (T5, "--deepspeed --seed 1", "--deepspeed: needs a file"),
        (T5, "--num_beams 4", "--num_beams: not a flag of textsql_train.py; did you mean --generation_num_beams?"),
        (CAUSAL, "--num_beams 4", "--num_beams: not a flag of causal_train.py; zeropods predict answers, with --num-"),
        (T5, "--num_workers 4", "--num_workers: not a flag of textsql_train.py; each rank reads its rows by itself"),
        (CAUSAL, "--num_workers 4", "did you mean --dataloader_num_workers?"),
        (
            T5,
            "--optim adamw_8bit --report_to wandb",
            "--optim: not a flag of textsql_train.py; every run trains with A",
        ),
        (T5, "--max_source_length 512", "rows are cut when they are prepared, by zeropods prepare --max-source-tokens"),
        (
            CAUSAL,
            "--use_peft --lora_r 8",
            "--lora_r: not a flag of causal_train.py; all weights are trained; there are",
        ),
        (CAUSAL, "--attention sdpa", "did you mean --attn_implementation?"),
        (
            T5,
            "--hostfile hosts --num_gpus 2",
            "--num_gpus: not a flag of textsql_train.py; zeropods launch has such a f",
        ),
        (T5, "--qwertzuiop 1", "--qwertzuiop: not a flag of textsql_train.py; see --help"),
        (T5, "3", "3: not a flag of textsql_train.py, nor the value of one; see --help"),
        (T5, "--seed", "--seed: expected one argument"),
        (T5, "--seed 1.5", "--seed: '1.5'; expected a whole number"),
        (T5, "--learning_rate fast", "--learning_rate: 'fast'; expected a number"),
        (T5, "--tf32 maybe", "--tf32: 'maybe'; expected True or False"),
        (T5, "--lr_scheduler_type lin", "--lr_scheduler_type 'lin'; expected linear, cosine"),
        (CAUSAL, "--max_train_steps 0", "--max_train_steps 0; expected at least 1"),
        (T5, "--early_stopping_patience 2 --eval_steps 5", "give both the same value"),
        (T5, "--compile graphs --gradient_accumulation_steps 2", "use 1 pass, or --compile blocks"),
        (T5, "--compile graphs --deepspeed a.json", "--deepspeed a.json: cannot be recorded as a graph"),
        (CAUSAL, "--task text2sql", "--task 'text2sql'; expected squad, lm"),
        (CAUSAL, "--task lm --loss_on answer", "--loss_on answer: the text of --task lm has no answers"),
        (CAUSAL, "--init drawn", "--init 'drawn'; expected pretrained, random or the folder of a finished run"),
        (CAUSAL, "--num_train_epochs inf", "--num_train_epochs inf; expected a finite number, more than 0"),
        (CAUSAL, "--max_grad_norm nan", "--max_grad_norm nan; expected a finite number, at least 0"),
        (CAUSAL, "--seed -1", "--seed -1; expected at least 0 and at most 4294967295"),
        (CAUSAL, "--adam_beta2 1", "--adam_beta2 1.0; expected at least 0 and less than 1"),
        (CAUSAL, "--precision fp8", "--precision 'fp8'; expected auto, fp32, bf16, fp16"),
    ],
)
def test_bad_flags_are_refused_in_one_line(kind: type[T5 | CAUSAL], words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_flags(kind, words.split())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


# Flags of other projects' scripts, and what they are called in `textsql_train.py` and `causal_train.py`.
THEIRS = {
    "model_name": ("model_id", "model_name_or_path"),
    "model_name_or_path": ("model_id", None),
    "model_id": (None, "model_name_or_path"),
    "dataset_name": ("dataset_path", "data"),
    "dataset_path": (None, "data"),
    "batch_size": ("per_device_train_batch_size", "per_device_train_batch_size"),
    "num_epochs": ("epochs", "num_train_epochs"),
    "num_train_epochs": ("epochs", None),
    "epochs": (None, "num_train_epochs"),
    "max_train_steps": ("max_steps", None),
    "max_steps": (None, "max_train_steps"),
    "num_warmup_steps": ("warmup_steps", None),
    "deepspeed_config": ("deepspeed", "deepspeed"),
    "output_dir": ("outputdir", "outputdir"),
    "resume_from_checkpoint": ("resume", "resume"),
    "bf16": ("precision", "precision"),
    "fp16": ("precision", "precision"),
    "checkpoint_freq": ("save_steps", "save_steps"),
}


@pytest.mark.parametrize("flag", THEIRS)
def test_a_flag_of_another_project_leads_to_ours(flag: str) -> None:
    for kind, ours in zip((T5, CAUSAL), THEIRS[flag], strict=True):
        if ours is None:
            continue
        with pytest.raises(UserError) as refused:
            parse_flags(kind, [f"--{flag}", "x"])
        assert str(refused.value) == f"--{flag}: not a flag of {kind.script}; did you mean --{ours}?"
        assert ours in {each.name for each in fields(kind)}


@pytest.mark.parametrize(
    "flag", ["save_checkpoint", "tokenizer_name", "dataset_config_name", "max_seq_length", "generation_prompt"]
)
def test_a_flag_that_text_to_sql_has_no_use_for_is_told_what_takes_its_place(flag: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_flags(T5, [f"--{flag}", "x"])
    assert str(refused.value).startswith(f"--{flag}: not a flag of textsql_train.py; ")
    assert "did you mean" not in str(refused.value) and "see --help" not in str(refused.value)


def test_all_faults_of_a_call_are_named_at_once() -> None:
    words = "--batch_size 4 --seed 3 --num_epochs=2 --save-checkpoint --deepspeed --batch_size 5"
    with pytest.raises(UserError) as refused:
        parse_flags(T5, words.split())
    named = [part.partition(":")[0] for part in str(refused.value).split("; ") if part.startswith("--")]
    assert [name for name in named if name.startswith("--") and " " not in name] == [
        "--batch_size", "--num_epochs", "--save_checkpoint", "--deepspeed",
    ]  # fmt: skip
    assert "\n" not in str(refused.value)


def test_all_values_of_a_call_that_cannot_be_are_named_at_once() -> None:
    with pytest.raises(UserError) as refused:
        parse_flags(T5, ["--learning_rate", "fast", "--seed", "1.5", "--dropout", "2"])
    assert str(refused.value) == "--learning_rate: 'fast'; expected a number; --seed: '1.5'; expected a whole number"
    with pytest.raises(UserError) as refused:
        parse_flags(T5, ["--dropout", "2", "--logging_steps", "0", "--precision", "int8"])
    named = ["--dropout 2.0; expected", "--logging_steps 0; expected at least 1", "--precision 'int8'; expected"]
    assert all(part in str(refused.value) for part in named) and "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", SCRIPTS.values())
def test_where_a_run_is_written_is_no_setting_of_it(kind: type[T5 | CAUSAL]) -> None:
    there = kind(outputdir="there", resume="never", save_total_limit=2, memory_interval=0.0)
    assert there.comparable() == kind().comparable()
