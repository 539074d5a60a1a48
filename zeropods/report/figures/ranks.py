"""What all ranks of a record have measured: a figure of a run needs each of them."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
"""A record as `measure.records.read_record` gives it."""


def of_ranks(record: Record, key: str) -> list[Any] | None:
    """A field of each rank, in their order; None unless every rank of the run has measured it."""
    ranks = record["ranks"]
    values = [rank[key] for rank in ranks if rank[key] is not None]
    return values if len(values) == len(ranks) == record["world_size"] else None


def largest(record: Record, key: str) -> Any:
    """The largest of a field over all ranks, or None."""
    values = of_ranks(record, key)
    return None if values is None else max(values)


def longest(record: Record, key: str) -> float | None:
    """The largest sum, over ranks, of a list of seconds, or None where some rank has an empty one."""
    values = of_ranks(record, key)
    return max(map(sum, values)) if values and all(values) else None
