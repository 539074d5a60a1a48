"""Numbers as DeepSpeed's profiler prints them: `602.28 MMACs`, `1.05 M`, `200.99 us`."""

from __future__ import annotations

import re
from decimal import Decimal
from math import isfinite

from zeropods.errors import UserError

LARGE = {"T": 12, "G": 9, "M": 6, "K": 3, "": 0}
SMALL = {"m": -3, "u": -6}
UNITS: dict[str, dict[str, int]] = {
    # Billions of parameters are B, never G. Before 0.10: a small k, and MACs of the summary with their prefix alone.
    "params": {"T": 12, "B": 9, "M": 6, "K": 3, "k": 3, "": 0},
    "MACs": {f"{prefix}MACs": power for prefix, power in LARGE.items()} | {"T": 12, "G": 9, "M": 6, "K": 3},
    "flops": LARGE,
    "FLOPS": {f"{prefix}FLOPS": power for prefix, power in (LARGE | SMALL).items()},
    "s": {f"{prefix}s": power for prefix, power in (LARGE | SMALL).items()},
    "": {"": 0},
    "%": {"%": 0},
}
"""Units of each kind of figure as powers of ten (`number_to_string` of deepspeed 0.19.8's profiler.py)."""
HALF_OF_THE_LAST_DECIMAL = 0.005
"""Figures are printed with two."""
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(\S*)", re.IGNORECASE)


def amount(text: str, kind: str, place: str) -> float:
    """The number in MACs, parameters, FLOPs, FLOP/s, seconds or percent.

    Args:
        text: such as `602.28 MMACs`.
        kind: one of `UNITS`.
        place: `PATH:LINE`, for the error.

    Raises:
        UserError: no number, or a unit that this kind of figure has not.
    """
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{place}: {text.strip()!r}; expected a number and its unit: {_units(kind)}")
    power = UNITS[kind].get(match[2])
    if power is None:
        raise UserError(f"{place}: {text.strip()!r}: unknown unit {match[2]!r}; expected {_units(kind)}")
    value = float(Decimal(match[1]).scaleb(power))
    if not isfinite(value):
        raise UserError(f"{place}: {text.strip()!r}; expected a number that a computer can hold")
    return value


def rounding(value: float | None) -> float:
    """How far a figure may be from the counted one: half of its last decimal, in the unit that it was printed with."""
    if not value:
        return 0.0
    unit = next((10.0**power for power in (12, 9, 6, 3, 0, -3) if value >= 10.0**power), 1e-6)
    return HALF_OF_THE_LAST_DECIMAL * unit


def whole(text: str, place: str) -> int:
    """A count; `UserError` where it is none."""
    if not text.strip().isascii() or not text.strip().isdigit():
        raise UserError(f"{place}: {text.strip()!r}; expected a whole number")
    return int(text)


def _units(kind: str) -> str:
    named = [unit or "none" for unit in UNITS[kind]]
    return " | ".join(named)
