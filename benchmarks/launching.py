"""Seconds to start pods, to launch idle ranks with and without supervision, and to reach a first training step."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.figure import Figure
from zeropods import pods
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.launch.notebook import launch, train
from zeropods.pods.cluster import Cluster, deepspeed_argv, deepspeed_environment
from zeropods.programs import child_environment
from zeropods.report.run import Run
from zeropods.workshop import TINY

ROOT = Path(__file__).resolve().parents[1]
RANK = ROOT / "tests" / "full" / "rank.py"
ROUNDS, STARTS, CROWD = 3, 5, 16
LIMIT_SECONDS = 300
ASKED = {"zeropods launch: more than the bare deepspeed command": "at most 1"}


def measure(work: Path) -> list[Figure]:
    """Measure in rounds that alternate between the variants, so that other load on the machine affects both."""
    os.environ["ZEROPODS_HOME"] = str(work / "home")
    write_sample(work / "sample")
    prepare(Preparation(data=work / "sample", tokenizer=TINY), work / "tiny")
    one, three = _alternating(STARTS, lambda round_: _start_seconds(1), lambda round_: _start_seconds(3))
    cluster = pods.up(3, name="bench")
    try:
        bare, supervised = _alternating(
            ROUNDS,
            lambda round_: _deepspeed_seconds(cluster, work / f"bare-{round_}"),
            lambda round_: _launch_seconds(cluster, work / f"launch-{round_}"),
        )
        over_pods = partial(launch, cluster, deepspeed=ROOT / "dsconfig" / "zero1.json")
        alone, together = _alternating(
            STARTS,
            lambda round_: _first_step_seconds(train, work / "tiny", work / f"alone-{round_}"),
            lambda round_: _first_step_seconds(over_pods, work / "tiny", work / f"together-{round_}"),
        )
    finally:
        cluster.down()
    crowd = pods.up(CROWD, name="crowd")
    try:
        over_crowd = partial(launch, crowd, deepspeed=ROOT / "dsconfig" / "zero1.json")
        first, later = (_first_step_seconds(over_crowd, work / "tiny", work / f"crowd-{round_}") for round_ in range(2))
    finally:
        crowd.down()
    step, often = "t5-tiny, call to first step", f"median of {STARTS}, alternating"
    found = {
        "3 pods from nothing to the hostfile": (three, f"one pod {one:.2f} s"),
        "zeropods launch: more than the bare deepspeed command": (
            supervised - bare, f"bare {bare:.1f} s on 3 pods; medians of {ROUNDS}, alternating"
        ),
        f"{step}, 1 pod": (alone, often),
        f"{step}, 3 pods, zero1": (together, often),
        f"{step}, {CROWD} pods, their first launch": (first, "once"),
        f"{step}, {CROWD} pods, their second": (later, "once"),
    }  # fmt: skip
    return [
        Figure(name=name, value=value, unit="s", asked=ASKED.get(name, "-"), note=note)
        for name, (value, note) in found.items()
    ]


def _alternating(rounds: int, first: Callable[[int], float], second: Callable[[int], float]) -> tuple[float, float]:
    """The medians of the first and of the second, whose rounds alternate."""
    pairs = [(first(round_), second(round_)) for round_ in range(rounds)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


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


def _first_step_seconds(start: Callable[..., Run], data: Path, folder: Path) -> float:
    """Seconds from a call that trains one step until rank 0 begins that step."""
    began = time.time()
    run = start(
        outputdir=folder, model_id=TINY, init="random", dataset_path=data, max_steps=1, eval_steps=0, save_steps=0
    )
    rank = run.record.ranks[0]
    assert rank.began_unix_seconds and rank.start_seconds
    return rank.began_unix_seconds + rank.start_seconds - began


def _seconds(argv: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2_000:]
    return time.perf_counter() - began
