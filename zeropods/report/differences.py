"""What rows differ in besides technique and pods, so that nobody compares what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from zeropods.report.groups import Group
from zeropods.report.settings import is_optional

NOT_RECORDED = "not recorded"
SHOWN_VALUES = 5
"""Of one setting; the rest is counted."""
SHOWN_LETTERS = 60
"""Of one value."""


def differences(groups: Sequence[Group]) -> list[str]:
    """A line for each setting in which rows of one task differ: `what: value (rows); value (rows)`.

    The task itself comes first: rows of two tasks have little else in common, and are never compared. Rows are named
    by their letters; `B-E` are all rows from B to E. Runs of which nothing is known are left out.
    """
    known = [(number, group) for number, group in enumerate(groups) if group.settings]
    by_task: dict[str, list[tuple[int, Group]]] = {}
    for number, group in known:
        by_task.setdefault(group.task, []).append((number, group))
    lines = []
    if len(by_task) > 1:
        tasks = {task: [number for number, _ in of_task] for task, of_task in by_task.items()}
        lines.append(f"task: {_listed(tasks, groups)}: of each another kind of sample, never compared")
    for of_task in by_task.values():
        lines += _within_one_task(of_task, groups)
    return lines


def _within_one_task(known: Sequence[tuple[int, Group]], groups: Sequence[Group]) -> Iterator[str]:
    for name in dict.fromkeys(name for _, group in known for name in group.settings):
        values: dict[str, list[int]] = {}
        for number, group in known:
            if name in group.settings or not is_optional(name):
                values.setdefault(_text(group.settings.get(name, NOT_RECORDED)), []).append(number)
        if len(values) > 1:
            yield f"{name}: {_listed(values, groups)}"


def spans(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each unbroken run of rising numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _listed(values: dict[str, list[int]], groups: Sequence[Group]) -> str:
    shown = [f"{value} ({row_letters(numbers, groups)})" for value, numbers in list(values.items())[:SHOWN_VALUES]]
    more = len(values) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])


def row_letters(numbers: Sequence[int], groups: Sequence[Group]) -> str:
    """Rows by their letters, `A, C-F`."""
    return ", ".join(_span(groups[first].letter, groups[last].letter, last - first) for first, last in spans(numbers))


def _span(first: str, last: str, length: int) -> str:
    if length == 0:
        return first
    return f"{first}-{last}" if length > 1 else f"{first}, {last}"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"
