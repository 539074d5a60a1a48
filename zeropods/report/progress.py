"""One progress bar, on a terminal and in a notebook; nothing elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


def progress(what: str, unit: str, total: int | None = None) -> tqdm:
    """A bar for a `with` block; its `update` takes how many were done since the last call."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(
        desc=what,
        unit=f" {unit}",
        total=total,
        mininterval=0.5,
        ncols=100,
        file=sys.stderr,
        disable=not shown,
    )
