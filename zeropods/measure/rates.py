"""Training time and throughput of a run, from what its ranks measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def train_seconds(ranks: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of all optimizer steps of the slowest rank, evaluation and saving left out; None without a step."""
    return max((sum(rank["step_seconds"]) for rank in ranks), default=0.0) or None


def samples_per_second(ranks: Sequence[dict[str, Any]], effective_batch_size: int) -> float | None:
    """Training samples of all ranks together a second, over the steps after warm-up; the slowest rank's clock."""
    timed = [rank["step_seconds"][rank["warmup_steps"] :] for rank in ranks]
    if not timed or not min(map(len, timed)):
        return None
    return min(effective_batch_size * len(steps) / sum(steps) for steps in timed)
