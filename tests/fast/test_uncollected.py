"""The garbage collector rests while a summary is made, and only then."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.made import a_record, write_run
from zeropods.errors import UserError
from zeropods.report.summary import read_runs, summarize, uncollected


def test_within_nothing_is_collected() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_within_another_it_ends_with_the_outer_one() -> None:
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()


def test_after_a_summary_it_collects_again(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", a_record())
    summarize([tmp_path / "runs"], tmp_path / "out")
    assert gc.isenabled()


def test_after_a_fault_it_collects_again(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        read_runs([tmp_path])
    assert gc.isenabled()
