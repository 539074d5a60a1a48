"""A run that is told to save and end, one that was killed when all was trained, and the room that checkpoints take."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.full.conftest import TINY
from tests.full.test_checkpoint_training import SMALL, unfinished
from tests.full.test_train import refused, train
from zeropods.errors import guarded
from zeropods.measure.record import read_record
from zeropods.train.arguments import TextToSQLArguments, parse_flags
from zeropods.train.checkpoints import verified
from zeropods.train.run import fine_tune
from zeropods.train.text2sql import TextToSQL

STEPS = ["--max_steps", "9", *SMALL]


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps, which are no whole number of epochs, with a checkpoint of the last."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, prepared, *STEPS, "--save_steps", "9")
    return folder


@contextmanager
def signals_from(run: Path, sent: signal.Signals, moment: str) -> Iterator[None]:
    """Once the run's log has the words, send this process a signal each millisecond, to the end of the block."""
    ended = threading.Event()

    def send() -> None:
        log = run / "train.log"
        while not ended.wait(0.001):
            if log.exists() and moment in log.read_text():
                os.kill(os.getpid(), sent)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        signal.signal(sent, signal.SIG_DFL)


def status_of(run: Path, prepared: Path, *flags: str) -> int:
    """Train in this process; returns the exit status that the script would end with."""
    argv = [*TINY, "--dataset_path", str(prepared), "--outputdir", str(run), *flags]
    return guarded(lambda: fine_tune(TextToSQL(parse_flags(TextToSQLArguments, argv)), argv))


def weights(run: Path) -> np.ndarray:
    saved = load_file(run / "model" / "model.safetensors")
    return np.concatenate([saved[name].ravel() for name in sorted(saved)])


def test_a_signal_saves_at_the_next_step_and_a_later_call_ends_with_the_same_weights(
    undisturbed: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again and again from the third step on; here it is the one that would interrupt a run otherwise."""
    told = tmp_path / "told"
    monkeypatch.setenv("ZEROPODS_SAVE_SIGNAL", "SIGTERM")
    with signals_from(told, signal.SIGTERM, "step 3 "):
        assert status_of(told, prepared, *STEPS) == os.EX_TEMPFAIL
    monkeypatch.delenv("ZEROPODS_SAVE_SIGNAL")
    record = read_record(told)
    step = record.steps
    assert 3 <= step < 9
    assert (record.status, record.reason) == ("interrupted", f"SIGTERM: saved at step {step}")
    assert verified(told / "checkpoints" / f"checkpoint-{step}", lambda _: None).step == step
    again = train(told, prepared, *STEPS)
    assert (again.status, again.attempt, again.ranks[0].first_step) == ("ok", 1, step)
    assert [len(np.load(told / place / "0.npy")) for place in ("attempts/0.steps", "steps")] == [step, 9 - step]
    # Roundings may differ where memory lies elsewhere, and AdamW moves a weight whose gradient is near 0 by its sign.
    assert np.mean(np.abs(weights(told) - weights(undisturbed)) <= 1e-5) >= 0.98


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
    run = killed_before_its_record(undisturbed, tmp_path / "run")
    record = train(run, prepared, *STEPS, "--save_steps", "9")
    first = record.ranks[0]
    assert (record.status, record.steps, first.first_step) == ("ok", 9, 9)
    assert (first.step_seconds, first.stopped_by, record.losses) == (None, "steps", [])
    before = read_record(undisturbed).eval_losses
    assert [point.loss for point in record.eval_losses] == pytest.approx([point.loss for point in before])
    assert np.array_equal(weights(run), weights(undisturbed))


IMPATIENT = [
    *SMALL, "--max_steps", "30", "--save_steps", "3", "--eval_steps", "3", "--learning_rate", "0",
    "--early_stopping_patience", "2",
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
