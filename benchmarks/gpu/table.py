"""Tables in Markdown, and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def number(value: float | None) -> str:
    """Three digits, whole from 1,000 on; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 or isinstance(value, int) else f"{value:.3g}"


def table(heads: Sequence[str], lines: Iterable[Iterable[str]]) -> Iterable[str]:
    """Lines of a table whose columns are aligned."""
    rows = [tuple(line) for line in lines]
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]
    for line in (heads, ["-" * width for width in widths], *rows):
        yield "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"
