"""Seconds to start pods, to launch idle ranks with and without supervision, and to reach a first
training step."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
ZERO1 = ROOT / "dsconfig" / "zero1.json"
ROUNDS = 3
STARTS = 5
CROWD = 16
"""Number of pods of the launch over many."""
LIMIT_SECONDS = 300
FIRST_STEP = "t5-tiny, call to first step"


def measure(work: Path) -> list[Figure]:
    """Measure in rounds that alternate between the variants, so that other load on the machine
    affects both."""
    os.environ["ZEROPODS_HOME"] = str(work / "home")
    write_sample(work / "sample")
    prepare(Preparation(data=work / "sample", tokenizer=TINY), work / "tiny")
    figures = [_starts()]
    with _pods(3, "bench") as cluster:
        figures.append(_supervision(cluster, work))
        figures += _first_steps(cluster, work)
    with _pods(CROWD, "crowd") as crowd:
        figures += _first_steps_of_a_crowd(crowd, work)
    return figures


@contextmanager
def _pods(count: int, name: str) -> Iterator[Cluster]:
    cluster = pods.up(count, name=name)
    try:
        yield cluster
    finally:
        cluster.down()


def _starts() -> Figure:
    one, three = _alternating(STARTS, lambda _: _start_seconds(1), lambda _: _start_seconds(3))
    name = "3 pods from nothing to the hostfile"
    return Figure(name=name, value=three, unit="s", note=f"one pod {one:.2f} s")


def _supervision(cluster: Cluster, work: Path) -> Figure:
    """What `zeropods launch` takes beyond DeepSpeed's own command."""
    bare, supervised = _alternating(
        ROUNDS,
        lambda round_: _deepspeed_seconds(cluster, work / f"bare-{round_}"),
        lambda round_: _launch_seconds(cluster, work / f"launch-{round_}"),
    )
    return Figure(
        name="zeropods launch: more than the bare deepspeed command",
        value=supervised - bare,
        unit="s",
        asked="at most 1",
        note=f"bare {bare:.1f} s on 3 pods; medians of {ROUNDS}, alternating",
    )


def _first_steps(cluster: Cluster, work: Path) -> list[Figure]:
    """Seconds to the first step of a run on one pod, and of one over three."""
    data = work / "tiny"
    over_pods = partial(launch, cluster, deepspeed=ZERO1)
    alone, together = _alternating(
        STARTS,
        lambda round_: _first_step_seconds(train, data, work / f"alone-{round_}"),
        lambda round_: _first_step_seconds(over_pods, data, work / f"together-{round_}"),
    )
    note = f"median of {STARTS}, alternating"
    return [
        Figure(name=f"{FIRST_STEP}, 1 pod", value=alone, unit="s", note=note),
        Figure(name=f"{FIRST_STEP}, 3 pods, zero1", value=together, unit="s", note=note),
    ]


def _first_steps_of_a_crowd(crowd: Cluster, work: Path) -> list[Figure]:
    """Seconds to the first step over many pods: of the first launch over them, and of the next."""
    over_crowd = partial(launch, crowd, deepspeed=ZERO1)
    first = _first_step_seconds(over_crowd, work / "tiny", work / "crowd-0")
    second = _first_step_seconds(over_crowd, work / "tiny", work / "crowd-1")
    name = f"{FIRST_STEP}, {CROWD} pods"
    return [
        Figure(name=f"{name}, their first launch", value=first, unit="s", note="once"),
        Figure(name=f"{name}, their second", value=second, unit="s", note="once"),
    ]


def _alternating(
    rounds: int, first: Callable[[int], float], second: Callable[[int], float]
) -> tuple[float, float]:
    """The medians of the first and of the second, whose rounds alternate."""
    first_seconds = []
    second_seconds = []
    for round_ in range(rounds):
        first_seconds.append(first(round_))
        second_seconds.append(second(round_))
    return statistics.median(first_seconds), statistics.median(second_seconds)


def _start_seconds(count: int) -> float:
    began = time.perf_counter()
    cluster = pods.up(count, name="starting")
    seconds = time.perf_counter() - began
    cluster.down()
    return seconds


def _deepspeed_seconds(cluster: Cluster, folder: Path) -> float:
    folder.mkdir()
    environment = {**child_environment(), **deepspeed_environment(cluster)}
    argv = [*deepspeed_argv(cluster), str(RANK), "--outputdir", str(folder)]
    return _seconds(argv, environment)


def _launch_seconds(cluster: Cluster, folder: Path) -> float:
    words = ["launch", "--name", cluster.name, "--", str(RANK), "--outputdir", str(folder)]
    return _seconds([sys.executable, "-m", "zeropods", *words], child_environment())


def _first_step_seconds(start: Callable[..., Run], data: Path, folder: Path) -> float:
    """Seconds from a call that trains one step until rank 0 begins that step."""
    began = time.time()
    run = start(
        outputdir=folder,
        model_id=TINY,
        init="random",
        dataset_path=data,
        max_steps=1,
        eval_steps=0,
        save_steps=0,
    )
    rank = run.record.ranks[0]
    assert rank.began_unix_seconds and rank.start_seconds
    return rank.began_unix_seconds + rank.start_seconds - began


def _seconds(argv: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2_000:]
    return time.perf_counter() - began
