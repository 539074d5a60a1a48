"""`zeropods export`: the weights of real runs, of each kind of checkpoint, as folders that anyone can load."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.full.conftest import ROOT, TINY
from tests.full.forks import begin_ranks, train_ranks
from tests.full.launches import until
from tests.full.train.test_checkpoint_training import FLAGS, unfinished
from tests.full.train.test_train import train
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.export import export
from zeropods.measure.record import read_record

STEP = {"zero1": 20, "zero3": 2}
SECONDS = 600.0
"""DeepSpeed may have to compile first."""


@pytest.fixture(scope="module")
def divided(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`zero1` and `zero3`: finished runs of two ranks, with checkpoints; one rank of `zero1` was told to save."""
    folder = tmp_path_factory.mktemp("divided")
    one = folder / "zero1"
    zero1, zero3 = (
        [*TINY, *FLAGS, "--dataset_path", prepared, "--deepspeed", ROOT / "dsconfig" / f"{name}.json", "--outputdir",
         folder / name, "--max_steps", STEP[name], "--save_steps", STEP[name]]
        for name in STEP
    )  # fmt: skip
    ranks = begin_ranks(zero1, 2, folder / "told", ZEROPODS_SAVE_SIGNAL="USR1")
    until(lambda: (one / "train.log").exists() and "step 3 " in (one / "train.log").read_text(), pause=0.01)
    # Again and again to its end, while it saves too.
    until(lambda: ranks[1].send_signal(signal.SIGUSR1) or ranks[1].returncode is not None, SECONDS, pause=0.001)
    said = [rank.communicate(SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [os.EX_TEMPFAIL] * 2, said
    train_ranks(zero1, 2, folder / "again")
    train_ranks([*zero3, "--precision", "bf16"], 2, folder / "three")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_signal_to_one_of_two_ranks_saves_and_ends_both(divided: Path) -> None:
    run = divided / "zero1"
    interrupted, record = json.loads((run / "attempts" / "0.json").read_text()), read_record(run)
    step = interrupted["steps"]
    said = {(rank["status"], rank["reason"]) for rank in interrupted["ranks"]}
    assert said == {("interrupted", f"SIGUSR1: saved at step {step}")}
    assert (len(interrupted["ranks"]), record.status) == (2, "ok")
    assert [rank.first_step for rank in record.ranks] == [step, step]
    assert [len(np.load(run / place / "0.npy")) for place in ("attempts/0.steps", "steps")] == [step, 20 - step]


@pytest.mark.parametrize("technique", ["zero1", "zero3"])
def test_a_checkpoint_of_two_ranks_becomes_the_model_that_training_ended_with(
    divided: Path, tmp_path: Path, technique: str
) -> None:
    run, out = divided / technique, tmp_path / "out"
    done = export(run, out, checkpoint=STEP[technique])
    checkpoint = run / "checkpoints" / f"checkpoint-{STEP[technique]}"
    found = (done.source, done.checkpoint, done.dtype, done.consolidated, done.equals_model)
    assert found == (str(checkpoint), STEP[technique], "float32", True, None)
    assert_equal(weights(out), weights(run / "model"))
    assert done.parameters == sum(tensor.numel() for tensor in weights(out).values())
    assert done.bytes == (out / "model.safetensors").stat().st_size


def test_an_exported_folder_answers_like_any_model(divided: Path, tmp_path: Path) -> None:
    export(divided / "zero3", tmp_path / "out", dtype="bfloat16")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert (model.dtype, model.lm_head.weight.data_ptr()) == (torch.bfloat16, model.shared.weight.data_ptr())
    asked = AutoTokenizer.from_pretrained(tmp_path / "out")("how many?", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=3).shape[1] > 1


def test_an_unfinished_run_gives_its_newest_whole_checkpoint(
    divided: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = unfinished(divided / "zero1", tmp_path / "run")
    (earlier,) = (name for name in os.listdir(saved) if name not in ("checkpoint-20", "latest.json"))
    os.truncate(saved / "checkpoint-20" / "global_step20" / "mp_rank_00_model_states.pt", 100)
    done = export(saved.parent, tmp_path / "out")
    assert done.source == str(saved / earlier)
    assert "checkpoint-20: passed over: global_step20/mp_rank_00_model_states.pt: 100 bytes" in capsys.readouterr().err
    assert_equal(weights(tmp_path / "out"), weights(saved / earlier))


def test_a_run_without_checkpoints_gives_its_model_and_says_so_as_json(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), "--out", str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    size = (trained / "model" / "model.safetensors").stat().st_size
    assert (said["source"], said["checkpoint"], said["bytes"]) == (str(trained / "model"), 6, size)
    assert (said["consolidated"], said["equals_model"]) == (False, True)
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_masters_of_bf16_weights_are_exported_and_the_best_step_where_the_run_ended_with_it(
    prepared: Path, tmp_path: Path
) -> None:
    flags = ("--max_steps", 4, "--eval_steps", 2, "--save_steps", 2, "--load_best_model", "True", "--precision", "bf16")
    train(tmp_path / "run", prepared, *flags, "--learning_rate", "0")
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.checkpoint == 2
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "run" / "checkpoints" / "checkpoint-2"))
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.float32}


def refusal(run: Path, out: Path, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        export(run, out, **options)
    return str(refused.value)


def test_what_cannot_be_exported_is_refused_in_one_line(divided: Path, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert refusal(trained, tmp_path) == f"--out {tmp_path}: exists; choose a new folder, or an empty one"
    assert os.listdir(tmp_path) == ["mine"]
    place, out = divided / "zero3" / "checkpoints" / "checkpoint-7", tmp_path / "out"
    said = refusal(divided / "zero3", out, checkpoint=7)
    assert said == f"--checkpoint 7: {place}: no such checkpoint; available: 2"
    run = unfinished(trained, tmp_path / "run").parent
    assert refusal(run, out).startswith(f"{run}: unfinished, and has no usable checkpoint")
    for folder in (tmp_path, trained / "model"):
        assert refusal(folder, out).startswith(f"{folder}: no config.json of a run")


def test_numbers_that_float16_cannot_hold_are_refused(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    large = {name: tensor * 1e6 for name, tensor in weights(run / "model").items()}
    save_file(large, run / "model" / "model.safetensors", metadata={"format": "pt"})
    (run / "model" / "SHA256SUMS").unlink()
    said = refusal(run, tmp_path / "out", dtype="float16")
    assert said.startswith("--dtype float16: ")
    assert said.endswith(" holds numbers too large for it; use bfloat16")
    assert not (tmp_path / "out").exists()
