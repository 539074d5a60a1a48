"""Whether the fast path learns as the FP32 run does: their losses over the same rows, beside what chance does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LAST_SHARE = 0.2
"""Of a run: what its final loss is the mean of."""
EXACT, FAST, OTHER = "losses-fp32", "losses-fast", "losses-fp32-other-seed"


def compared(records: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Final losses of the three runs and their differences; None until all are there and ended well.

    The two first saw the same rows in the same order, so their difference is taken step by step: its mean and 95 %
    interval. The third saw other rows from other weights: so far do two FP32 runs differ by chance.
    """
    found = [records.get(name) for name in (EXACT, FAST, OTHER)]
    if any(record is None or record["status"] != "ok" for record in found):
        return None
    exact, fast, other = (_last(record) for record in found if record)
    difference = fast - exact
    half = 1.96 * float(difference.std(ddof=1)) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
    mean, noise = float(difference.mean()), abs(float(other.mean() - exact.mean()))
    return {
        "steps": records[EXACT]["cell"]["steps"],
        "final_loss": {EXACT: float(exact.mean()), FAST: float(fast.mean()), OTHER: float(other.mean())},
        "difference": [mean, mean - half, mean + half],
        "noise": noise,
        "within_noise": bool(abs(mean) <= noise or mean - half <= 0.0 <= mean + half),
    }


def _last(record: dict[str, Any]) -> np.ndarray:
    values = [entry["loss"] for entry in record["losses"]]
    return np.array(values[-max(1, round(LAST_SHARE * len(values))) :])
