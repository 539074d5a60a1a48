"""Preparing a data set: seconds, peak memory, size on disk; and the start of the command line."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.data import raw_wikisql
from benchmarks.figure import Figure


def measure(work: Path) -> list[Figure]:
    """Each command in a process of its own, as a user calls it."""
    raw, tokenizer, what = raw_wikisql(work)
    out = work / "schema"
    arguments = ["prepare", "--data", str(raw), "--tokenizer", tokenizer, "--out", str(out)]
    seconds, peak = _run(*arguments)
    again, _ = _run(*arguments)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    help_ = statistics.median(_run("--help")[0] for _ in range(5))
    return [
        Figure(
            name="prepare, prompt schema, all examples",
            value=seconds,
            unit="s",
            asked="at most 10",
            note=what,
        ),
        Figure(name="prepare, peak resident memory", value=peak / 2**30, unit="GiB", asked="at most 1.5"),
        Figure(name="prepare, size on disk", value=size / 2**20, unit="MiB", asked="at most 40"),
        Figure(name="prepare, second call", value=again, unit="s", asked="does nothing"),
        Figure(name="zeropods --help", value=help_, unit="s", asked="under 0.5"),
    ]


def _run(*arguments: str) -> tuple[float, int]:
    """Seconds and peak resident bytes of `zeropods ARGUMENTS`."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "zeropods", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, arguments
    return time.perf_counter() - began, usage.ru_maxrss * 1024
