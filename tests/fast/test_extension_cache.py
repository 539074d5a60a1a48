"""Where extensions are compiled, and which locks are taken away."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from zeropods.extension_cache import VARIABLE, extension_cache, remove_stale_locks, use_own_cache


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """The lock of an operation that is being compiled, ten minutes and a second old."""
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    return aged(path, 601)


def aged(path: Path, seconds: float) -> Path:
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_an_environment_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is of no virtual environment")
    assert extension_cache() == Path(sys.prefix) / "torch_extensions"


def test_torch_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    expected = str(extension_cache())
    use_own_cache()
    assert os.environ.get(VARIABLE, expected) == expected


def test_a_cache_that_was_chosen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    use_own_cache()
    assert extension_cache() == tmp_path


def test_a_lock_that_was_left_is_removed(lock: Path) -> None:
    assert remove_stale_locks(lock.parents[1]) == [lock] and not lock.exists()


def test_a_lock_that_nobody_holds_is_removed_sooner(lock: Path) -> None:
    assert remove_stale_locks(aged(lock, 200).parents[1]) == [lock]


def test_a_lock_that_a_process_holds_stays(lock: Path) -> None:
    aged(lock, 200)
    with open(lock):
        assert remove_stale_locks(lock.parents[1]) == []


def test_a_fresh_lock_stays(lock: Path) -> None:
    assert remove_stale_locks(aged(lock, 1).parents[1]) == []


def test_a_cache_that_is_not_there_has_no_locks(tmp_path: Path) -> None:
    assert remove_stale_locks(tmp_path / "none") == []
