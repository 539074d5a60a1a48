"""Connections of which nobody knows yet whose they are, and how many of them a listener bears."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Unproven:
    """Those who connected and have proven nothing yet, at most `limit`.

    One more costs the oldest its place, not itself: an honest peer needs a place for milliseconds only,
    so that those who sit there silently keep nobody out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._writers: dict[asyncio.StreamWriter, None] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._writers)

    @contextmanager
    def place(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """A place for the time of the proof; it may be cut meanwhile, which its reader finds."""
        while len(self._writers) >= self._limit:
            oldest = next(iter(self._writers))
            del self._writers[oldest]
            oldest.transport.abort()
        self._writers[writer] = None
        try:
            yield
        finally:
            self._writers.pop(writer, None)
