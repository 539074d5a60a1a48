"""The published reference: figures of other hardware, with what confounds each. Never part of a ratio."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from zeropods.report.table import Table

PUBLISHED = Path(__file__).parents[1] / "plan" / "published.csv"
TITLE = "Published elsewhere: A100-40GB pods, 3 epochs of WikiSQL"
NOTE = (
    "Measured by others on other hardware; memory was read off screenshots of nvidia-smi. "
    "For orientation only: no ratio is drawn to these rows."
)
NOT_PUBLISHED = "n/a"


@cache
def reference() -> tuple[dict[str, str], ...]:
    """The published rows as they were transcribed; an empty text where nothing was published."""
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def reference_table() -> Table:
    """The published rows as people read them."""
    return Table.of((_line(row) for row in reference()), TITLE)


def _line(row: dict[str, str]) -> dict[str, str]:
    low, high = row["gigabytes_a_pod_low"], row["gigabytes_a_pod_high"]
    return {
        "model": row["model"],
        "technique": row["technique"],
        "pods": row["pods"],
        "training (s)": _number(row["train_seconds"]),
        "samples/s": row["samples_per_second"] or NOT_PUBLISHED,
        "memory of each pod (GB)": (low if low == high else f"{low}-{high}") or NOT_PUBLISHED,
        "batch": row["effective_batch_size"] or NOT_PUBLISHED,
        "what confounds it": row["confounders"],
    }


def _number(text: str) -> str:
    return f"{float(text):,.1f}" if text else NOT_PUBLISHED
