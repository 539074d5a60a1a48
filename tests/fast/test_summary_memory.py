"""Memory and use over time in a summary: what of `memory/N.csv` is read, left out, or named as damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made import a_rank, a_record, write_run
from zeropods.report.entry import Timeline
from zeropods.report.plots import memory_over_time, use_over_time
from zeropods.report.summary import read_runs

HEADER = (
    "unix_seconds,phase,allocated_bytes,reserved_bytes,device_used_bytes,resident_bytes,"
    "utilization_percent,power_watts,memory_utilization_percent,cpu_percent,io_wait_percent\n"
)


def a_sample(seconds: float, resident: int | str = 5, phase: str = "steady") -> str:
    return f"{seconds},{phase},,,,{resident},,,,50.5,\n"


def timeline(folder: Path, samples: str) -> Timeline:
    """The samples of a run of one rank, whose attempt took 30 s and ended at 1,030."""
    write_run(folder, a_record(ranks=[a_rank(ended_unix_seconds=1_030.0)]))
    (folder / "memory").mkdir()
    (folder / "memory" / "0.csv").write_bytes(samples.encode("utf-8", "surrogateescape"))
    (found,) = read_runs([folder]).timelines
    return found


@pytest.mark.parametrize(
    ("rest", "expected", "faults"),
    [
        (a_sample(1_001, 7, "save"), [(1_000, "load", 5), (1_001, "save", 7)], ()),
        # A later attempt, of a later version, has more columns.
        ("1001,save,,,,7,,,,50.5,,9,9\n", [(1_000, "load", 5), (1_001, "save", 7)], ()),
        # A last line that was cut short, and samples of an earlier attempt, are left out.
        ("1001,ste", [(1_000, "load", 5)], ()),
        ("1001,steady,,,,12", [(1_000, "load", 5)], ()),
        (a_sample(500), [(1_000, "load", 5)], ()),
        (
            "???\n" + a_sample(1_002),
            [(1_000, "load", 5), (1_002, "steady", 5)],
            ("memory/0.csv:3: '???' is no sample, left out",),
        ),
    ],
)
def test_samples_of_the_last_attempt_are_read_in_their_order(
    tmp_path: Path, rest: str, expected: list[tuple[float, str, float]], faults: tuple[str, ...]
) -> None:
    found = timeline(tmp_path / "a", HEADER + a_sample(1_000, phase="load") + rest)
    samples = found.ranks[0][["unix_seconds", "phase", "resident_bytes"]]
    assert (list(samples.itertuples(index=False, name=None)), found.faults) == (expected, faults)
    memory, use = memory_over_time([found], 1), use_over_time([found], 1)
    assert (memory.text, use.text) == ("memory over time of A none x1", "use over time of A none x1")
    assert "GiB resident" in memory.svg and "CPU (% of cores)" in use.svg


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "damaged: No columns"), ("time,bytes\n1,2\n", "column unix_seconds"), ("\udcff\udcfe", "damaged")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    assert timeline(tmp_path / "a", text).ranks == {}
    (remark,) = read_runs([tmp_path]).remarks()
    assert remark.startswith("A none x1: memory/0.csv: ") and said in remark


def test_a_run_without_samples_is_no_curve(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_record())
    assert read_runs([tmp_path]).timelines == []
