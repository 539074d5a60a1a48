"""Memory over time in a summary: what of `memory/N.csv` is read, left out, or named as damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made import a_rank, a_record, write_run
from zeropods.errors import UserError
from zeropods.report.memory_plot import Timeline, memory_over_time, read_series, read_timeline
from zeropods.report.summary import read_runs

HEADER = (
    "unix_seconds,phase,allocated_bytes,reserved_bytes,device_used_bytes,resident_bytes,"
    "utilization_percent,power_watts\n"
)


def a_sample(seconds: float, resident: int | str = 5, phase: str = "steady") -> str:
    return f"{seconds},{phase},,,,{resident},,\n"


def a_run(folder: Path, *files: str) -> Path:
    """A run with the samples of its ranks. Its attempt took 30 s and ended at 1,030."""
    ranks = [a_rank(i, ended_unix_seconds=1_030.0) for i, _ in enumerate(files)]
    write_run(folder, a_record(ranks=ranks, run_id=folder.name))
    (folder / "memory").mkdir()
    for number, text in enumerate(files):
        (folder / "memory" / f"{number}.csv").write_text(text)
    return folder


def timeline(folder: Path) -> Timeline:
    (entry,) = read_runs([folder]).entries
    return read_timeline(entry, "A")


def test_samples_are_read_in_their_order(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", HEADER + a_sample(1_000, 5, "load") + a_sample(1_001, 7))
    series = timeline(run).ranks[0]
    assert (series.unix_seconds, series.phases) == ([1_000, 1_001], ["load", "steady"])
    assert series.bytes_by_kind["resident"] == [5, 7]


def test_an_empty_cell_was_not_measured(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", HEADER + a_sample(1_000))
    assert timeline(run).ranks[0].bytes_by_kind["allocated"] == [None]


@pytest.mark.parametrize("rest", ["1001,ste", "1001,steady,,,,12"])
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path, rest: str) -> None:
    run = a_run(tmp_path / "a", HEADER + a_sample(1_000) + rest)
    assert (timeline(run).ranks[0].bytes_by_kind["resident"], timeline(run).faults) == ([5], ())


def test_a_damaged_line_is_named_and_the_others_are_drawn(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", HEADER + a_sample(1_000) + "???\n" + a_sample(1_002))
    assert timeline(run).ranks[0].unix_seconds == [1_000, 1_002]
    assert read_runs([run]).remarks() == ["A none x1: memory/0.csv:3: '???' is no sample, left out"]


@pytest.mark.parametrize("text", ["", "time,bytes\n1,2\n"])
def test_a_file_without_the_columns_is_named(tmp_path: Path, text: str) -> None:
    a_run(tmp_path / "a", text)
    (remark,) = read_runs([tmp_path]).remarks()
    assert remark.startswith("A none x1: memory/0.csv: header ") and "unix_seconds" in remark


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="damaged"):
        read_series(tmp_path / "0.csv")


def test_samples_of_an_earlier_attempt_are_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", HEADER + a_sample(500) + a_sample(1_001))
    assert timeline(run).ranks[0].unix_seconds == [1_001]


def test_a_run_without_samples_is_no_curve(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_record())
    assert read_runs([tmp_path]).timelines == []


def test_a_plot_names_the_runs_that_it_shows(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", HEADER + a_sample(1_000, phase="load") + a_sample(1_001) + a_sample(1_002))
    assert memory_over_time([timeline(run)], 1).text == "memory over time of A"
