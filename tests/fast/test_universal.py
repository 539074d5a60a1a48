"""Universal checkpoints: made once, whole or not there, of the save that they say, and gone with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.made_checkpoint import an_origin, quick_folder, save
from zeropods.train.checkpoint_files import (
    UnsoundError,
    check_universal,
    make_universal,
    read_manifest,
    retire,
    sweep_universal,
    universal_of,
)

STATES = {"zero/weight/fp32.pt": b"weights", "zero/weight/exp_avg.pt": b"averages"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """`checkpoints/` with steps 10 and 20."""
    with quick_folder() as found:
        for step in (10, 20):
            save(found, step)
        yield found


def convert(shards: Path, out: Path) -> None:
    """Write what DeepSpeed's converter would, where it would."""
    assert shards.is_dir()
    for name, content in STATES.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    (out.parent / "latest_universal").write_text(out.name)


def made(folder: Path, step: int = 10) -> tuple[Path, Path]:
    """A universal checkpoint, and what it was made of."""
    place, checkpoint = universal_of(folder, step), folder / f"checkpoint-{step}"
    make_universal(place, checkpoint, read_manifest(checkpoint), convert)
    return place, checkpoint


def test_it_is_whole_beside_the_checkpoint_that_it_was_made_of(folder: Path) -> None:
    place, checkpoint = made(folder)
    check_universal(place, checkpoint)
    assert (place / "latest_universal").read_text() == "global_step10_universal"
    assert (place / "trainer_state.json").read_bytes() == (checkpoint / "trainer_state.json").read_bytes()
    assert os.listdir(place.parent) == ["10"]


def test_a_changed_byte_is_found(folder: Path) -> None:
    place, checkpoint = made(folder)
    path = place / "global_step10_universal" / "zero" / "weight" / "fp32.pt"
    path.write_bytes(b"weighty"[: len(path.read_bytes())])
    with pytest.raises(UnsoundError, match=r"fp32.pt: its bytes have changed since it was saved"):
        check_universal(place, checkpoint)


def test_that_of_an_earlier_save_of_the_step_is_not_taken(folder: Path) -> None:
    place, checkpoint = made(folder)
    save(folder, 10, save="second")
    with pytest.raises(UnsoundError, match=r"source.json: of another save of the step"):
        check_universal(place, checkpoint)


def test_what_is_there_is_replaced(folder: Path) -> None:
    place, checkpoint = made(folder)
    (place / "trainer_state.json").unlink()
    made(folder)
    check_universal(place, checkpoint)


def test_a_checkpoint_that_zero_has_not_divided_has_none(folder: Path) -> None:
    checkpoint = folder / "checkpoint-10"
    manifest = read_manifest(checkpoint)
    for name in [name for name in manifest.files if name.endswith("_optim_states.pt")]:
        del manifest.files[name]
    with pytest.raises(UnsoundError, match="holds the shards of 0 steps, expected those of 1"):
        make_universal(universal_of(folder, 10), checkpoint, manifest, convert)


def test_killed_in_mid_conversion_it_is_not_there_and_can_be_made(folder: Path) -> None:
    def killed(shards: Path, out: Path) -> None:
        convert(shards, out)
        os.kill(os.getpid(), signal.SIGKILL)

    place, checkpoint = universal_of(folder, 10), folder / "checkpoint-10"
    child = os.fork()
    if child == 0:
        make_universal(place, checkpoint, read_manifest(checkpoint), killed)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not place.exists()
    assert len(list(place.parent.iterdir())) == 1
    check_universal(*made(folder))
    sweep_universal(folder)
    assert os.listdir(place.parent) == ["10"]


def test_one_that_fails_leaves_nothing(folder: Path) -> None:
    def fails(shards: Path, out: Path) -> None:
        convert(shards, out)
        raise ZeroDivisionError

    checkpoint = folder / "checkpoint-10"
    with pytest.raises(ZeroDivisionError):
        make_universal(universal_of(folder, 10), checkpoint, read_manifest(checkpoint), fails)
    assert os.listdir(folder / "universal") == []


def test_it_goes_when_its_checkpoint_is_one_too_many(folder: Path) -> None:
    for step in (10, 20):
        made(folder, step)
    retire(folder, 20, an_origin(), 1)
    assert os.listdir(folder / "universal") == ["20"]


def test_the_next_save_removes_those_whose_checkpoint_is_gone(folder: Path) -> None:
    made(folder)
    os.rename(folder / "checkpoint-10", folder / "elsewhere")
    save(folder, 30)
    assert os.listdir(folder / "universal") == []


def test_a_universal_checkpoint_is_none_of_the_files_of_its_checkpoint(folder: Path) -> None:
    _, checkpoint = made(folder)
    assert not [path for path in checkpoint.rglob("*") if "universal" in path.name]
