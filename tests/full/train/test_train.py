"""Runs of `textsql_train.py`: what they leave, how they go on, what they refuse; somebody's first runs."""

import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.full.conftest import ROOT, TINY
from tests.full.forks import begin_ranks, train_ranks
from tests.full.launches import until
from zeropods.cli import main
from zeropods.errors import UserError, guarded
from zeropods.measure.record import Record, read_record
from zeropods.train import run_argv
from zeropods.train.device import CUDNN_ATTENTION
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.saved_models import load_model, prepared_of
from zeropods.train.text2sql import TextToSQL

LIKE_TRAINED = ["--max_steps", "6", "--eval_steps", "3"]
"""What the run `trained` was asked for, of 32 rows a step."""


def refused(
    capsys: pytest.CaptureFixture[str], *arguments: object, script: str = "textsql_train.py", common: list[str] = TINY
) -> str:
    """The one line that a call says before it ends with status 1."""
    capsys.readouterr()
    assert guarded(lambda: run_argv([script, *common, *map(str, arguments)])) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("zeropods: ")]
    assert len(lines) == 1, lines
    return lines[0]


def train(folder: Path, prepared: Path, *arguments: object) -> Record:
    """Train in this process and return the record."""
    place = ["--dataset_path", str(prepared), "--outputdir", str(folder)]
    assert run_argv(["textsql_train.py", *TINY, *place, *map(str, arguments)]) == 0
    return read_record(folder)


def losses(record: Record, key: str = "losses") -> list[float]:
    return [entry.loss for entry in getattr(record, key)]


def test_a_run_leaves_the_whole_folder_and_a_record(trained: Path) -> None:
    files = {"config.json", "record.json", "train.log", "run.lock", "ranks/0.json", "model/model.safetensors"}
    assert all((trained / name).is_file() for name in files | {"model/tokenizer.json"})
    assert all(list((trained / "tensorboard" / part).iterdir()) for part in ("train", "validation"))
    record = read_record(trained)
    assert (record.status, record.technique, record.init, record.steps) == ("ok", "none", "random", 6)
    assert [entry.step for entry in record.losses] == [1, 2, 3, 4, 5, 6]
    assert [entry.step for entry in record.eval_losses] == [3, 6]
    steps = np.load(trained / "steps" / "0.npy").tolist()
    assert record.train_seconds == pytest.approx(sum(steps))
    assert record.samples_per_second == pytest.approx(32 * 5 / sum(steps[1:]))
    assert record.losses[-1].loss < record.losses[0].loss


def test_a_run_records_where_its_data_are_for_any_working_folder(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").symlink_to(prepared)
    monkeypatch.chdir(tmp_path)
    record = train(Path("runs", "a"), Path("set"), "--max_steps", 1, "--eval_steps", 0)
    assert record.dataset["path"] == str(tmp_path / "set")
    assert record.dataset["relative_path"] == "../../set"
    monkeypatch.chdir("/")
    assert prepared_of(tmp_path / "runs" / "a") == tmp_path / "set"


def assert_same_losses(run: Record, expected: Record) -> None:
    """Sums are taken in another order; AdamW lets that grow a little from step to step."""
    assert losses(run) == pytest.approx(losses(expected), rel=1e-4)
    assert run.eval_losses[-1].loss == pytest.approx(expected.eval_losses[-1].loss, rel=1e-4)


def test_accumulation_gives_the_losses_of_one_large_batch_and_memory_need_not_be_sampled(
    trained: Path, prepared: Path, tmp_path: Path
) -> None:
    rows = ("--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 4)
    parts = train(tmp_path / "parts", prepared, *LIKE_TRAINED, *rows, "--memory_interval", 0)
    assert_same_losses(parts, read_record(trained))
    assert not (tmp_path / "parts" / "memory").exists()
    assert parts.ranks[0].sampled == {}


def test_a_run_that_ends_well_says_so_in_a_line_whose_command_works_and_who_may_read_its_folder_may_read_its_weights(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    before = os.umask(0o027)
    try:
        record = train(folder, prepared, "--max_steps", 1, "--save_steps", 1, "--per_device_train_batch_size", 4)
        last = capsys.readouterr().out.splitlines()[-1]
        assert main(["export", str(folder), "--out", str(tmp_path / "exported")]) == 0
    finally:
        os.umask(before)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"{tmp_path / 'exported'}: 1,0") and f" parameters of {folder / 'model'}, step 1," in said
    modes = {path.parent.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*.safetensors")}
    assert modes == dict.fromkeys(["model", "checkpoint-1", "exported"], "0o640")
    said = (
        rf"ok: 1 step, loss {record.losses[-1].loss:.4g}, dev loss [\d.]+(, .* samples/s)?; {folder}; next: zeropods "
    )
    assert re.match(said, last), last
    call = shlex.split(last.partition("next: zeropods ")[2])
    assert main([*call, "--limit", "2"]) == 0 and (folder / "score.test.json").is_file()


def script(flags: list[object], *launcher: str) -> str:
    """What `textsql_train.py` says on stderr, in a process of its own."""
    command = [sys.executable, *launcher, ROOT / "textsql_train.py", *flags]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def test_two_processes_of_torchs_launcher_train_as_one(trained: Path, prepared: Path, tmp_path: Path) -> None:
    two = [*TINY, *LIKE_TRAINED, "--per_device_train_batch_size", "16", "--outputdir", tmp_path / "two"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    script([*two, "--dataset_path", prepared], *launcher)
    record = read_record(tmp_path / "two")
    assert (record.technique, record.world_size, len(record.ranks)) == ("ddp", 2, 2)
    assert_same_losses(record, read_record(trained))


WATCHED = """
import atexit, runpy, sys
import torch
sys.argv = sys.argv[1:]
atexit.register(lambda: print("threads:", torch.get_num_threads(), file=sys.stderr))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_without_offload_imports_and_compiles_no_more_than_it_needs_has_its_threads_and_leaves_no_buffer(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    # The run's last line has the folder's name.
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    place = ["--dataset_path", prepared, "--outputdir", tmp_path / "ü", "--deepspeed", ROOT / "dsconfig" / "zero1.json"]
    flags = [*TINY, *place, "--max_steps", 1, "--eval_steps", 0, "--threads", 3]
    said = script(flags, "-X", "importtime", "-c", WATCHED)
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert {"torch", "deepspeed.runtime.engine", "transformers.modeling_utils"} <= imported
    assert not imported & {"datasets", "pandas", "scipy.optimize"}
    assert not list((tmp_path / "extensions").glob("*/*.so"))
    buffers = Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")
    assert not [file for file in buffers if file.stat().st_uid == os.getuid()]
    # Accelerate would choose another number.
    assert "threads: 3\n" in said


def test_an_interrupted_run_says_so_and_has_measured_what_it_did(prepared: Path, tmp_path: Path) -> None:
    steps = ("--max_steps", "10000", "--eval_steps", "0", "--per_device_train_batch_size", "4", "--save_steps", "2")
    folder = tmp_path / "interrupted"
    argv = [*TINY, *steps, "--dataset_path", prepared, "--outputdir", folder]
    (child,) = begin_ranks(argv, 1, tmp_path / "said")
    until((folder / "checkpoints" / "checkpoint-4" / "manifest.json").exists)
    child.send_signal(signal.SIGTERM)
    assert f"{folder}: the same command resumes" in child.communicate(60)
    assert child.returncode == 130
    record = read_record(folder)
    assert (record.status, record.reason) == ("interrupted", "SIGTERM")
    left = record.ranks[0]
    assert left.live_bytes is not None and left.phases["steady"].seconds > 0
    assert left.padded_tokens >= left.source_tokens + left.target_tokens > 0


def test_a_run_whose_loss_is_no_number_fails_and_says_at_which_step(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path
) -> None:
    run = ("--dataset_path", prepared, "--outputdir", tmp_path / "run", "--max_steps", 8, "--eval_steps", 0)
    assert "loss nan; lower --learning_rate" in refused(capsys, *run, "--learning_rate", 1e30, "--max_grad_norm", 0)
    assert read_record(tmp_path / "run").status == "failed"


def test_training_ends_when_its_time_is_up(prepared: Path, tmp_path: Path) -> None:
    record = train(tmp_path / "run", prepared, "--epochs", 1000, "--max_train_seconds", 2, "--eval_steps", 0)
    assert record.ranks[0].stopped_by == "time"
    assert record.train_seconds >= 2


def test_the_best_model_is_the_one_that_is_saved(prepared: Path, tmp_path: Path) -> None:
    record = train(
        tmp_path / "run", prepared, "--max_steps", 6, "--eval_steps", 2, "--save_steps", 2,
        "--load_best_model", "True", "--learning_rate", 0.02,
    )  # fmt: skip
    evaluated = [entry.loss for entry in record.eval_losses]
    assert evaluated[-1] == pytest.approx(min(evaluated), rel=1e-6)


def test_weights_that_are_not_there_are_named(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    here = ("--init", "pretrained", "--dataset_path", prepared)
    assert "cannot be loaded" in refused(capsys, *here, "--model_id", "nobody/nothing", "--outputdir", tmp_path / "b")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "half" / "model.safetensors").write_bytes(bytes(9))
    assert "cannot be loaded" in refused(capsys, *here, "--model_id", tmp_path / "half", "--outputdir", tmp_path / "c")
    # Nothing began, so nothing is left.
    assert sorted(os.listdir(tmp_path)) == ["half"]


def test_a_run_goes_on_with_the_model_of_another_which_must_be_its_own(
    trained: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, before = train(tmp_path / "run", prepared, "--init", trained, "--max_steps", 1), read_record(trained)
    assert (first.init, first.model_id, first.steps) == (trained.name, before.model_id, 1)
    assert losses(first)[0] < losses(before)[0]
    repeat = shutil.copytree(trained, tmp_path / "cell" / "2")
    assert train(tmp_path / "next", prepared, "--init", repeat, "--max_steps", 1).init == "cell/2"
    by_path = ("--init", "pretrained", "--model_id", trained / "model", "--max_steps", 1)
    assert losses(first) == losses(train(tmp_path / "same", prepared, *by_path))
    other = ("--dataset_path", prepared, "--outputdir", tmp_path / "other", "--model_id", "t5-small", "--init", trained)
    assert "its model is t5-tiny, not t5-small; give --model_id t5-tiny" in refused(capsys, *other)


# Weights that would run a program when they are read.


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._file,)


def test_pickled_weights_are_refused_by_training_and_prediction(
    capsys: pytest.CaptureFixture[str], prepared: Path, trained: Path, tmp_path: Path
) -> None:
    from zeropods.evaluate.generate import QueryAnswerer

    model, sprung = tmp_path / "model", tmp_path / "sprung"
    shutil.copytree(trained / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = pickle.dumps(Trap(sprung))
    pickle.loads(weights)
    sprung.unlink()
    (model / "pytorch_model.bin").write_bytes(weights)
    flags = ("--init", "pretrained", "--model_id", model, "--dataset_path", prepared, "--outputdir", tmp_path / "run")
    assert f"{model}: no weights (*.safetensors) in this folder" in refused(capsys, *flags)
    with pytest.raises(UserError, match="no trained model"):
        QueryAnswerer.load(model)
    shutil.copy(trained / "model" / "model.safetensors", model / "other.safetensors")
    assert "cannot be loaded" in refused(capsys, *flags)
    assert not sprung.exists()


# Somebody's first runs: a model that was damaged, a flag that was misspelled, weights for all.


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
    assert os.listdir(tmp_path) == []
    cell = "model: t5-tiny\ntechnique: none\npods: 1\nprompt: schema\nflags: {init: random}\n"
    text = f"script: textsql_train.py\ndataset_path: nowhere\n{cell}"
    (tmp_path / "m.yaml").write_text(text)
    assert "no prepared data set" in said(capsys, "sweep", tmp_path / "m.yaml", "--out", tmp_path / "sweep")
    assert os.listdir(tmp_path) == ["m.yaml"]


def test_rows_are_padded_to_multiples_of_8_on_a_gpu_of_16_where_compiled_and_as_they_are_on_a_cpu(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(given: int | None = None, how: str = "off") -> TextToSQL:
        flags = {"dataset_path": str(prepared), "pad_to_multiple_of": given, "compile": how}
        return TextToSQL(TextToSQLArguments(**flags))

    def width(padded: TextToSQL, tokens: int = 9) -> int:
        row = np.ones(tokens, dtype=np.int32)
        batch = padded.batch([(row, row)])
        assert batch["labels"].shape == batch["input_ids"].shape
        return batch["input_ids"].shape[1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (width(task()), width(task(1)), width(task(4))) == (16, 9, 12)
    assert (width(task(), 17), width(task(how="blocks"), 17), width(task(8, "graphs"), 17)) == (24, 32, 24)
    assert task().settings() == task(8).settings() != task(1).settings()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (width(task()), width(task(8)), width(task(how="blocks"))) == (9, 16, 9)
    assert task().settings() == task(1).settings() != task(8).settings()


@pytest.fixture
def cudnn_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put torch's choice back, which is one for the whole process."""
    monkeypatch.delenv(CUDNN_ATTENTION, raising=False)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("cudnn_attention")
def test_a_run_and_a_prediction_keep_attention_off_cudnn_unless_they_are_asked(
    trained: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["textsql_train.py", *TINY, "--dataset_path", str(prepared), "--max_steps", "1", "--outputdir"]
    for asked, expected in [(None, False), ("1", True), ("0", False)]:
        if asked is not None:
            monkeypatch.setenv(CUDNN_ATTENTION, asked)
        torch.backends.cuda.enable_cudnn_sdp(not expected)
        assert run_argv([*argv, str(tmp_path / f"run-{asked}")]) == 0
        assert torch.backends.cuda.cudnn_sdp_enabled() == expected
        torch.backends.cuda.enable_cudnn_sdp(not expected)
        load_model(trained, causal=False)
        assert torch.backends.cuda.cudnn_sdp_enabled() == expected
    monkeypatch.setenv(CUDNN_ATTENTION, "yes")
    assert guarded(lambda: run_argv([*argv, str(tmp_path / "run-yes")])) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"{CUDNN_ATTENTION} 'yes'; expected 1, or 0 for the other kernels")
    )


def test_imports_leave_attention_as_it_was() -> None:
    words = "import torch, zeropods.train.run, zeropods.train.text2sql, zeropods.evaluate.generate as g; "
    words += "print(torch.backends.cuda.cudnn_sdp_enabled())"
    argv = [sys.executable, "-c", words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout.split() == ["True"]
