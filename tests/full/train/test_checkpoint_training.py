"""Real runs, killed or damaged: they go on from the newest whole checkpoint, to the same losses."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.full.conftest import ROOT, TINY, run_several
from tests.full.forks import begin_ranks, train_ranks
from tests.full.launches import until
from tests.full.train.test_train import refused, train
from zeropods.measure.record import read_record
from zeropods.train.checkpoints import verified

SECONDS = 600.0
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
SMALL = ["--eval_steps", "0", "--per_device_train_batch_size", "4", "--threads", "1"]
FLAGS = ["--max_steps", "15", "--save_steps", "5", *SMALL]
ZERO1 = ("--deepspeed", str(ROOT / "dsconfig" / "zero1.json"))
TWICE = """
import sys
from zeropods.errors import guarded
from zeropods.train import run_argv
flags = sys.argv[3:]
runs = [["textsql_train.py", *flags, "--outputdir", folder] for folder in sys.argv[1:3]]
sys.exit(max([guarded(lambda: run_argv(run)) for run in runs]))
"""
"""Trains into two folders, one after the other."""


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 15 steps with checkpoints of 5, 10 and 15: without DeepSpeed, and ZeRO-1 on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    common = [*TINY, "--dataset_path", prepared, *FLAGS]
    run_several(common, (1, folder / "none", []), (2, folder / "two", [*ZERO1]))
    return folder


def assert_same_losses(run: Path, undisturbed: Path, first_step: int, last: int = 15) -> None:
    """That the last attempt began after `first_step` and each of its losses is the undisturbed run's.

    Other ranks add up in another order: 1e-7 at the first step in FP32, and 1e-6 after ten of AdamW.
    """
    again, expected = ({point.step: point.loss for point in read_record(each).losses} for each in (run, undisturbed))
    assert list(again) == list(range(first_step + 1, last + 1))
    assert again == pytest.approx({step: expected[step] for step in again}, rel=1e-5)


def unfinished(run: Path, copy: Path) -> Path:
    """A copy of a run, without its record: as if it had been killed just before."""
    shutil.copytree(run, copy)
    (copy / "record.json").unlink()
    return copy / "checkpoints"


def test_a_run_killed_three_times_ends_with_the_losses_of_an_undisturbed_one(
    prepared: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    saved = run / "checkpoints"
    moments: tuple[Callable[[], object], ...] = (
        # In the middle of a save: its weights are there, its manifest is not.
        (saved / "checkpoint-5" / "model.safetensors").exists,
        # Between two saves.
        lambda: (saved / "checkpoint-5" / "manifest.json").exists() and "step 7 " in (run / "train.log").read_text(),
        # When a save has just ended, or is about to.
        (saved / "checkpoint-10" / "trainer_state.json").exists,
    )
    argv = [*TINY, "--dataset_path", prepared, *FLAGS, "--outputdir", run]
    for attempt, moment in enumerate(moments):
        (rank,) = begin_ranks(argv, 1, tmp_path / f"said-{attempt}")
        until(moment, SECONDS, pause=0.001)
        rank.send_signal(signal.SIGKILL)
        rank.communicate(SECONDS)
        if attempt == 0:
            assert not (saved / "checkpoint-5" / "manifest.json").exists()
    train_ranks(argv, 1, tmp_path / "said")
    assert read_record(run).attempt == 3
    first = read_record(run).ranks[0].first_step
    assert first in (5, 10)
    assert_same_losses(run, undisturbed / "none", first)
    assert "checkpoint-5: passed over: no manifest.json: the save did not finish" in (tmp_path / "said-1.0").read_text()
    assert sorted(os.listdir(saved)) == ["checkpoint-10", "checkpoint-15", "checkpoint-5", "latest.json"]


def test_a_run_that_is_told_to_end_again_and_again_leaves_its_record(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = [*TINY, "--dataset_path", prepared, *FLAGS, "--max_steps", 100_000, "--outputdir", run]
    (rank,) = begin_ranks(argv, 1, tmp_path / "said")
    until(lambda: (run / "train.log").exists() and "step 3 " in (run / "train.log").read_text(), SECONDS, pause=0.01)
    until(lambda: rank.send_signal(signal.SIGTERM) or rank.returncode is not None, SECONDS, pause=0.001)
    rank.communicate(SECONDS)
    record = read_record(run)
    assert (record.status, record.reason) == ("interrupted", "SIGTERM") and rank.returncode != 0


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def aftermath(prepared: Path, undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that went on from copies of the undisturbed ones, and what they `said`.

    Of `two` two checkpoints are damaged; the other runs are asked to resume this or that.
    """
    folder = tmp_path_factory.mktemp("aftermath")
    saved = unfinished(undisturbed / "two", folder / "two")
    flip(saved / "checkpoint-15" / "global_step15" / SHARD)
    os.truncate(saved / "checkpoint-10" / "global_step10" / "mp_rank_00_model_states.pt", 1000)
    whole = Path(shutil.copytree(undisturbed / "none" / "checkpoints" / "checkpoint-10", folder / "whole"))
    flip(Path(shutil.copytree(whole, folder / "broken")) / "optimizer.pt")
    told = ""
    for ranks, name, flags, status in (
        (2, "two", ZERO1, 0),
        (1, "other_settings", ("--seed", "7", "--resume", whole), 0),
        (1, "resumes_broken", ("--resume", folder / "broken"), 1),
        (1, "other_technique", (*ZERO1, "--resume", whole), 1),
        (1, "resumes_nothing", ("--resume", folder), 1),
    ):
        argv = [*TINY, "--dataset_path", prepared, *FLAGS, "--outputdir", folder / name, *flags]
        told += train_ranks(argv, ranks, folder / f".{name}", status=status)
    (folder / "said").write_text(told)
    return folder


def test_damaged_checkpoints_are_named_once_and_a_run_goes_on_to_the_same_losses(
    aftermath: Path, undisturbed: Path
) -> None:
    """One whose save did not end is named where a run is killed three times."""
    two, said = aftermath / "two", (aftermath / "said").read_text()
    model = "global_step10/mp_rank_00_model_states.pt"
    expected = (
        f"{two}/checkpoints/checkpoint-15: passed over: global_step15/{SHARD}: its bytes have changed",
        f"{two}/checkpoints/checkpoint-10: passed over: {model}: 1000 bytes, expected ",
    )
    assert [said.count(line) for line in expected] == [1, 1]
    assert (two / "train.log").read_text().count(" passed over: ") == 2
    assert_same_losses(two, undisturbed / "two", 5)


def test_a_checkpoint_that_is_asked_for_must_be_whole_and_of_this_model_but_may_be_of_other_settings(
    aftermath: Path,
) -> None:
    assert read_record(aftermath / "other_settings").ranks[0].first_step == 10
    lines = (aftermath / "said").read_text().splitlines()
    assert [line.split(";")[0] for line in lines if line.startswith("zeropods: ")] == [
        f"zeropods: --resume {aftermath}/broken: optimizer.pt: its bytes have changed since it was saved (SHA-256)",
        f"zeropods: --resume {aftermath}/whole: belongs to another model: deepspeed None, expected zero1",
        f"zeropods: --resume {aftermath}: no manifest.json: the save did not finish, or something else wrote it",
    ]


def own_mounts() -> bool:
    """Whether a process may have mounts that nobody else sees."""
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def test_a_full_disk_and_a_read_only_folder_end_a_run_in_one_line_and_spare_the_checkpoint_before(
    prepared: Path, undisturbed: Path, tmp_path: Path
) -> None:
    if not own_mounts():
        pytest.skip("no right to mount: a full disk cannot be made")
    full, locked, kept = tmp_path / "full", tmp_path / "locked", tmp_path / "kept"
    shutil.rmtree(unfinished(undisturbed / "none", locked) / "checkpoint-15")
    full.mkdir()
    script = """
        full=$1 locked=$2 kept=$3; shift 3
        mount -t tmpfs -o size=20m tmpfs "$full"
        mount --bind "$locked/checkpoints" "$locked/checkpoints"
        mount -o remount,ro,bind "$locked/checkpoints"
        "$@"; status=$?
        cp -r "$full/run" "$kept"
        exit $status
    """
    twice = [sys.executable, "-c", TWICE, full / "run", locked, *TINY, "--dataset_path", prepared, *FLAGS]
    command = ["unshare", "-m", "sh", "-c", script, "sh", full, locked, kept, *twice]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("zeropods: ")]
    remedy = "free or repair the disk, then run again: it resumes from the previous checkpoint"
    assert (done.returncode, len(lines)) == (1, 2), done.stderr
    assert lines[0].startswith(f"zeropods: {full}/run/checkpoints")
    assert "(No space left on device); free or repair the disk" in lines[0]
    assert lines[1] == (
        f"zeropods: {locked}/checkpoints: checkpoint-15 cannot be written (Read-only file system); {remedy}"
    )
    assert [read_record(run).status for run in (kept, locked)] == ["failed", "failed"]
    assert sorted(os.listdir(kept / "checkpoints")) == ["checkpoint-5", "latest.json"]
    spared = (kept / "checkpoints" / "checkpoint-5", locked / "checkpoints" / "checkpoint-10")
    assert [verified(checkpoint, lambda _: None).step for checkpoint in spared] == [5, 10]


# Killed when all was trained; the room that checkpoints take.


def weights(run: Path) -> np.ndarray:
    saved = load_file(run / "model" / "model.safetensors")
    return np.concatenate([saved[name].ravel() for name in sorted(saved)])


def test_a_name_that_is_no_signal_to_save_on_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prepared: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEROPODS_SAVE_SIGNAL", "KILL")
    said = refused(capsys, "--dataset_path", prepared, "--outputdir", tmp_path / "run")
    assert said == "zeropods: ZEROPODS_SAVE_SIGNAL 'KILL'; expected USR1, USR2, TERM, HUP, CONT, URG"


def killed_before_its_record(run: Path, copy: Path) -> Path:
    """A copy of a finished run as it was right after its last checkpoint."""
    unfinished(run, copy)
    shutil.rmtree(copy / "model")
    return copy


def test_a_run_killed_after_its_last_step_trains_no_other(undisturbed: Path, prepared: Path, tmp_path: Path) -> None:
    whole = undisturbed / "none"
    run = killed_before_its_record(whole, tmp_path / "run")
    record = train(run, prepared, *FLAGS)
    first = record.ranks[0]
    assert (record.status, record.steps, first.first_step) == ("ok", 15, 15)
    assert (first.step_seconds, first.stopped_by, record.losses) == (None, "steps", [])
    before = read_record(whole).eval_losses
    assert [point.loss for point in record.eval_losses] == pytest.approx([point.loss for point in before])
    assert np.array_equal(weights(run), weights(whole))


IMPATIENT = [
    *SMALL, "--max_steps", "30", "--save_steps", "3", "--eval_steps", "3", "--learning_rate", "0",
    "--early_stopping_patience", "2", "--load_best_model", "True",
]  # fmt: skip


@pytest.fixture(scope="module")
def impatient(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first evaluation stays the best, so that it stops after the third, of step 9."""
    folder = tmp_path_factory.mktemp("impatient") / "run"
    train(folder, prepared, *IMPATIENT)
    return folder


def test_a_run_killed_after_early_stopping_trains_no_further(impatient: Path, prepared: Path, tmp_path: Path) -> None:
    run = killed_before_its_record(impatient, tmp_path / "run")
    record = train(run, prepared, *IMPATIENT)
    assert (record.steps, record.ranks[0].stopped_by) == (9, "early_stopping")
    assert np.array_equal(weights(run), weights(impatient))


def test_early_stopping_counts_on_and_the_newest_and_the_best_checkpoint_are_kept(
    impatient: Path, prepared: Path, tmp_path: Path
) -> None:
    """As if the run had been killed after its second evaluation, called again to keep two checkpoints."""
    run = killed_before_its_record(impatient, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "checkpoint-9")
    record = train(run, prepared, *IMPATIENT, "--save_total_limit", "2")
    assert (record.ranks[0].first_step, record.steps) == (6, 9)
    assert sorted(os.listdir(run / "checkpoints")) == ["checkpoint-3", "checkpoint-9", "latest.json"]
    assert "checkpoint-6 deleted: --save_total_limit 2" in (run / "train.log").read_text()


def test_a_damaged_best_checkpoint_is_refused_before_it_is_loaded(
    impatient: Path, capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path
) -> None:
    run = killed_before_its_record(impatient, tmp_path / "run")
    saved = run / "checkpoints"
    shutil.rmtree(saved / "checkpoint-9")
    flip(saved / "checkpoint-3" / "model.safetensors")
    said = refused(capsys, "--dataset_path", prepared, "--outputdir", run, *IMPATIENT)
    assert f"{saved}/checkpoint-3: model.safetensors: its bytes have changed" in said
    assert read_record(run).ranks[0].first_step == 6
