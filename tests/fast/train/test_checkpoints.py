"""Checkpoints count when they are whole: damage is named, and older ones are pruned."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.train import checkpoints
from zeropods.train.checkpoints import Origin, UnsoundError

MEMORY = Path("/dev/shm")
SHARD = "global_step20/zero_pp_rank_1_mp_rank_00_optim_states.pt"


def an_origin(**values: Any) -> Origin:
    settings = checkpoints.digest({"max_steps": 30})
    model: dict[str, int | str | bool | None] = {"d_model": 64, "precision": "fp32", "deepspeed": "zero1"}
    return Origin(**{"run_id": "r1", "settings": settings, "model": model, "world_size": 3, **values})


def content_of(step: int, save: str = "first") -> dict[str, bytes]:
    """The files of a step: small, and different in each save."""
    named = ["trainer_state.json", "model.safetensors", "latest", *(f"rng_state_{k}.pth" for k in range(3))]
    shards = [f"global_step{step}/zero_pp_rank_{k}_mp_rank_00_optim_states.pt" for k in range(3)]
    return {name: f"{name} of step {step}, {save} save".encode() * 3 for name in [*named, *shards]}


def save(folder: Path, step: int, *, save: str = "first", origin: Origin | None = None) -> Path:
    """Save a step by the protocol, one rank after the other."""
    place = checkpoints.make_room(folder, step)
    for name, content in content_of(step, save).items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    files = {}
    for rank in range(3):
        files.update(checkpoints.hashed(place, rank, 3))
    checkpoints.mark_complete(folder, step, origin or an_origin(), files)
    return place


def read(checkpoint: Path) -> dict[str, bytes]:
    """All files of a checkpoint, without its manifest."""
    return {name: (checkpoint / name).read_bytes() for name in checkpoints.names_in(checkpoint)}


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where the system has one: forcing a file down costs nothing there."""
    folder = Path(tempfile.mkdtemp(prefix="zeropods-test-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """`checkpoints/` with two complete ones, of steps 10 and 20."""
    with quick_folder() as run:
        for step in (10, 20):
            save(run / "checkpoints", step)
        yield run / "checkpoints"


def found(folder: Path, origin: Origin | None = None) -> tuple[str | None, list[tuple[str, str]]]:
    """The name of the newest checkpoint that counts, and what was passed over."""
    wanted = origin or an_origin()
    skipped: list[tuple[str, str]] = []
    newest = checkpoints.newest_good(
        folder, lambda of: of.other_run(wanted), lambda place, why: skipped.append((place.name, why))
    )
    return newest and newest[0].name, skipped


def kept(folder: Path) -> list[int]:
    return sorted(int(name[11:]) for name in os.listdir(folder) if name.startswith("checkpoint-"))


def test_the_newest_is_found_by_number_and_nothing_is_passed_over(folder: Path) -> None:
    save(folder, 9)
    assert found(folder) == ("checkpoint-20", [])
    assert read(folder / "checkpoint-20") == content_of(20)
    assert found(folder / "missing") == (None, [])


def flip(path: Path, at: int = 0, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


@pytest.mark.parametrize(
    ("harm", "name", "why"),
    [
        (flip, SHARD, f"{SHARD}: its bytes have changed since it was saved (SHA-256)"),
        (lambda path: os.truncate(path, 233), SHARD, f"{SHARD}: 233 bytes, expected 234"),
        (Path.unlink, SHARD, f"{SHARD}: missing"),
        (link, SHARD, f"{SHARD}: "),
        (Path.touch, "global_step20/zero_pp_rank_3_mp_rank_00_optim_states.pt", "not in the manifest"),
        (Path.unlink, "manifest.json", "no manifest.json: the save did not finish"),
        (lambda path: os.truncate(path, 100), "manifest.json", "manifest.json: damaged (Invalid JSON"),
        (lambda path: path.write_text(path.read_text().replace('"step": 20', '"step": 21')), "manifest.json",
         "manifest.json: damaged (its digest does not match)"),
        (lambda path: path.write_text('{"digest": "", "writer": "torch"}'), "manifest.json", "manifest.json: damaged"),
    ],
)  # fmt: skip
def test_damage_is_named_and_the_one_before_counts(
    folder: Path, harm: Callable[[Path], object], name: str, why: str
) -> None:
    harm(folder / "checkpoint-20" / name)
    newest, ((skipped, said), *_) = found(folder)
    assert (newest, skipped, why in said) == ("checkpoint-10", "checkpoint-20", True), said


def test_checkpoints_of_another_model_run_or_step_are_passed_over(folder: Path) -> None:
    save(
        folder, 30, origin=an_origin(model={**an_origin().model, "d_model": 1024}, settings=checkpoints.digest("large"))
    )
    other = save(folder, 40, origin=an_origin(run_id="r2", settings=checkpoints.digest({"max_steps": 60})))
    shutil.copytree(folder / "checkpoint-10", folder / "checkpoint-50")
    assert found(folder) == ("checkpoint-20", [
        ("checkpoint-50", "holds step 10, but its folder has another name"),
        ("checkpoint-40", "belongs to run r2, which has other settings"),
        ("checkpoint-30", "belongs to another model: d_model 1024, expected 64"),
    ])  # fmt: skip
    assert checkpoints.verified(other, lambda origin: origin.other_model(an_origin())).step == 40


@pytest.mark.parametrize("text", ["", "7", "{}", '{"checkpoint": 1}', '{"checkpoint": "checkpoint-30"}'])
def test_a_pointer_that_is_damaged_or_leads_nowhere_loses_nothing(folder: Path, text: str) -> None:
    (folder / "latest.json").write_text(text)
    assert found(folder) == ("checkpoint-20", [])
    (folder / "latest.json").unlink()
    assert found(folder) == ("checkpoint-20", [])


def test_what_the_pointer_names_is_found_where_a_listing_is_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([folder / "checkpoint-10"]))
    assert checkpoints.saved_steps(folder) == [20, 10]


def test_a_file_that_came_while_the_step_was_saved_is_refused(folder: Path) -> None:
    place = checkpoints.make_room(folder, 30)
    (place / "trainer_state.json").touch()
    files = checkpoints.hashed(place)
    (place / ".nfs0001").touch()
    (place / "late.pt").touch()
    with pytest.raises(UserError, match=r"late\.pt appeared or disappeared"):
        checkpoints.mark_complete(folder, 30, an_origin(), files)
    assert found(folder)[0] == "checkpoint-20"


# Pruning.


@pytest.fixture
def four(folder: Path) -> Path:
    """`checkpoints/` with steps 10, 20, 30 and 40."""
    for step in (30, 40):
        save(folder, step)
    return folder


@pytest.mark.parametrize(
    ("step", "keep", "best", "stay"),
    [
        (40, 2, None, [30, 40]),
        (40, 4, None, [10, 20, 30, 40]),
        (40, 1, 10, [10, 40]),
        (40, 2, 10, [10, 40]),
        (40, 3, 10, [10, 30, 40]),
        # A run that went back leaves later steps alone.
        (30, 1, None, [30, 40]),
    ],
)
def test_the_newest_and_the_best_stay(four: Path, step: int, keep: int, best: int | None, stay: list[int]) -> None:
    gone = checkpoints.prune(four, step, an_origin(), keep, best and f"checkpoint-{best}")
    assert kept(four) == stay
    assert gone == [f"checkpoint-{old}" for old in (10, 20, 30, 40) if old not in stay]


def test_nothing_goes_while_the_newest_does_not_verify(four: Path) -> None:
    flip(four / "checkpoint-40" / "model.safetensors")
    with pytest.raises(UnsoundError, match=r"model\.safetensors: its bytes have changed"):
        checkpoints.prune(four, 40, an_origin(), 1)
    assert kept(four) == [10, 20, 30, 40]


def test_what_others_made_stays(four: Path) -> None:
    (four / "checkpoint-25").mkdir()
    (four / "checkpoint-20" / "manifest.json").unlink()
    shutil.rmtree(four / "checkpoint-10")
    shutil.rmtree(four / "checkpoint-30")
    save(four, 15, origin=an_origin(run_id="r2"))
    assert checkpoints.prune(four, 40, an_origin(), 1) == []
    assert kept(four) == [15, 20, 25, 40]
