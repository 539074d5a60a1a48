"""What sampling a rank's memory costs: the time of its steps with the sampler on, relative to that with it off.

Blocks of steps of both kinds alternate in one process, and adjacent blocks are compared, so that a noisy neighbour
slows both. The sampler runs a hundred times as often as by default, so that its cost can be told from the noise; the
figure is a hundredth of the measured cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import bootstrap

from benchmarks.figure import Figure
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
BLOCKS, SECONDS = 30, 0.5
"""Number of pairs of blocks, and the least seconds that a block lasts."""


def measure(work: Path) -> list[Figure]:
    """The sampler's share of a step of t5-tiny: the least work that a run can have between two samples."""
    step = _training_step(work)
    for _ in range(10):
        step()
    cpu, often = Cpu(), INTERVAL / FASTER
    shares = []
    for number in range(BLOCKS):
        times = {}
        for interval in (0.0, often) if number % 2 else (often, 0.0):
            with Sampler(work / "memory.csv", interval, lambda: held_bytes() | cpu.read(), lambda: "steady"):
                times[interval] = _seconds_a_step(step)
        shares.append(100 * (times[often] / times[0.0] - 1) / FASTER)
    low, high = bootstrap((shares,), np.median, n_resamples=2_000, method="percentile", rng=0).confidence_interval
    reading = 1e6 * _seconds_a_read(cpu)
    note = f"a reading takes {reading:.0f} us; sampled {FASTER} times as often, divided by it; {BLOCKS} pairs of blocks"
    return [
        Figure(
            name=f"sampler's cost, t5-tiny, a sample each {INTERVAL:g} s",
            value=statistics.median(shares),
            unit="% of step time",
            asked="under 1",
            interval=(float(low), float(high)),
            note=note,
        )
    ]


def _training_step(work: Path) -> Callable[[], None]:
    write_sample(work / "sample")
    prepare(Preparation(data=work / "sample", tokenizer="t5-tiny", limit=64), work / "prepared")
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
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        step()
        steps += 1
    return (time.perf_counter() - began) / steps


def _seconds_a_read(cpu: Cpu) -> float:
    began = time.perf_counter()
    for _ in range(1_000):
        held_bytes() | cpu.read()
    return (time.perf_counter() - began) / 1_000
