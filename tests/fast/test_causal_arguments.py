"""The flags of `causal_train.py`, and what both scripts share, without torch."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.launch.command import flag_values, run_folder_of
from zeropods.launch.planning import PROJECT, plan_alone
from zeropods.measure.record import real_tokens
from zeropods.sweep.reading import matrix_of
from zeropods.sweep.trial import trials
from zeropods.train.arguments import SCRIPTS, CausalArguments, TextToSQLArguments, arguments_of, read_flags

ISSUED = """
    model_name_or_path tokenizer_name init task data dataset_config max_seq_length per_device_train_batch_size
    per_device_eval_batch_size gradient_accumulation_steps learning_rate lr_scheduler_type weight_decay num_train_epochs
    max_train_steps max_eval_steps num_warmup_steps logging_steps save_steps save_total_limit precision
    attn_implementation gradient_checkpointing dataloader_num_workers deepspeed outputdir seed resume subset loss_on
    generation_prompt
"""


def test_every_flag_that_was_asked_for_is_there() -> None:
    assert set(ISSUED.split()) <= {field.name for field in fields(CausalArguments)}


def test_without_flags_it_is_the_workshop() -> None:
    a = CausalArguments()
    assert (a.model_id, a.per_device_train_batch_size, a.gradient_accumulation_steps) == ("bigscience/bloom-560m", 4, 4)
    assert (a.epochs, a.learning_rate, a.weight_decay, a.gradient_checkpointing) == (3.0, 5e-5, 0.01, False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"task": "text2sql"}, "--task 'text2sql'; expected squad, lm"),
        ({"loss_on": "question"}, "--loss_on 'question'; expected answer, all"),
        ({"task": "lm", "loss_on": "answer"}, "--loss_on answer: the text of --task lm has no answers"),
        ({"attn_implementation": "flash"}, "--attn_implementation 'flash'; expected eager, sdpa, flash_attention_2"),
        ({"max_seq_length": 1}, "--max_seq_length 1; expected at least 2"),
        ({"subset": 0}, "--subset 0; expected at least 1"),
        ({"max_eval_steps": 0}, "--max_eval_steps 0; expected at least 1"),
        ({"max_train_steps": 0}, "--max_train_steps 0; expected at least 1"),
        ({"num_train_epochs": 0.0}, "--num_train_epochs 0.0; expected more than 0"),
        ({"num_train_epochs": math.inf}, "--num_train_epochs inf; expected more than 0"),
        ({"learning_rate": math.inf}, "--learning_rate inf; expected a number of at least 0"),
        ({"weight_decay": -1.0}, "--weight_decay -1.0; expected a number of at least 0"),
        ({"max_grad_norm": math.nan}, "--max_grad_norm nan; expected a number of at least 0"),
        ({"seed": -1}, "--seed -1; expected 0 to 4294967295"),
        ({"threads": 100_000}, "--threads 100000; expected 0 to 1024"),
        ({"dataloader_num_workers": 1_000}, "--dataloader_num_workers 1000; expected 0 to 128"),
        ({"per_device_train_batch_size": 2**31}, "--per_device_train_batch_size 2147483648; expected 1 to 2147483647"),
        ({"num_warmup_steps": -1}, "--num_warmup_steps -1; expected at least 0"),
        ({"adam_beta2": 1.0}, "--adam_beta2 1.0; expected 0 or more, and less than 1"),
        ({"save_total_limit": 0}, "--save_total_limit 0; expected at least 1"),
        ({"precision": "fp8"}, "--precision 'fp8'; expected auto, fp32, bf16, fp16"),
    ],
)
def test_bad_values_are_refused_in_one_line(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        CausalArguments(**flags)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_flags_are_read_without_the_script_and_with_its_defaults() -> None:
    read = read_flags(
        CausalArguments, ["--task", "lm", "--max_seq_length=64", "--seed", "x", "--eval_on_start", "True"]
    )
    assert (read["task"], read["max_seq_length"], read["eval_on_start"], read["learning_rate"]) == (
        "lm",
        64,
        True,
        5e-5,
    )
    assert "seed" not in read


@pytest.mark.parametrize("kind", SCRIPTS.values())
def test_where_a_run_is_written_is_no_setting_of_it(kind: type[TextToSQLArguments | CausalArguments]) -> None:
    there = kind(outputdir="there", resume="never", save_total_limit=2, memory_interval=0.0)
    assert there.comparable() == kind().comparable()


def test_both_scripts_are_known_by_name_and_by_place(tmp_path: Path) -> None:
    assert arguments_of("causal_train.py") is arguments_of(PROJECT / "causal_train.py") is CausalArguments
    assert arguments_of(PROJECT / "textsql_train.py") is TextToSQLArguments
    assert arguments_of(tmp_path / "causal_train.py") is None
    assert all((PROJECT / name).is_file() for name in SCRIPTS)


def test_the_run_folder_is_the_causal_scripts_own_default(tmp_path: Path) -> None:
    assert run_folder_of([], tmp_path, "causal_train.py") == tmp_path / CausalArguments().outputdir


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max_steps", "3"], "--max_steps: no flag of causal_train.py"),
        (["--deepspeed", "causal_zero2_offload.json"], "give --lr_scheduler_type cosine"),
        (["--deepspeed", "zero1.json", "--max_grad_norm", "0.5", "--bogus=1"], "--bogus: no flag of causal_train.py"),
    ],
)
def test_a_launch_is_refused_by_the_flags_of_its_script(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT / "dsconfig")
    with pytest.raises(UserError) as refused:
        plan_alone("causal_train.py", arguments)
    assert said in str(refused.value)


def test_fp16_may_be_launched_for_a_causal_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT / "dsconfig")
    planned = plan_alone("causal_train.py", ["--deepspeed", "zero1.json", "--precision", "fp16"])
    assert planned.script == PROJECT / "causal_train.py"


def test_tokens_with_a_loss_are_among_those_of_a_text() -> None:
    rank = {"source_tokens": 100, "target_tokens": 30}
    assert [real_tokens(rank, task) for task in ("text2sql", "squad", "lm")] == [130, 100, 100]


def test_reading_flags_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, zeropods.train.arguments; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


CAUSAL_MATRIX = {
    "script": "causal_train.py",
    "model": "gpt-tiny",
    "technique": ["none", "zero2"],
    "pods": 1,
    "prompt": "lm",
    "data": "text",
    "flags": {"init": "random", "max_train_steps": 3, "max_seq_length": 32, "effective_batch_size": 8},
}


def test_a_sweep_runs_the_causal_script_by_its_own_flags(tmp_path: Path) -> None:
    matrix = matrix_of(CAUSAL_MATRIX, "a.yaml")
    assert matrix_of(matrix.to_json(), "again") == matrix
    first = trials(matrix, tmp_path)[0]
    assert first.name == "gpt-tiny-none-1-pod-lm/1"
    values = flag_values(first.arguments)
    assert (values["model_name_or_path"], values["max_seq_length"]) == ("gpt-tiny", "32")
    assert values["data"] == str(tmp_path / "prepared" / "text-gpt-tiny-lm")
    assert not {"model_id", "dataset_path", "effective_batch_size"} & set(values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": "schema"}, "prompt: 'schema'; expected one of lm, squad"),
        ({"model": "t5-tiny"}, "model: model 't5-tiny' has no shape known here"),
        ({"flags": {"max_steps": 3, "init": "random"}}, "flags.max_steps: no flag of causal_train.py"),
        ({"flags": {"task": "lm", "init": "random"}}, "flags.task: is the prompt axis"),
        ({"flags": {}}, "model: gpt-tiny has no pretrained weights"),
        ({"data": None}, "data: is missing"),
    ],
)
def test_a_causal_matrix_that_cannot_be_run_is_refused(changes: dict[str, Any], said: str) -> None:
    document = {key: value for key, value in {**CAUSAL_MATRIX, **changes}.items() if value is not None}
    with pytest.raises(UserError) as refused:
        matrix_of(document, "a.yaml")
    assert said in str(refused.value)
