"""Where extensions are compiled, and which locks are taken away."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from zeropods.programs import VARIABLE, extension_cache, is_stale, use_own_cache


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


def test_a_lock_of_torch_that_was_left_is_stale(lock: Path) -> None:
    assert is_stale(lock)


def test_a_lock_that_nobody_holds_is_so_sooner(lock: Path) -> None:
    assert is_stale(aged(lock, 200))


def test_a_lock_that_a_process_holds_is_not(lock: Path) -> None:
    aged(lock, 200)
    with open(lock):
        assert not is_stale(lock)


def test_a_fresh_lock_is_not(lock: Path) -> None:
    assert not is_stale(aged(lock, 1))


def test_a_lock_that_has_gone_is_not(tmp_path: Path) -> None:
    assert not is_stale(tmp_path / "lock")
