"""The published runs that this project's original reports: A100-40GB pods, batch 32, FP32, 3 epochs of WikiSQL."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("published.csv")
WIKISQL_STEPS = {1: 5_286, 2: 2_643, 3: 1_764}
"""Optimizer steps by pods: 3 x ceil(56,355 / (32 x pods))."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the published table; None where it says nothing."""

    model: str
    technique: str
    pods: int
    train_seconds: float | None
    samples_per_second: float | None
    gigabytes_a_pod_low: float
    """As `nvidia-smi` showed it: CUDA's own memory and the allocator's cache included."""
    gigabytes_a_pod_high: float
    gradient_checkpointing: bool
    effective_batch_size: int
    confounders: str
    """What makes it hard to compare, in words."""

    @property
    def step_seconds(self) -> float | None:
        """Duration over optimizer steps, evaluation and saving included."""
        return None if self.train_seconds is None else self.train_seconds / WIKISQL_STEPS[self.pods]


def published() -> tuple[Published, ...]:
    """All rows."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_row(line) for line in csv.DictReader(file))


def published_for(model: str) -> tuple[Published, ...]:
    """The rows of a model; none where there are none."""
    return tuple(row for row in published() if row.model == model)


def _row(line: dict[str, str]) -> Published:
    return Published(
        model=line["model"],
        technique=line["technique"],
        pods=int(line["pods"]),
        train_seconds=_number(line["train_seconds"]),
        samples_per_second=_number(line["samples_per_second"]),
        gigabytes_a_pod_low=float(line["gigabytes_a_pod_low"]),
        gigabytes_a_pod_high=float(line["gigabytes_a_pod_high"]),
        gradient_checkpointing=line["gradient_checkpointing"] == "True",
        effective_batch_size=int(line["effective_batch_size"]),
        confounders=line["confounders"],
    )


def _number(text: str) -> float | None:
    return float(text) if text else None
