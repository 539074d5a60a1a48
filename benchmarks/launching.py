"""Pods from nothing, and what supervision adds to DeepSpeed's own launcher; with ranks that train nothing."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figure import Figure
from zeropods import pods
from zeropods.pods.cluster import Cluster, deepspeed_argv, deepspeed_environment
from zeropods.programs import child_environment

ROOT = Path(__file__).resolve().parents[1]
RANK = ROOT / "tests" / "full" / "rank.py"
ROUNDS, STARTS = 3, 5
LIMIT_SECONDS = 300


def measure(work: Path) -> list[Figure]:
    """Rounds alternate between what is compared, so that other load of the machine meets both."""
    os.environ["ZEROPODS_HOME"] = str(work / "home")
    one, three = _alternating(STARTS, lambda round_: _start_seconds(1), lambda round_: _start_seconds(3))
    cluster = pods.up(3, name="bench")
    try:
        bare, supervised = _alternating(
            ROUNDS,
            lambda round_: _deepspeed_seconds(cluster, work / f"bare-{round_}"),
            lambda round_: _launch_seconds(cluster, work / f"launch-{round_}"),
        )
    finally:
        cluster.down()
    own, total = statistics.median(one), statistics.median(three)
    added = statistics.median(supervised) - statistics.median(bare)
    return [
        Figure(name="3 pods from nothing to the hostfile", value=total, unit="s", asked="-"),
        Figure(
            name="3 pods: more than one pod's own start",
            value=total - own,
            unit="s",
            asked="at most 2",
            note=f"one pod {own:.2f} s; medians of {STARTS}, alternating",
        ),
        Figure(
            name="zeropods launch: more than the bare deepspeed command",
            value=added,
            unit="s",
            asked="at most 2",
            note=f"bare {statistics.median(bare):.1f} s on 3 pods; medians of {ROUNDS}, alternating",
        ),
    ]


def _alternating(
    rounds: int, first: Callable[[int], float], second: Callable[[int], float]
) -> tuple[list[float], list[float]]:
    pairs = [(first(round_), second(round_)) for round_ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _start_seconds(count: int) -> float:
    began = time.perf_counter()
    cluster = pods.up(count, name="starting")
    seconds = time.perf_counter() - began
    cluster.down()
    return seconds


def _deepspeed_seconds(cluster: Cluster, folder: Path) -> float:
    folder.mkdir()
    environment = {**child_environment(), **deepspeed_environment(cluster)}
    return _seconds([*deepspeed_argv(cluster), str(RANK), "--outputdir", str(folder)], environment)


def _launch_seconds(cluster: Cluster, folder: Path) -> float:
    verb = ["launch", "--name", cluster.name, "--", str(RANK), "--outputdir", str(folder)]
    return _seconds([sys.executable, "-m", "zeropods", *verb], child_environment())


def _seconds(argv: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2_000:]
    return time.perf_counter() - began
