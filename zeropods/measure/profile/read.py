"""Read a report from a file: its own, or a log that holds one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.measure.profile.aggregated import read_depths
from zeropods.measure.profile.report import Module, Report
from zeropods.measure.profile.summary import read_summary, step_of
from zeropods.measure.profile.tree import read_tree

HEADING = re.compile(r"(?P<prefix>.*?)-+ DeepSpeed Flops Profiler -+\s*")
"""Before it what pdsh or a logger puts before every line (`pod1: `)."""
AGGREGATED = re.compile(r"-+ Aggregated Profile per GPU -+", re.IGNORECASE)
DETAILED = re.compile(r"-+ Detailed Profile per GPU -+", re.IGNORECASE)
END = re.compile(r"-{40,}")
BEFORE_FIGURES = "step (weights update latency), iter latency"
"""In the last line of the notations, behind which the summary's figures begin."""
BEFORE_TREE = "The fwd latency listed in the top module's profile"
"""In the last line before the tree; its number differs between versions."""
WHOLE = "give a report as it was written, whole"


def read_report(path: Path) -> Report:
    """The report of a file, of a run folder its `profile.txt`; the last one where the file holds several.

    A file holds several where the profiler writes to a log, or where gradients are accumulated: there the last is
    that of the pass which the optimizer's step follows.

    Raises:
        UserError: there is no report in it, it is cut off, or a line is not of a report; the first such line.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path}: not there; give a report's file or a run folder, as notebook 03_train_pods makes them"
        )
    path = path / "profile.txt" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path}: not there; train with a profiled configuration, such as dsconfig/zero1profiler.json")
    return parse_report(path, path.read_text(encoding="utf-8", errors="replace"))


def parse_report(path: Path, text: str) -> Report:
    """The last report of a text that was read from `path`."""
    lines = text.splitlines()
    headings = [(number, match) for number, line in enumerate(lines, 1) if (match := HEADING.fullmatch(line))]
    if not headings:
        raise UserError(f"{path}:1: no '--- DeepSpeed Flops Profiler ---' in {len(lines)} lines; give a profile.txt")
    number, match = headings[-1]
    section = _section(path, lines, number, match["prefix"])
    summary, found = read_summary(
        str(path), section.summary, step_of(str(path), *section.heading), section.summary_ends
    )
    return Report(
        path=path,
        number=number,
        reports=len(headings),
        text="\n".join(line for _, line in section.all),
        summary=summary,
        lines=tuple(found),
        depths=tuple(read_depths(str(path), section.aggregated)),
        root=_root(path, section),
    )


Numbered = list[tuple[int, str]]


@dataclass(frozen=True)
class _Section:
    """The lines of one report by its parts."""

    all: Numbered
    heading: tuple[int, str]
    summary: Numbered
    summary_ends: int
    aggregated: Numbered
    detailed: Numbered


def _section(path: Path, lines: list[str], start: int, prefix: str) -> _Section:
    """Cut a report into its parts; `start` is the number of its heading. Lines of others in a log are left out."""
    own = [
        (number, line.removeprefix(prefix))
        for number, line in enumerate(lines[start - 1 :], start)
        if line.startswith(prefix) or not prefix.strip()
    ]
    end = _find(path, own, END, "its closing line of dashes")
    own = own[: end + 1]
    if len(own) < 2:
        raise UserError(f"{path}:{start}: a heading and nothing more; {WHOLE}")
    figures = _after(path, own, BEFORE_FIGURES)
    aggregated = _find(path, own, AGGREGATED, "'--- Aggregated Profile per GPU ---'")
    detailed = next((index for index, (_, line) in enumerate(own) if DETAILED.fullmatch(line.strip())), None)
    return _Section(
        all=own,
        heading=own[1],
        summary=own[figures:aggregated],
        summary_ends=own[aggregated][0],
        aggregated=own[aggregated + 1 : detailed if detailed is not None else end],
        detailed=own[detailed:end] if detailed is not None else [],
    )


def _root(path: Path, section: _Section) -> Module | None:
    if not section.detailed:
        return None
    tree = section.detailed[_after(path, section.detailed, BEFORE_TREE) :]
    if not any(line.strip() for _, line in tree):
        raise UserError(f"{path}:{section.detailed[-1][0]}: no module below 'Detailed Profile'; {WHOLE}")
    return read_tree(str(path), tree)


def _find(path: Path, lines: Numbered, pattern: re.Pattern[str], what: str) -> int:
    for index, (_, line) in enumerate(lines):
        if pattern.fullmatch(line.strip()):
            return index
    raise UserError(f"{path}:{lines[-1][0]}: the report ends without {what}; {WHOLE}")


def _after(path: Path, lines: Numbered, words: str) -> int:
    """Index behind the line that holds these words."""
    for index, (_, line) in enumerate(lines):
        if words in line:
            return index + 1
    raise UserError(f"{path}:{lines[-1][0]}: no line with {words!r}; {WHOLE}")
