"""One thing that is wrong with a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What a report says, and what would be right."""

    name: str
    """One of docs/profiler.md."""
    line: int
    """Of the report's file, the first being 1."""
    where: str
    said: float | None
    corrected: float | None
    """None where nothing is to be corrected, or the right figure cannot be known."""
    unit: str
    reason: str
