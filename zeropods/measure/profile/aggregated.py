"""The part of a report that is aggregated by depth: the top classes of modules by parameters, MACs and latency."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from zeropods.errors import UserError
from zeropods.measure.profile.report import Depth
from zeropods.measure.profile.units import amount

OPENING = re.compile(r"Top (?:\d+ )?modules in terms of .* at different model depths:")
DEPTH = re.compile(r"depth (\d+):")
KINDS = {"params": "params", "MACs": "MACs", "fwd latency": "s"}
"""Rows of a depth in their order, and the kind of their figures."""
ROW = re.compile(r" +(params|MACs|fwd latency) +- +(\{.*\})")


def read_depths(path: str, numbered: Sequence[tuple[int, str]]) -> list[Depth]:
    """The depths of this part, from the root on.

    Args:
        path: the file, for errors.
        numbered: the lines of this part with their numbers, its heading left out.

    Raises:
        UserError: a line that is none of this part.
    """
    lines = [(number, line) for number, line in numbered if line.strip() and not OPENING.fullmatch(line.strip())]
    return [_depth(path, lines[start : start + 4]) for start in range(0, len(lines), 4)]


def _depth(path: str, lines: Sequence[tuple[int, str]]) -> Depth:
    number, line = lines[0]
    heading = DEPTH.fullmatch(line.strip())
    if heading is None:
        raise UserError(f"{path}:{number}: {line.strip()!r:.60}; expected 'depth N:'")
    if len(lines) < 4:
        raise UserError(f"{path}:{lines[-1][0]}: depth {heading[1]} ends here; give a report as it was written, whole")
    params, macs, seconds = (_row(path, row, *wanted) for row, wanted in zip(lines[1:], KINDS.items(), strict=True))
    return Depth(number=number, depth=int(heading[1]), parameters=params, macs=macs, seconds=seconds)


def _row(path: str, numbered: tuple[int, str], name: str, kind: str) -> dict[str, float]:
    number, line = numbered
    match = ROW.fullmatch(line)
    if match is None or match[1] != name:
        raise UserError(f"{path}:{number}: {line.strip()!r:.60}; expected \"{name} - {{'CLASS': 'FIGURE'}}\"")
    try:
        figures = ast.literal_eval(match[2])
    except (SyntaxError, ValueError, TypeError):
        figures = None
    if not isinstance(figures, dict):
        raise UserError(f"{path}:{number}: {match[2]!r:.60}; expected {{'CLASS': 'FIGURE'}}")
    return {str(name): amount(str(text), kind, f"{path}:{number}") for name, text in figures.items()}
