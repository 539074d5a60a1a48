"""Somebody's first runs, on the command line: a model that was damaged, a flag that was misspelled, weights for all."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.full.conftest import TINY
from tests.full.forks import train_ranks
from tests.full.test_train import refused, train
from zeropods.cli import main
from zeropods.errors import guarded
from zeropods.measure.record import read_record
from zeropods.train.arguments import CausalArguments, parse_flags
from zeropods.train.causal import Causal
from zeropods.train.run import fine_tune

ASK = ["--split", "test", "--limit", "2", "--out", "p.jsonl"]


@pytest.fixture
def copy(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run, `run` in the working folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "run")


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The last line that a command is refused with."""
    assert main([str(word) for word in words]) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_model_of_which_a_byte_was_changed_is_refused(
    copy: Path, name: str, sample: Path, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy / "model" / name
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    changed = f"{name}: its bytes have changed since it was saved"
    data = ["--data", sample]
    for call in (["export", "run", "--out", "x"], ["predict", "--model", "run", *data, *ASK], ["demo", "run", *data]):
        assert changed in said(capsys, *call)
    flags = ("--dataset_path", prepared, "--init", "run", "--outputdir", "other", "--max_steps", 1)
    assert changed in refused(capsys, *flags)
    if name == "model.safetensors":
        (copy / "model" / "SHA256SUMS").unlink()
        assert main(["export", "run", "--out", "meant"]) == 0
    else:
        assert changed in said(capsys, "prepare", *data, "--tokenizer", "run/model", "--limit", 2, "--out", "set")


def test_another_prompt_than_the_models_is_refused_unless_forced(
    copy: Path, sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "--model", "run", "--data", sample, *ASK, "--prompt", "question"]
    assert "was trained with schema; leave it out, or add --force-prompt" in said(capsys, *words)
    assert main([*map(str, words), "--force-prompt"]) == 0


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--task", "squad", "--data", "t5"], "--task squad: t5 is a T5, which answers text2sql; leave it out"),
        (["--data", "nowhere"], "t5: does not say its prompt; give --prompt question or schema"),
        ([], "t5: a model folder, which does not say where its data are; give --data DIR"),
    ],
)
def test_a_t5_is_asked_for_no_data_of_another_task(
    words: list[str], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "model.safetensors").touch()
    (tmp_path / "t5" / "config.json").write_text(json.dumps({"is_encoder_decoder": True}))
    assert fault in said(capsys, "predict", "--model", "t5", *ASK, *words)


def test_a_t5_has_no_perplexity(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "perplexity", trained, "--data", "data", "--split", "test")
    assert line == f"zeropods: {trained}: its model is a t5; expected a causal one, such as gpt2"
    for name in ("runs/of/none", "./none"):
        line = said(capsys, "perplexity", name, "--data", "data", "--split", "test")
        assert line == f"zeropods: {name}: no such folder; expected a run or model folder, or a hub id"


def test_whoever_may_read_a_folder_may_read_its_weights(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o027)
    try:
        train(tmp_path / "run", prepared, "--max_steps", 1, "--save_steps", 1, "--eval_steps", 0)
        assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    finally:
        os.umask(before)
    said = capsys.readouterr().out.splitlines()[-1]
    assert (
        said.startswith(f"{tmp_path / 'exported'}: 1,0")
        and f" parameters of {tmp_path / 'run' / 'model'}, step 1," in said
    )
    modes = {path.parent.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*.safetensors")}
    assert modes == dict.fromkeys(["model", "checkpoint-1", "exported"], "0o640")


def test_a_call_that_did_no_step_leaves_its_folder_to_the_corrected_one(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, flags = tmp_path / "run", ["--dataset_path", prepared, "--outputdir", tmp_path / "run", "--eval_steps", 0]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "t5"}')
    save_file({}, tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    mistaken = ["--init", "pretrained", "--model_id", tmp_path / "bare", "--max_steps", 3]
    assert "its weights have no tensor" in refused(capsys, *flags, *mistaken)
    corrected = [*TINY, *flags, "--max_steps", 2, "--per_device_train_batch_size", 4]
    train_ranks(corrected, 1, tmp_path / "said")
    record = read_record(folder)
    assert (record.status, record.attempt, record.steps) == ("ok", 0, 2)
    assert "holds a finished run with other settings (max_steps 2 -> 3)" in refused(
        capsys, *flags, "--max_steps", 3, "--per_device_train_batch_size", 4
    )


def test_a_call_without_data_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no prepared data set there" in refused(capsys, "--dataset_path", "no", "--outputdir", tmp_path / "run")
    argv = ["--data", str(tmp_path / "no"), "--outputdir", str(tmp_path / "causal"), "--model_name_or_path", "gpt-tiny"]
    assert guarded(lambda: fine_tune(Causal(parse_flags(CausalArguments, argv)), argv)) == 1
    assert os.listdir(tmp_path) == []
    cell = "model: t5-tiny\ntechnique: none\npods: 1\nprompt: schema\nflags: {init: random}\n"
    text = f"script: textsql_train.py\ndataset_path: nowhere\n{cell}"
    (tmp_path / "m.yaml").write_text(text)
    assert "no prepared data set" in said(capsys, "sweep", tmp_path / "m.yaml", "--out", tmp_path / "sweep")
    assert os.listdir(tmp_path) == ["m.yaml"]


def test_the_reason_is_what_the_script_said_not_its_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('zeropods: x: is too old; take another')\n")
    line = said(capsys, "launch", "--launcher", "none", "--", script, "--outputdir", tmp_path / "run")
    assert line.endswith("zeropods: x: is too old; take another")
