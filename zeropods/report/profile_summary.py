"""The summary of a profiler report as a table: what it said, what is right, what it means."""

from __future__ import annotations

from collections.abc import Iterator

from zeropods.measure.profile.checked import Checked
from zeropods.report.profile_words import MEANING, is_same, scaled, unit_of, written
from zeropods.report.table import Table


def said_and_corrected(checked: Checked) -> Table:
    """Each line as it was said and as it is right, in one unit; nothing where it was right."""
    return Table.of(_beside(checked, key, label) for key, label in _lines(checked))


def explained(checked: Checked) -> Table:
    """Each line with its value, what it means, and the right value where it is wrong."""
    said, right = vars(checked.report.summary), checked.mended.figures
    return Table.of(
        {
            "line": label,
            "value": written(said[key], unit_of(key)),
            "what it means": MEANING[key],
            "corrected": "" if is_same(said[key], right[key]) else written(right[key], unit_of(key)) or "unknown",
        }
        for key, label in _lines(checked)
    )


def _beside(checked: Checked, key: str, label: str) -> dict[str, str]:
    said, right = vars(checked.report.summary)[key], checked.mended.figures[key]
    figure, unit = scaled(said, said if right is None else right, unit_of(key))
    corrected = scaled(right, right, unit_of(key))[0] or "unknown"
    return {"figure": label, "said": figure, "corrected": "" if is_same(said, right) else corrected, "unit": unit}


def _lines(checked: Checked) -> Iterator[tuple[str, str]]:
    """(key, label) of each line, the heading first."""
    yield "step", "Profile Summary at step"
    for line in checked.report.lines:
        yield line.keys[0], line.label.split(" = ")[0]
