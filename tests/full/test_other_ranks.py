"""Runs that go on with another number of ranks: to the losses, step by step, of one that nothing disturbed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.full.conftest import ROOT, TINY
from tests.full.forks import ForkServer
from zeropods.launch.child import child_environment
from zeropods.launch.planning import free_port
from zeropods.measure.records import read_record

SECONDS = 120.0
EFFECTIVE_BATCH = 12
SAVED, STEPS = 10, 20
TECHNIQUES = ("none", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")
"""`none` on several ranks is `ddp`."""
RANKS = (1, 2, 3, 4)
FEW = [("none", 1, 3), ("zero1", 2, 3), ("zero2_offload", 3, 1), ("zero3", 2, 1), ("zero3_offload", 1, 2)]
ALL = [(name, old, new) for name in TECHNIQUES for old in RANKS for new in RANKS if old != new]
PAIRS = ALL if os.environ.get("ZEROPODS_SOAK") == "1" else FEW


def flags(name: str, ranks: int) -> list[object]:
    """Of one technique on so many ranks."""
    config = [] if name == "none" else ["--deepspeed", ROOT / "dsconfig" / f"{name}.json"]
    return ["--per_device_train_batch_size", EFFECTIVE_BATCH // ranks, *config]


@dataclass(frozen=True)
class Runs:
    """Runs by forks of one process, in a folder."""

    server: ForkServer
    prepared: Path
    folder: Path

    def train(self, name: str, ranks: int, run: Path, *given: object, status: int = 0) -> str:
        """Train on so many ranks; returns what rank 0 said."""
        fixed = ["--max_steps", STEPS, "--save_steps", SAVED, "--eval_steps", 0, "--threads", 1]
        argv = [*TINY, *fixed, "--dataset_path", self.prepared, "--outputdir", run, *flags(name, ranks), *given]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        said = [self.folder / f"{run.name}.{rank}" for rank in range(ranks)]
        forks = [
            self.server.start([str(word) for word in argv], child_environment() | environment(rank, ranks, place), path)
            for rank, path in enumerate(said)
        ]
        told = [fork.communicate(SECONDS) for fork in forks]
        assert {fork.returncode for fork in forks} == {status}, "\n".join(told)[-6000:]
        return told[0]

    def undisturbed(self, name: str, ranks: int) -> Path:
        """A run of all steps; made once."""
        run = self.folder / f"{name}-{ranks}"
        if not run.exists():
            self.train(name, ranks, run)
        return run

    def killed(self, name: str, ranks: int, copy: str) -> Path:
        """A copy of such a run, as if it had been killed after its first checkpoint."""
        run = Path(shutil.copytree(self.undisturbed(name, ranks), self.folder / copy))
        (run / "record.json").unlink()
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS}")
        return run


def environment(rank: int, ranks: int, place: dict[str, str]) -> dict[str, str]:
    """What a launcher says to a rank; nothing to one that is alone."""
    if ranks == 1:
        return {}
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(ranks), **place}


@pytest.fixture(scope="module")
def runs(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with ForkServer() as server:
        yield Runs(server, prepared, tmp_path_factory.mktemp("runs"))


def losses(run: Path) -> dict[int, float]:
    """Losses of the last attempt, by step."""
    return {entry["step"]: entry["loss"] for entry in read_record(run)["losses"]}


@pytest.mark.parametrize(("name", "old", "new"), PAIRS)
def test_each_loss_after_the_change_is_that_of_the_undisturbed_run(name: str, old: int, new: int, runs: Runs) -> None:
    run = runs.killed(name, old, f"{name}-{old}-{new}")
    runs.train(name, new, run)
    expected, again = losses(runs.undisturbed(name, old)), losses(run)
    assert list(again) == list(range(SAVED + 1, STEPS + 1))
    assert again == pytest.approx({step: expected[step] for step in again}, rel=1e-6)
