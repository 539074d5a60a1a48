"""One progress bar, on a terminal and in a notebook; nothing elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

MOMENT_SECONDS = 1e-6


def progress(what: str, unit: str, total: int | None = None, *, at_once: bool = True) -> tqdm:
    """A bar for a `with` block; its `update` takes how many were done since the last call.

    Args:
        at_once: False shows nothing where there is nothing to do.
    """
    from tqdm import tqdm

    in_notebook = "ipykernel" in sys.modules
    return tqdm(
        desc=what,
        unit=f" {unit}",
        total=total,
        delay=0 if at_once and total != 0 else MOMENT_SECONDS,
        mininterval=0.5,
        ncols=100,
        file=sys.stderr,
        # A notebook knows no line above the last: a bar within another takes its place.
        position=0 if in_notebook else None,
        disable=not (in_notebook or sys.stderr.isatty()),
    )
