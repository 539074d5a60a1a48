"""A profiler report for people: tables and plots of a report that was read, mended and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.measure.profile.checked import Checked, check
from zeropods.measure.profile.classes import by_class
from zeropods.measure.profile.derived import shares
from zeropods.measure.profile.report import Module
from zeropods.report.icicle_plot import icicle_plot
from zeropods.report.plot import Plot
from zeropods.report.profile_pair import ReportPair
from zeropods.report.profile_plot import shares_plot
from zeropods.report.profile_summary import explained, said_and_corrected
from zeropods.report.profile_words import written
from zeropods.report.table import Table


@dataclass(frozen=True)
class ProfileReport:
    """A report in a notebook; itself shown as its summary."""

    checked: Checked
    name: str
    """By which tables and plots call it."""

    @classmethod
    def read(cls, path: Path) -> ProfileReport:
        """The report of a file or a run folder; `UserError` where there is none."""
        checked = check(Path(path))
        file = checked.report.path
        return cls(checked, file.resolve().parent.name if file.name == "profile.txt" else file.name)

    @property
    def text(self) -> str:
        """The report as DeepSpeed has written it."""
        return self.checked.report.text

    def summary(self) -> Table:
        """Each line of the summary as it was said, and right; nothing where it was right."""
        return said_and_corrected(self.checked)

    def line_by_line(self) -> Table:
        """Each line of the summary with its value, what it means, and the right value where it is wrong."""
        return explained(self.checked)

    def shares(self) -> Plot:
        """Shares of forward, backward and the optimizer's step in one iteration."""
        return shares_plot([(self.name, self.checked.mended.figures)])

    def shares_table(self) -> Table:
        """The same in figures."""
        figures = self.checked.mended.figures
        found = shares(figures) or {}
        return Table.of(
            {
                "part of an iteration": name,
                "seconds": written(figures[f"{name}_seconds"], "s"),
                "share": f"{100 * share:.1f} %",
            }
            for name, share in found.items()
        )

    def icicle(self) -> Plot:
        """The tree of modules, as wide as their MACs, and as their latency."""
        return icicle_plot(self._root())

    def classes(self, top: int = 8) -> Table:
        """Where MACs and time go: classes of modules by what they do themselves, without the modules inside them.

        Those with the most MACs and those with the most time, `top` of each; most time first.
        """
        by_macs = by_class(self._root())
        by_time = sorted(by_macs, key=lambda share: share.latency_seconds, reverse=True)
        return Table.of(
            {
                "class": share.class_name,
                "modules": share.modules,
                "own MACs": written(share.macs, "MACs"),
                "% MACs": _percent(share.macs_percent),
                "own latency": written(share.latency_seconds, "s"),
                "% latency": _percent(share.latency_percent),
            }
            for place, share in enumerate(by_time)
            if place < top or share in by_macs[:top]
        )

    def tree(self, depth: int = 2) -> Table:
        """The modules down to a depth, corrected."""
        rows = ((path, module) for path, module in self._root().walk() if _depth(path) <= depth)
        return Table.of(
            {
                "module": path or "(root)",
                "class": module.class_name,
                "parameters": written(module.parameters, "parameters").removesuffix(" parameters"),
                "MACs": written(module.macs, "MACs"),
                "% MACs": _percent(module.macs_percent),
                "latency": written(module.latency_seconds, "s"),
                "% latency": _percent(module.latency_percent),
            }
            for path, module in rows
        )

    def faults(self) -> Table:
        """What is wrong with the report, or easily misread."""
        return Table.of(
            {
                "fault": fault.name.replace("_", " "),
                "where": f"line {fault.line}: {fault.where}",
                "said": written(fault.said, fault.unit),
                "corrected": written(fault.corrected, fault.unit),
                "why": fault.reason,
            }
            for fault in self.checked.faults
        )

    def fault_lines(self) -> list[str]:
        """The same, a line each."""
        return [
            f"{number}. {name}, {where}: {f'{said}, right {right}' if right else said}: {why}"
            for number, (name, where, said, right, why) in enumerate(self.faults().rows, 1)
        ]

    def against(self, other: ProfileReport) -> ReportPair:
        """Two reports side by side, corrected."""
        return ReportPair(self, other)

    def _root(self) -> Module:
        if self.checked.mended.root is None:
            raise UserError(f'{self.checked.report.path}: no module tree; profile with "detailed": true')
        return self.checked.mended.root

    def _repr_html_(self) -> str:
        return self.line_by_line().to_html()

    def __repr__(self) -> str:
        return repr(self.summary())


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0
