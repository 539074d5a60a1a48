"""Older checkpoints go when a newer one is whole, and never before: whenever their deletion is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.made_checkpoint import an_origin, content_of, quick_folder, read, save
from zeropods.train.checkpoint_files import Found, Retired, newest_good, read_manifest, retire, write_pointer

OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Complete checkpoints of the steps 10, 20, 30 and 40."""
    with quick_folder() as run:
        for step in (10, 20, 30, 40):
            save(run / "checkpoints", step)
        yield run / "checkpoints"


def kept(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("checkpoint-"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_the_oldest_go_first_and_the_newest_stay(folder: Path) -> None:
    assert retire(folder, 40, an_origin(), 2) == Retired(gone=("checkpoint-10", "checkpoint-20"))
    assert kept(folder) == ["checkpoint-30", "checkpoint-40"]
    assert newest_good(folder, an_origin()) == Found(folder / "checkpoint-40", ())


def test_nothing_goes_while_there_are_no_more_than_may_stay(folder: Path) -> None:
    assert retire(folder, 40, an_origin(), 4) == Retired()
    assert len(kept(folder)) == 4


def test_nothing_goes_while_the_newest_does_not_verify(folder: Path) -> None:
    flip(folder / "checkpoint-40" / "model.safetensors")
    why = "model.safetensors: its bytes have changed since it was saved (SHA-256)"
    assert retire(folder, 40, an_origin(), 1) == Retired(fault=why)
    assert len(kept(folder)) == 4


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (1, ["checkpoint-10", "checkpoint-40"]),
        (2, ["checkpoint-10", "checkpoint-40"]),
        (3, ["checkpoint-10", "checkpoint-30", "checkpoint-40"]),
    ],
)
def test_the_best_one_stays_however_old(folder: Path, keep: int, stay: list[str]) -> None:
    retire(folder, 40, an_origin(), keep, best="checkpoint-10")
    assert kept(folder) == stay


def test_what_the_pointer_names_stays(folder: Path) -> None:
    write_pointer(folder, "checkpoint-20", read_manifest(folder / "checkpoint-20"))
    retire(folder, 40, an_origin(), 1)
    assert kept(folder) == ["checkpoint-20", "checkpoint-40"]


def test_what_this_run_did_not_make_is_neither_counted_nor_touched(folder: Path) -> None:
    save(folder, 15, origin=an_origin(run_id="r2"))
    (folder / "checkpoint-25").mkdir()
    (folder / "checkpoint-20" / "manifest.json").unlink()
    assert retire(folder, 40, an_origin(), 2).gone == ("checkpoint-10",)
    assert kept(folder) == ["checkpoint-15", "checkpoint-20", "checkpoint-25", "checkpoint-30", "checkpoint-40"]


def test_a_later_step_of_a_run_that_went_back_is_left_alone(folder: Path) -> None:
    retire(folder, 30, an_origin(), 1)
    assert kept(folder) == ["checkpoint-30", "checkpoint-40"]


def in_child_killed_at(number: int, folder: Path) -> int:
    """Retire in a fork that dies before its n-th operation on files; returns its status, or minus the signal."""
    child = os.fork()
    if child == 0:
        seen = 0

        def audit(event: str, _: Any) -> None:
            nonlocal seen
            if event not in OPERATIONS:
                return
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        try:
            retire(folder, 40, an_origin(), 1)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_before_any_operation_the_newest_is_found_and_the_next_save_tidies_up() -> None:
    killed = 0
    while True:
        with quick_folder() as run:
            folder = run / "checkpoints"
            for step in (20, 30, 40):
                save(folder, step)
            status = in_child_killed_at(killed + 1, folder)
            assert newest_good(folder, an_origin()) == Found(folder / "checkpoint-40", ())
            # Whatever has its name still is whole.
            assert all(read(folder / name) == content_of(int(name[11:])) for name in kept(folder))
            save(folder, 50)
            retire(folder, 50, an_origin(), 1)
            assert sorted(os.listdir(folder)) == ["checkpoint-50", "latest.json"]
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
    assert killed > 20
