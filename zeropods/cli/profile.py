"""`zeropods profile`: a report of DeepSpeed's flops profiler as data, checked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropods.errors import UserError


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verb and its flags; `add(verbs, name, help, run)` makes it."""
    verb = add(verbs, "profile", "a DeepSpeed flops-profiler report as data, checked", run)
    verb.add_argument("file", type=Path, metavar="FILE", help="a report, a log that holds one, or a run folder")
    verb.add_argument("--depth", type=int, metavar="N", help="the tree of modules down to this depth, the root being 0")
    verb.add_argument("--top", type=int, default=8, metavar="N", help="how many classes of modules to show; 8")
    verb.add_argument("--against", type=Path, metavar="FILE2", help="a second report beside it, with ratios")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read and check the report, and the second one."""
    from zeropods.report.profile import ProfileReport

    for name, least in (("depth", 0), ("top", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}; expected at least {least}")
    report = ProfileReport.read(arguments.file)
    pair = report.against(ProfileReport.read(arguments.against)) if arguments.against is not None else None
    # People get tables made from the report itself, not from its JSON.
    arguments.readable = lambda result: report.to_text(arguments.depth, arguments.top, pair)
    against = {} if pair is None else {"against": pair.to_json(arguments.depth)}
    return report.checked.to_json(arguments.depth) | against
