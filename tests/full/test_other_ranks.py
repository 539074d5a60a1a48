"""Runs that go on with another number of ranks: to the losses, step by step, of one that nothing disturbed."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.full.conftest import TINY, cut_text
from tests.full.forks import train_ranks
from tests.full.test_checkpoint_training import losses
from tests.full.test_same_numbers import flags
from tests.full.test_train import Trap
from zeropods.data.prepare import Preparation, prepare
from zeropods.errors import UserError
from zeropods.train.checkpoints import Origin, complete, hashed, names_in, read_manifest
from zeropods.train.resume import Checkpoints

SAVED, STEPS = (10, 20) if os.environ.get("ZEROPODS_SOAK") == "1" else (5, 10)
TEXT_TO_SQL, CAUSAL = "textsql_train.py", "causal_train.py"
EACH = ["--save_steps", SAVED, "--eval_steps", 0, "--threads", 1, "--logging_steps", 1]
FLAGS: dict[str, list[object]] = {
    TEXT_TO_SQL: [*TINY, *EACH, "--max_steps", STEPS],
    CAUSAL: [
        "--model_name_or_path", "gpt-tiny", "--init", "random", "--dropout", 0, "--task", "lm", "--max_seq_length", 32,
        "--gradient_accumulation_steps", 1, "--max_train_steps", STEPS, "--memory_interval", 0, "--precision", "fp32",
        *EACH,
    ],
}  # fmt: skip
TECHNIQUES = ("none", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")
"""`none` on several ranks is `ddp`."""
RANKS = (1, 2, 3, 4)
FEW = [
    (TEXT_TO_SQL, "zero1", 2, 3), (TEXT_TO_SQL, "zero2_offload", 1, 2), (TEXT_TO_SQL, "zero3", 2, 1),
    (CAUSAL, "none", 1, 2), (CAUSAL, "zero3_offload", 1, 2),
]  # fmt: skip
CAUSAL_TOO = [(CAUSAL, name, old, new) for name in TECHNIQUES for old, new in ((1, 3), (3, 2))]
ALL = [
    *[(TEXT_TO_SQL, name, old, new) for name in TECHNIQUES for old in RANKS for new in RANKS if old != new],
    *CAUSAL_TOO,
]  # fmt: skip
PAIRS = ALL if os.environ.get("ZEROPODS_SOAK") == "1" else FEW


@dataclass(frozen=True)
class Runs:
    """Runs in a folder."""

    sources: dict[str, Path]
    """The prepared data of each script."""
    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def train(
        self, name: str, ranks: int, run: Path, *given: object, script: str = TEXT_TO_SQL, status: int = 0
    ) -> str:
        """Train on so many ranks; returns what rank 0 said."""
        data = "--dataset_path" if script == TEXT_TO_SQL else "--data"
        argv = [*FLAGS[script], data, self.sources[script], "--outputdir", run, *flags(name, ranks), *given]
        return train_ranks(argv, ranks, self.folder / run.name, script=script, status=status)

    def undisturbed(self, name: str, ranks: int, script: str = TEXT_TO_SQL) -> Path:
        """A run of all steps; made once."""
        run = self.folder / f"{Path(script).stem}-{name}-{ranks}"
        if run.name not in self.made:
            self.train(name, ranks, run, script=script)
            self.made[run.name] = run
        return run

    def killed(self, name: str, ranks: int, copy: str, script: str = TEXT_TO_SQL) -> Path:
        """A copy of such a run, as if it had been killed after its first checkpoint."""
        run = Path(shutil.copytree(self.undisturbed(name, ranks, script), self.folder / copy))
        (run / "record.json").unlink()
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS}")
        return run


@pytest.fixture(scope="module")
def runs(prepared: Path, text_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of blocks of a few lines, where they are of text."""
    text = cut_text(text_sample, tmp_path_factory.mktemp("text"))
    prepare(Preparation(task="lm", data=text, tokenizer="gpt-tiny", max_seq_length=32), text / "prepared")
    return Runs({TEXT_TO_SQL: prepared, CAUSAL: text / "prepared"}, tmp_path_factory.mktemp("runs"))


def assert_same_losses(run: Path, undisturbed: Path) -> None:
    """That the last attempt has trained the steps after the checkpoint, each to the undisturbed run's loss.

    Other ranks add up in another order: 1e-7 at the first step in FP32, and 1e-6 after ten of AdamW.
    """
    expected, again = losses(undisturbed), losses(run)
    assert list(again) == list(range(SAVED + 1, STEPS + 1))
    assert again == pytest.approx({step: expected[step] for step in again}, rel=1e-5)


@pytest.mark.parametrize(("script", "name", "old", "new"), PAIRS)
def test_each_loss_after_the_change_is_that_of_the_undisturbed_run(
    script: str, name: str, old: int, new: int, runs: Runs
) -> None:
    run = runs.killed(name, old, f"{Path(script).stem}-{name}-{old}-{new}", script)
    said = runs.train(name, new, run, script=script)
    assert (f"made of checkpoint-{SAVED} ({old} ranks -> {new})" in said) == (name != "none")
    assert_same_losses(run, runs.undisturbed(name, old, script))
    # What was made for this number of ranks is gone with the next checkpoint.
    assert not (run / "checkpoints" / "universal").exists()


def test_other_rows_per_step_and_another_technique_are_refused_with_what_fits(runs: Runs) -> None:
    run = runs.killed("zero1", 2, "refused")
    said = runs.train("zero1", 1, run, "--per_device_train_batch_size", 8, status=1)
    assert said.splitlines()[-1] == (
        f"zeropods: {run}: holds a run of 12 rows per step, this call has 8 rows x 1 passes x 1 processes = 8; "
        "give --per_device_train_batch_size 6 --gradient_accumulation_steps 2"
    )
    run = runs.killed("zero1", 2, "technique")
    said = runs.train("none", 1, run, status=1)
    assert f"{run}: holds a run of technique zero1, this call is of none; give the run's own --deepspeed" in said


@pytest.fixture
def saved(runs: Runs, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of two ranks with ZeRO-1, of which there is no universal form yet."""
    run = runs.killed("zero1", 2, request.node.name)
    return run / "checkpoints" / f"checkpoint-{SAVED}"


def fitted(saved: Path, ranks: int = 1, technique: str = "zero1") -> Path:
    """What so many ranks load of it, as this process alone makes it."""
    manifest = read_manifest(saved)
    model = {**manifest.origin.model, "deepspeed": technique}
    wanted = Origin(run_id=manifest.origin.run_id, settings=manifest.origin.settings, model=model, world_size=ranks)
    return Checkpoints(saved.parent, wanted).fitted(saved, manifest)


def test_a_universal_form_that_was_left_behind_is_made_again(saved: Path) -> None:
    assert fitted(saved, 2) == saved
    # Of NVMe offload, ZeRO++ and the like nobody has made sure that the universal form is right.
    with pytest.raises(UserError, match=r"saved by 2 ranks; .* it resumes on 2 ranks only"):
        fitted(saved, 1, "custom")
    place = fitted(saved)
    whole = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    os.truncate(place / "scheduler.pt", 10)
    assert fitted(saved, 3) == place
    assert {path.name for path in whole} >= {"scheduler.pt", "trainer_state.json", "latest_universal", "fp32.pt"}
    assert (place / "scheduler.pt").read_bytes() == whole[place / "scheduler.pt"]


def test_a_pickle_that_is_no_plain_value_is_not_opened_though_its_manifest_fits(saved: Path, tmp_path: Path) -> None:
    import torch

    torch.save(Trap(tmp_path / "made"), saved / f"global_step{SAVED}" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    complete(saved.parent, SAVED, read_manifest(saved).origin, hashed(saved, names_in(saved)))
    with pytest.raises(UserError, match=rf"global_step{SAVED}: holds \S*, which is no plain value; it is not opened"):
        fitted(saved)
    assert not (tmp_path / "made").exists()
