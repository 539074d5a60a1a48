"""Two profiler reports side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from zeropods.measure.profile.compare import compare, differences
from zeropods.report.plot import Plot
from zeropods.report.profile_plot import pair_plot
from zeropods.report.profile_words import told_apart, unit_of, written
from zeropods.report.table import Table

if TYPE_CHECKING:
    from zeropods.report.profile_report import ProfileReport


@dataclass(frozen=True)
class ReportPair:
    """Two reports side by side; itself shown as its table."""

    first: ProfileReport
    second: ProfileReport

    @property
    def differences(self) -> list[str]:
        """What keeps them from being compared."""
        return differences(self.first.checked.mended.figures, self.second.checked.mended.figures)

    def table(self) -> Table:
        """Corrected figures and their ratio; why there is none, where they measured different things."""
        figures = [report.checked.mended.figures for report in (self.first, self.second)]
        names = self._names()
        title = f"no ratios: {'; '.join(self.differences)}" if self.differences else ""
        lines = (
            {
                "corrected figure": _spelled(one.name),
                names[0]: written(one.first, unit_of(one.name)),
                names[1]: written(one.second, unit_of(one.name)),
                "ratio": "" if one.ratio is None else f"{one.ratio:.3g}",
            }
            for one in compare(*figures)
        )
        return Table.of(lines, title)

    def to_json(self, depth: int | None = None) -> dict[str, Any]:
        """The second report, what keeps the two apart, and the ratios of corrected figures."""
        figures = [report.checked.mended.figures for report in (self.first, self.second)]
        return {
            "differences": self.differences,
            "compared": [asdict(one) for one in compare(*figures)],
            "second": self.second.checked.to_json(depth),
        }

    def plot(self) -> Plot:
        """Seconds of forward, backward and step, and of each class of module."""
        reports = zip(self._names(), (self.first, self.second), strict=True)
        return pair_plot([(name, report.checked.mended) for name, report in reports])

    def _names(self) -> list[str]:
        names = told_apart([self.first.name, self.second.name])
        return names if names[0] != names[1] else ["first", "second"]

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return repr(self.table())


def _spelled(name: str) -> str:
    words = name.replace("_", " ")
    for small in ("macs", "flops", "gpu"):
        words = words.replace(small, small.upper() if small == "gpu" else small[:-1].upper() + "s")
    return words
