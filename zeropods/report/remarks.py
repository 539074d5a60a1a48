"""What to know about runs before reading their figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zeropods.report.entry import Entry
from zeropods.report.figures.speed import is_resumed
from zeropods.report.groups import Group, copies
from zeropods.report.memory_plot import Timeline
from zeropods.report.scaling import Scaling


def remarks(groups: Sequence[Group], scaled: Mapping[str, Scaling], timelines: Sequence[Timeline]) -> list[str]:
    """A line for each run that did not end well, or of which something could not be read; and for each ratio of
    rows that differ in more than technique and pods."""
    entries = [run.entry for group in groups for run in group.runs]
    ended = [f"{e.name}: {e.status}: {e.reason}" for e in entries if e.status != "ok" or e.reason]
    resumed = [f"{e.name}: was resumed: its times are those of its last attempt" for e in entries if _is_resumed(e)]
    faults = [f"{of_run.label}: {fault}" for of_run in timelines for fault in of_run.faults]
    return [*ended, *copies(entries), *resumed, *faults, *_allowed(scaled)]


def _is_resumed(entry: Entry) -> bool:
    return entry.record is not None and is_resumed(entry.record)


def _allowed(scaled: Mapping[str, Scaling]) -> Iterator[str]:
    for letter, scaling in scaled.items():
        if scaling.differs_in:
            yield f"* {letter} is set against {scaling.base} although they differ in {', '.join(scaling.differs_in)}"
