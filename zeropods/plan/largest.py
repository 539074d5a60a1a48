"""The largest batch that still fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number for which `fits` holds, by bisection; None where not even 1 does.

    `fits` must hold for every number below one for which it holds, and not for all.
    """
    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
