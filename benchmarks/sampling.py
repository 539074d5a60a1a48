"""What sampling a rank's memory costs: the time of its steps with the sampler on, relative to that
with it off.

Blocks of steps of both kinds alternate in one process, and adjacent blocks are compared, so that a
noisy neighbour slows both. The sampler runs a hundred times as often as by default, so that its
cost can be told from the noise; the figure is a hundredth of the measured cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import bootstrap

from benchmarks.figure import RESAMPLES, Figure
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.measure.sampling import Cpu, Sampler
from zeropods.plan.known_models import known_config
from zeropods.train.device import held_bytes
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.sampler import collate, load_split
from zeropods.train.text2sql import random_t5

INTERVAL = TextToSQLArguments.memory_interval
FASTER = 100
OFTEN = INTERVAL / FASTER
"""Seconds between two samples, where the sampler is on."""
NEVER = 0.0
WARM_STEPS = 10
BLOCKS = 30
"""Number of pairs of blocks."""
SECONDS = 0.5
"""The least seconds that a block lasts."""
READS = 1_000
"""Number of readings from which the time of one is taken."""


def measure(work: Path) -> list[Figure]:
    """The sampler's share of a step of t5-tiny: the least work that a run can have between two
    samples."""
    step = _training_step(work)
    for _ in range(WARM_STEPS):
        step()
    cpu = Cpu()
    shares = []
    for number in range(BLOCKS):
        # Which of a pair comes first alternates too.
        intervals = (OFTEN, NEVER)
        if number % 2 == 1:
            intervals = (NEVER, OFTEN)
        seconds = {}
        for interval in intervals:
            with Sampler(work / "memory.csv", interval, lambda: _reading(cpu), lambda: "steady"):
                seconds[interval] = _seconds_a_step(step)
        cost = seconds[OFTEN] / seconds[NEVER] - 1
        shares.append(100 * cost / FASTER)
    drawn = bootstrap((shares,), np.median, n_resamples=RESAMPLES, method="percentile", rng=0)
    low, high = drawn.confidence_interval
    microseconds = 1e6 * _seconds_a_read(cpu)
    return [
        Figure(
            name=f"sampler's cost, t5-tiny, a sample each {INTERVAL:g} s",
            value=statistics.median(shares),
            unit="% of step time",
            asked="under 1",
            interval=(float(low), float(high)),
            note=(
                f"a reading takes {microseconds:.0f} us; "
                f"sampled {FASTER} times as often, divided by it; {BLOCKS} pairs of blocks"
            ),
        )
    ]


def _training_step(work: Path) -> Callable[[], None]:
    write_sample(work / "sample")
    preparation = Preparation(data=work / "sample", tokenizer="t5-tiny", limit=64)
    prepare(preparation, work / "prepared")
    rows = load_split(work / "prepared", "train")
    assert rows is not None
    batch = collate([rows[i] for i in range(8)])
    model = random_t5(known_config("t5-tiny"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds_a_step(step: Callable[[], None]) -> float:
    """Mean seconds per step of a block; starting and ending the sampler is not included."""
    steps = 0
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        step()
        steps += 1
    return (time.perf_counter() - began) / steps


def _seconds_a_read(cpu: Cpu) -> float:
    began = time.perf_counter()
    for _ in range(READS):
        _reading(cpu)
    return (time.perf_counter() - began) / READS


def _reading(cpu: Cpu) -> dict[str, float | None]:
    """What a rank's sampler reads each time."""
    return held_bytes() | cpu.read()
