"""`zeropods profile`: a report of DeepSpeed's flops profiler as data, checked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError

if TYPE_CHECKING:
    from zeropods.report.profile import ProfileReport, ReportPair

Result = dict[str, Any]


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verb and its flags; `add(verbs, name, help, run)` makes it."""
    verb = add(verbs, "profile", "a DeepSpeed flops-profiler report as data, checked", run)
    verb.add_argument("file", type=Path, metavar="FILE", help="a report, a log that holds one, or a run folder")
    verb.add_argument("--depth", type=int, metavar="N", help="the tree of modules down to this depth, the root being 0")
    verb.add_argument("--top", type=int, default=8, metavar="N", help="how many classes of modules to show; 8")
    verb.add_argument("--against", type=Path, metavar="FILE2", help="a second report beside it, with ratios")


def run(arguments: argparse.Namespace) -> Result:
    """Read and check the report, and the second one."""
    from zeropods.report.profile import ProfileReport

    for name, least in (("depth", 0), ("top", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}; expected at least {least}")
    report = ProfileReport.read(arguments.file)
    pair = report.against(ProfileReport.read(arguments.against)) if arguments.against is not None else None
    # People get tables made from the report itself, not from its JSON.
    arguments.readable = lambda result: _text(report, pair, arguments.depth, arguments.top)
    against = {} if pair is None else {"against": pair.to_json(arguments.depth)}
    return report.checked.to_json(arguments.depth) | against


def _text(report: ProfileReport, pair: ReportPair | None, depth: int | None, top: int) -> str:
    """Tables: summary, shares, classes of modules, the tree if asked for, faults, the comparison."""
    checked = report.checked
    tables = [report.summary(), report.shares_table()]
    if checked.mended.root is not None:
        tables.append(report.classes(top))
        tables.extend([report.tree(depth)] if depth is not None else [])
    tables.extend([pair.table()] if pair is not None else [])
    heading = f"{checked.report.path}, line {checked.report.number}; {checked.run}\n"
    return "\n".join([heading, *(table.to_markdown() for table in tables if table.rows), *report.fault_lines()])
