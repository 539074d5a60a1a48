"""A progress bar on a terminal, for what takes longer than a moment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, unit: str) -> Iterator[Callable[[int], object]]:
    """Counts on stderr; what it yields takes how many were done since the last call."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=f" {unit}", file=sys.stderr, mininterval=1.0, disable=None) as bar:
        yield bar.update
