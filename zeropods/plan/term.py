"""One part of a plan's memory: how many bytes, and from what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "context")
"""What the memory of a GPU is divided into."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Term:
    """Bytes of one process, with their formula."""

    name: str
    bytes: int
    formula: str
    """With the numbers put in: `4 B x 737.7 M / 3 ranks`."""
    part: str = "buffers"
    """One of `PARTS`."""


def total(terms: Iterable[Term], part: str | None = None) -> int:
    """Bytes of all terms, or of those of one part."""
    return sum(term.bytes for term in terms if part in (None, term.part))


def elements(size: int, number: float, ranks: int = 1) -> str:
    """The formula of `number` elements of `size` bytes, of which each of some ranks has its share."""
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    return f"{size} B x {short(number)}{shared}"


def share(number: int, ranks: int) -> int:
    """Elements of one rank where some share them; the last partition is padded to the size of the others."""
    return -(-number // ranks)


def short(number: float) -> str:
    """A count as people read it: `737.7 M`."""
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g}"
