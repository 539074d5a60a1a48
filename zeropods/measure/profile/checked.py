"""A report that was read, mended and checked: what the command line and the notebooks show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.profile.classes import by_class
from zeropods.measure.profile.closed_form import closed_form
from zeropods.measure.profile.derived import shares
from zeropods.measure.profile.fault import Fault
from zeropods.measure.profile.faults import faults
from zeropods.measure.profile.mend import Mended, mended
from zeropods.measure.profile.read import read_report
from zeropods.measure.profile.report import Module, Report
from zeropods.measure.records import read_record


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A report and what is wrong with it."""

    report: Report
    mended: Mended
    faults: tuple[Fault, ...]
    run: str
    """Whether it was compared with its run, in words."""

    def to_json(self, depth: int | None = None) -> dict[str, Any]:
        """Everything as plain numbers; the tree down to a depth, all of it if None."""
        root, rows = self.mended.root, self.report.summary.batch_size_per_gpu
        form = closed_form(root, rows) if root is not None and rows else None
        return {
            "file": str(self.report.path),
            "line": self.report.number,
            "reports": self.report.reports,
            "run": self.run,
            "summary": asdict(self.report.summary),
            "corrected": self.mended.figures,
            "shares": shares(self.mended.figures),
            "closed_form_macs": None if form is None else form.macs,
            "faults": [asdict(fault) for fault in self.faults],
            "aggregated": [asdict(each) for each in self.report.depths],
            "classes": [asdict(each) for each in by_class(root)] if root is not None else [],
            "tree": _cut(self.report.root, depth),
            "corrected_tree": _cut(root, depth),
        }


def check(path: Path) -> Checked:
    """Read a report and check it; against its run too, where the run's record lies beside it.

    Args:
        path: the report, or a run folder.

    Raises:
        UserError: there is no report, or not a whole one.
    """
    report = read_report(path)
    record, run = _record(report.path.parent)
    right = mended(report)
    return Checked(report=report, mended=right, faults=tuple(faults(report, right, record)), run=run)


def _record(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The record beside the report; a report can be read without it."""
    if not (folder / "record.json").is_file():
        return None, "not compared with its run: no record.json beside the report"
    try:
        return read_record(folder), "compared with record.json beside it"
    except UserError as error:
        return None, f"not compared with its run: {error}"


def _cut(module: Module | None, depth: int | None) -> dict[str, Any] | None:
    """A tree as dictionaries, down to a depth."""
    if module is None:
        return None
    values = {name: value for name, value in vars(module).items() if name != "children"}
    below = () if depth == 0 else module.children
    return {**values, "children": [_cut(child, None if depth is None else depth - 1) for child in below]}
