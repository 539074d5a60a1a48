"""A profiler report for people: tables and plots of a report that was read, corrected and checked."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.measure.profile import FIGURES, Figures, Module
from zeropods.measure.profile_checks import Checked, by_class, check, shares
from zeropods.report.plots import WIDE, Plot, bars_beside, new_axes, stacked_bars
from zeropods.tables import Table, digits, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPARED = (
    "parameters_per_gpu", "forward_macs", "forward_flops", "forward_seconds", "forward_flops_per_second",
    "backward_seconds", "step_seconds", "iteration_seconds", "flops_per_second", "samples_per_second",
)  # fmt: skip
SETTING = ("world_size", "batch_size_per_gpu", "model_parallel_size")
"""What must be equal for a ratio to mean something."""


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

    def summary(self, *, with_meaning: bool = False) -> Table:
        """Each line of the summary with its value, the right one where it is wrong, and what the line means."""
        report, lines = self.checked.report, []
        for key in report.lines:
            said, right, unit = report.summary[key], self.checked.figures[key], FIGURES[key].unit
            is_same = said == right or (said and right and abs(said - right) <= 0.005 * said)
            line = {
                "line": report.lines[key][1],
                "reported": written(said, unit),
                "corrected": "" if is_same else written(right, unit) or "unknown",
            }
            lines.append({**line, "what it means": FIGURES[key].meaning} if with_meaning else line)
        return Table.of(lines, f"The report is not whole: {report.missing}." if report.missing else "")

    def shares(self) -> Plot:
        """Shares of forward, backward and the optimizer's step in one iteration."""
        figure, (axes,) = new_axes(WIDE, 1.8)
        _iteration_bars(figure, axes, {"": self}, len(PARTS))
        axes.set_title("One iteration: forward, backward, optimizer's step", loc="left")
        return Plot(figure, self.shares_text(self.name))

    def shares_text(self, name: str) -> str:
        """The same in words."""
        return f"{name}: {', '.join(f'{part} {_milliseconds(self.checked.figures, part):.4g} ms' for part in PARTS)}"

    def shares_table(self) -> Table:
        """The same in figures."""
        return Table.of(
            {
                "part of an iteration": part,
                "time (ms)": f"{_milliseconds(self.checked.figures, part):.5g}",
                "share (%)": f"{100 * share:.1f}",
            }
            for part, share in (shares(self.checked.figures) or {}).items()
        )

    def icicle(self) -> Plot:
        """Where MACs and time go: the tree of modules, as wide as their MACs, and as their latency."""
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
                "own MACs (M)": _in(1e6, share.macs),
                "MACs (%)": _percent(share.macs_percent),
                "own latency (ms)": _in(1e-3, share.latency_seconds),
                "latency (%)": _percent(share.latency_percent),
            }
            for place, share in enumerate(by_time)
            if place < top or share in by_macs[:top]
        )

    def tree(self, depth: int = 2) -> Table:
        """The modules down to a depth, corrected; of a tree that is cut off as they were printed."""
        return Table.of(
            {
                "module": path or "(root)",
                "class": module.class_name,
                "parameters (k)": _in(1e3, module.parameters),
                "MACs (M)": _in(1e6, module.macs),
                "MACs (%)": _percent(module.macs_percent),
                "latency (ms)": _in(1e-3, module.latency_seconds),
                "latency (%)": _percent(module.latency_percent),
            }
            for path, module in (self.checked.root or self.checked.report.root or self._root()).walk()
            if len(path.split(".")) * bool(path) <= depth
        )

    def depths(self) -> Table:
        """The top class of modules at each depth, as printed: what a report without its tree says of the model."""
        lines = []
        for each in self.checked.report.depths:
            tops = ((each.parameters, "parameters"), (each.macs, "MACs"), (each.seconds, "s"))
            top = [", ".join(f"{name} {written(value, unit)}" for name, value in of.items()) for of, unit in tops]
            lines.append(dict(zip(("depth", "parameters", "MACs", "latency"), (str(each.depth), *top), strict=True)))
        return Table.of(lines)

    def faults(self) -> Table:
        """What is wrong with the report, or easily misread."""
        return Table.of(
            {
                "fault": fault.name.replace("_", " "),
                "where": f"line {fault.line}: {fault.where}",
                "reported": written(fault.said, fault.unit),
                "corrected": written(fault.corrected, fault.unit),
                "why": fault.reason,
            }
            for fault in self.checked.faults
        )

    def to_text(self, depth: int | None = None, top: int = 8, pair: ReportPair | None = None) -> str:
        """What a terminal shows: the summary, shares, classes, the tree down to a depth, a comparison, faults."""
        report = self.checked.report
        tables = [self.summary(), self.shares_table()]
        tables += [self.classes(top) if self.checked.root is not None else self.depths()]
        tables += [self.tree(depth)] if depth is not None and report.root is not None else []
        tables += [pair.table()] if pair is not None else []
        faults = (
            wrapped(f"{number}. {name}, {where}: {f'{said}, right {right}' if right else said}: {why}")
            for number, (name, where, said, right, why) in enumerate(self.faults().rows, 1)
        )
        heading = f"{report.path}, line {report.number}; {self.checked.run}\n"
        return "\n".join([heading, *(str(table) for table in tables if table.rows), *faults])

    def against(self, other: ProfileReport) -> ReportPair:
        """Two reports side by side, corrected."""
        return ReportPair(self, other)

    def _root(self) -> Module:
        if self.checked.root is not None:
            return self.checked.root
        lacks = "no module tree" if self.checked.report.root is None else "its module tree is not whole"
        raise UserError(f'{self.checked.report.path}: {lacks}; profile with "detailed": true')

    def _repr_html_(self) -> str:
        return self.summary(with_meaning=True).to_html()

    def __repr__(self) -> str:
        return repr(self.summary())


@dataclass(frozen=True)
class ReportPair:
    """Two reports side by side, with ratios where they measured the same thing; itself shown as its table."""

    first: ProfileReport
    second: ProfileReport

    @property
    def differences(self) -> list[str]:
        """What keeps them from being compared: `world_size 3, 2`; empty where nothing does."""
        one, two = self.first.checked.figures, self.second.checked.figures
        return [f"{key} {one[key]}, {two[key]}" for key in SETTING if one[key] != two[key]]

    def compared(self) -> list[dict[str, Any]]:
        """Name, first, second and ratio of corrected figures; no ratio where one is missing, or the settings differ."""
        pairs = [(key, self.first.checked.figures[key], self.second.checked.figures[key]) for key in COMPARED]
        ratios = [two / one if one and two is not None and not self.differences else None for _, one, two in pairs]
        names = ("name", "first", "second", "ratio")
        return [dict(zip(names, (*pair, ratio), strict=True)) for pair, ratio in zip(pairs, ratios, strict=True)]

    def table(self) -> Table:
        """Corrected figures and their ratio; why there is none, where they measured different things."""
        first, second = self._names()
        lines = (
            {
                "corrected figure": line["name"].replace("_", " ").replace(" seconds", " time"),
                first: written(line["first"], FIGURES[line["name"]].unit),
                second: written(line["second"], FIGURES[line["name"]].unit),
                "ratio": "" if line["ratio"] is None else f"{line['ratio']:.3g}",
            }
            for line in self.compared()
        )
        return Table.of(lines, f"no ratios: {'; '.join(self.differences)}" if self.differences else "")

    def to_json(self, depth: int | None = None) -> dict[str, Any]:
        """The second report, what keeps the two apart, and the ratios of corrected figures."""
        second = self.second.checked.to_json(depth)
        return {"differences": self.differences, "compared": self.compared(), "second": second}

    def plot(self) -> Plot:
        """Seconds of forward, backward and step, and the forward seconds that each class of module takes itself."""
        reports = dict(zip(self._names(), (self.first, self.second), strict=True))
        pair = {textwrap.fill(name, NAME_LETTERS): report for name, report in reports.items()}
        figure, (top, bottom) = new_axes(WIDE, 5.4, rows=2)
        _iteration_bars(figure, top, pair, 1)
        top.set_title("One iteration", loc="left")
        _class_bars(bottom, pair)
        bottom.set_title("Forward pass by class of module", loc="left")
        figure.legend(handles=bottom.containers, loc="outside lower right", ncols=2, frameon=False, fontsize=9)
        return Plot(figure, "; ".join(report.shares_text(name) for name, report in reports.items()))

    def _names(self) -> tuple[str, str]:
        names = self.first.name, self.second.name
        return names if names[0] != names[1] else ("first", "second")

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return repr(self.table())


# How figures are written for people.

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
PREFIXED = ("s", "FLOP/s", "FLOPs", "MACs", "parameters")


def written(value: float | None, unit: str) -> str:
    """A figure for people: `602.3 MMACs`, `55.98 ms`, `3`; empty where there is none."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value)
    factor, prefix = 1.0, ""
    if unit in PREFIXED:
        factor, prefix = next((each for each in PREFIXES if abs(value) >= each[0]), (1.0, ""))
    # A word is not written together with a prefix.
    shown = f"{prefix} {unit}".strip() if unit == "parameters" else prefix + unit
    return f"{value / factor:.5g} {shown}".rstrip()


def _in(unit: float, value: float | None) -> str:
    """A figure of a column whose heading names the unit."""
    return "" if value is None else digits(value / unit)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


# Bars: shares of an iteration, classes of modules.

PARTS = ("forward", "backward", "step")
INCHES_WIDE = 10.0
CLASSES_COMPARED = 6
NAME_LETTERS = 22
"""Of a line of a report's name."""
LABELLED = 0.1
"""Share of a plot's width from which on a part carries its label."""


def _milliseconds(figures: Figures, part: str) -> float:
    return 1e3 * (figures[f"{part}_seconds"] or 0.0)


def _iteration_bars(figure: Figure, axes: Axes, reports: dict[str, ProfileReport], columns: int) -> None:
    """Forward, backward and step of each report as one bar in milliseconds, with their shares of that report."""
    times = {part: [_milliseconds(each.checked.figures, part) for each in reports.values()] for part in PARTS}
    wholes = [sum(each) for each in zip(*times.values(), strict=True)]
    for bars, widths in zip(stacked_bars(axes, list(reports), times), times.values(), strict=True):
        labels = [
            f"{100 * width / whole:.0f} %" if width > LABELLED * max(wholes) else ""
            for width, whole in zip(widths, wholes, strict=True)
        ]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
    axes.set_xlabel("ms")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns, frameon=False, fontsize=9)


def _class_bars(axes: Axes, pair: dict[str, ProfileReport]) -> None:
    """The classes that take most time in both reports together."""
    roots = {name: report.checked.root for name, report in pair.items()}
    times = {
        name: {share.class_name: share.latency_seconds for share in by_class(root)} if root else {}
        for name, root in roots.items()
    }
    together = {name: sum(each.get(name, 0.0) for each in times.values()) for name in set().union(*times.values())}
    names = sorted(together, key=lambda name: (-together[name], name))[:CLASSES_COMPARED]
    series = {label: [each.get(name) for name in names] for label, each in times.items()}
    # The first three colours are those of the iteration's parts above it.
    bars_beside(axes, names, series, 1e-3, first_color=3)
    axes.set_xlabel("ms, without the modules inside")


# The tree of modules as rectangles: each as wide as its share of the MACs, or of the latency, its parts below it.

OTHER, FAINT = "0.8", 0.65
"""The colour of all other classes, and how much of a colour is seen behind black letters."""
COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")
"""Of the widest classes; C7 is grey too."""
LETTER_INCHES = 0.075
"""Width of a letter of a label."""
TITLES = {"macs": "MACs of the forward pass", "latency_seconds": "Latency of the forward pass"}
NARROWEST = 0.001
"""Share of the whole below which nothing is drawn."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle; the whole is 1 wide."""

    label: str
    class_name: str
    depth: int
    left: float
    width: float


def boxes(module: Module, figure: str, whole: float, label: str = "", depth: int = 0, left: float = 0) -> Iterator[Box]:
    """The rectangles of a tree by `macs` or `latency_seconds`, a parent before its parts.

    A list of modules is left out: its modules stand below what holds it, as `block.0`. What a module has beyond its
    parts stays empty at its right.
    """
    width = module.total(figure) / whole if whole else 0.0
    if width < NARROWEST:
        return
    yield Box(label=label or module.class_name, class_name=module.class_name, depth=depth, left=left, width=width)
    for name, child in _parts(module):
        yield from boxes(child, figure, whole, name, depth + 1, left)
        left += child.total(figure) / whole


def _parts(module: Module) -> Iterator[tuple[str, Module]]:
    for child in module.children:
        if child.class_name in ("ModuleList", "ModuleDict"):
            yield from ((f"{child.name}.{name}", below) for name, below in _parts(child))
        else:
            yield child.name, child


def icicle_plot(root: Module) -> Plot:
    """The tree twice: a module is as wide as its share of the MACs, and of the latency."""
    from matplotlib.patches import Patch

    figure, panels = new_axes(INCHES_WIDE, 7.0, rows=2)
    figure.set_layout_engine("constrained", hspace=0.06)
    made = {key: list(boxes(root, key, root.total(key))) for key in TITLES}
    widths: dict[str, float] = {}
    for box in chain(*made.values()):
        widths[box.class_name] = widths.get(box.class_name, 0.0) + box.width
    colours = dict(zip(sorted(widths, key=lambda name: widths[name], reverse=True), COLOURS, strict=False))
    said = []
    for axes, (key, drawn_boxes) in zip(panels, made.items(), strict=True):
        for box in drawn_boxes:
            colour = colours.get(box.class_name, OTHER)
            axes.barh(
                [-box.depth], [box.width], left=box.left, height=0.96, color=colour, alpha=FAINT, edgecolor="white"
            )
            # The longest label that fits into the box: name and share, the name, nothing.
            room = box.width * INCHES_WIDE / LETTER_INCHES - 1
            texts = (f"{box.label}  {100 * box.width:.0f} %", box.label, "")
            text = next(text for text in texts if len(text) <= room or not text)
            middle = (box.left + box.width / 2, -box.depth)
            axes.text(*middle, text, ha="center", va="center", fontsize=8, in_layout=False)
        axes.set(xlim=(0, 1), xticks=[], yticks=[])
        axes.margins(y=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{TITLES[key]}: a module is as wide as its share, with its parts below it", loc="left")
        shown = ", ".join(f"{box.label} {100 * box.width:.0f} %" for box in drawn_boxes if box.depth == 1)
        said.append(f"{'MACs' if key == 'macs' else 'latency'}: {shown}")
    patches = [Patch(color=colour, label=name, alpha=FAINT) for name, colour in {**colours, "others": OTHER}.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return Plot(figure, f"tree of modules; {'; '.join(said)}")
