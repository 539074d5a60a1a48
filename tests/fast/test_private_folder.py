"""The folder of a pod's keys, or of a page: private, held, and removed by the next one where its own could not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zeropods.files import DEMO, FRESH_SECONDS, POD, make_private_folder

MAKE = "from zeropods.files import POD, make_private_folder as make; print(make(POD), flush=True); input()"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders of a test lie."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def age(folder: Path) -> None:
    then = folder.stat().st_mtime - 2 * FRESH_SECONDS
    os.utime(folder, (then, then))


def test_only_its_user_reads_it() -> None:
    assert make_private_folder(POD).stat().st_mode & 0o777 == 0o700


def test_what_a_killed_pod_left_is_removed_by_the_next(place: Path) -> None:
    left = place / f"{POD}left"
    left.mkdir()
    (left / "host_key").write_text("x")
    age(left)
    make_private_folder(POD)
    assert not left.exists()


def test_what_another_pod_holds_is_not_touched() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as pod:
        assert pod.stdout is not None
        held = Path(pod.stdout.readline().strip())
        age(held)
        make_private_folder(POD)
        assert held.is_dir()
        pod.communicate("\n")
    make_private_folder(POD)
    assert not held.exists()


def test_a_folder_that_was_just_made_is_not_touched(place: Path) -> None:
    (place / f"{POD}new").mkdir()
    make_private_folder(POD)
    assert (place / f"{POD}new").is_dir()


def test_a_link_is_not_followed(place: Path) -> None:
    (place / "mine").mkdir()
    (place / f"{POD}link").symlink_to(place / "mine")
    make_private_folder(POD)
    assert (place / "mine").is_dir()


def test_a_page_removes_what_killed_pages_left_and_nothing_of_pods(place: Path) -> None:
    of_pod, of_page = place / f"{POD}left", place / f"{DEMO}left"
    for folder in (of_pod, of_page):
        folder.mkdir()
        age(folder)
    make_private_folder(DEMO)
    assert of_pod.is_dir()
    assert not of_page.exists()
