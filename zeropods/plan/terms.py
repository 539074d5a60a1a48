"""One part of a plan's memory: how many bytes, and by which formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeropods.plan.workload import share

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "context")
"""The parts that the memory of a GPU is divided into."""
STATES = ("parameters", "gradients", "optimizer")
"""Those of them that are the model's states, wherever they lie."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Term:
    """Bytes of one process, with their formula."""

    name: str
    bytes: int
    formula: str
    """The formula with its numbers filled in: `4 B x 737.7 M / 3 ranks`."""
    part: str = "buffers"
    """One of `PARTS`."""

    @classmethod
    def of(
        cls, name: str, element_bytes: int, elements: int, ranks: int = 1, part: str = "buffers"
    ) -> Term:
        """The term of one rank's share of elements, each of so many bytes."""
        divisor = f" / {ranks} ranks" if ranks > 1 else ""
        formula = f"{element_bytes} B x {short(elements)}{divisor}"
        return cls(name, element_bytes * share(elements, ranks), formula, part)

    @classmethod
    def about(
        cls, name: str, element_bytes: float, elements: int, ranks: int = 1, part: str = "buffers"
    ) -> Term:
        """The same as `of` where the bytes of an element are no whole number: it rounds both."""
        divisor = f" / {ranks} ranks" if ranks > 1 else ""
        formula = f"{element_bytes:.4g} B x {short(elements)}{divisor}"
        return cls(name, round(element_bytes * share(elements, ranks)), formula, part)


def total(terms: Iterable[Term], part: str | None = None) -> int:
    """Bytes of all terms, or of those of one part."""
    return sum(term.bytes for term in terms if part in (None, term.part))


def short(number: float) -> str:
    """A count in a short form: `737.7 M`; without a prefix below a thousand."""
    for unit, prefix in PREFIXES:
        if number >= unit:
            return f"{number / unit:.4g} {prefix}"
    return f"{number:.4g}"
