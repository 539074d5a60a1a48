"""Tables and plots that show people a profiler report, after it was read, corrected and checked."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zeropods.errors import UserError
from zeropods.measure.profile import FIGURES, Module
from zeropods.measure.profile_checks import Checked, ClassShare, by_class, check, shares
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
"""Figures that must be equal in two reports for their ratios to mean something."""
PARTS = ("forward", "backward", "step")
TOPS = (("parameters", "parameters", "parameters"), ("MACs", "macs", "MACs"), ("latency", "seconds", "s"))
"""Heading, figure and unit of each list of top classes at a depth."""


@dataclass(frozen=True)
class ProfileReport:
    """A report in a notebook, shown as its summary."""

    checked: Checked
    name: str
    """Name of the report in tables and plots."""

    @classmethod
    def read(cls, path: Path) -> ProfileReport:
        """The report of a file or a run folder; `UserError` where there is none."""
        checked = check(Path(path))
        file = checked.report.path
        return cls(checked, file.resolve().parent.name if file.name == "profile.txt" else file.name)

    @property
    def text(self) -> str:
        """The report as DeepSpeed wrote it."""
        return self.checked.report.text

    @property
    def milliseconds(self) -> dict[str, float]:
        """Corrected time of each part of an iteration in milliseconds; 0 where it is not known."""
        return {part: 1e3 * (self.checked.figures[f"{part}_seconds"] or 0.0) for part in PARTS}

    def summary(self, *, with_meaning: bool = False) -> Table:
        """Each line of the summary with its value, the corrected value where it is wrong, and what the line means."""
        report, lines = self.checked.report, []
        for key, (_, label) in report.lines.items():
            said, right, unit = report.summary[key], self.checked.figures[key], FIGURES[key].unit
            is_same = said == right or (said and right and abs(said - right) <= 0.005 * said)
            is_impossible = key in report.impossible
            corrected = "" if is_same and not is_impossible else written(right, unit) or "unknown"
            reported = report.impossible[key] if is_impossible else written(said, unit)
            line = {"line": label, "reported": reported, "corrected": corrected}
            lines.append({**line, "what it means": FIGURES[key].meaning} if with_meaning else line)
        return Table.of(lines, f"The report is incomplete: {report.missing}." if report.missing else "")

    def shares(self) -> Plot:
        """Shares of forward, backward and the optimizer's step in one iteration."""
        figure, (axes,) = new_axes(WIDE, 1.8)
        _iteration_bars(figure, axes, {"": self}, len(PARTS))
        axes.set_title("One iteration: forward, backward, optimizer's step", loc="left")
        return Plot(figure, _times_said(self.name, self))

    def icicle(self) -> Plot:
        """Where MACs and time go: the tree of modules, once as wide as their MACs and once as their latency."""
        return icicle_plot(self._root())

    def classes(self, top: int = 8) -> Table:
        """Where MACs and time go: classes of modules by what they do themselves, without the modules inside them.

        The table has the `top` classes by MACs and the `top` classes by time; the most time comes first.
        """
        by_macs = by_class(self._root())
        by_time = sorted(by_macs, key=lambda share: share.latency_seconds, reverse=True)
        return Table.of(
            {"class": share.class_name, "modules": share.modules, **_cells(share, "own ")}
            for place, share in enumerate(by_time)
            if place < top or share in by_macs[:top]
        )

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
        """What a terminal shows: the summary, shares, classes, the tree down to a depth, a comparison, faults.

        Where the tree is not whole, the top classes of each depth, as printed, replace the table of classes, and the
        tree is shown as far as it was printed.
        """
        report, times = self.checked.report, self.milliseconds
        parts = (
            {"part of an iteration": part, "time (ms)": f"{times[part]:.5g}", "share (%)": f"{100 * share:.1f}"}
            for part, share in (shares(self.checked.figures) or {}).items()
        )
        depths = (
            {"depth": each.depth}
            | {
                heading: ", ".join(f"{name} {written(top, unit)}" for name, top in getattr(each, key).items())
                for heading, key, unit in TOPS
            }
            for each in report.depths
        )
        tables = [self.summary(), Table.of(parts)]
        tables.append(self.classes(top) if self.checked.root is not None else Table.of(depths))
        tree = self.checked.root or report.root
        if depth is not None and tree is not None:
            tables.append(
                Table.of(
                    {"module": path or "(root)", "class": module.class_name, **_cells(module)}
                    for path, module in tree.walk()
                    if len(path.split(".")) * bool(path) <= depth
                )
            )
        tables += [pair.table()] if pair is not None else []
        faults = []
        for number, (name, where, said, right, why) in enumerate(self.faults().rows, 1):
            figures = [text for text in (said, right and f"should be {right}") if text]
            place = f"{number}. {name}, {where}"
            faults.append(wrapped(": ".join(part for part in (place, ", ".join(figures), why) if part)))
        heading = f"{report.path}, line {report.number}; {self.checked.run}\n"
        return "\n".join([heading, *(str(table) for table in tables if table.rows), *faults])

    def against(self, other: ProfileReport) -> ReportPair:
        """Two reports side by side, corrected."""
        return ReportPair(self, other)

    def _root(self) -> Module:
        if self.checked.root is not None:
            return self.checked.root
        lacks = "no module tree" if self.checked.report.root is None else "its module tree is incomplete"
        raise UserError(f'{self.checked.report.path}: {lacks}; profile with "detailed": true')

    def _repr_html_(self) -> str:
        return self.summary(with_meaning=True).to_html()

    def __repr__(self) -> str:
        return repr(self.summary())


@dataclass(frozen=True)
class ReportPair:
    """Two reports side by side, with ratios where they measured the same thing, shown as their table."""

    first: ProfileReport
    second: ProfileReport

    @property
    def named(self) -> dict[str, ProfileReport]:
        """Both reports by name; `first` and `second` where the names are equal."""
        names = (self.first.name, self.second.name) if self.first.name != self.second.name else ("first", "second")
        return dict(zip(names, (self.first, self.second), strict=True))

    def to_json(self, depth: int | None = None) -> dict[str, Any]:
        """The second report; what keeps the two from being compared, such as `world_size 3, 2`; and of each corrected
        figure the name, both values and their ratio, which is None where one is missing or the settings differ."""
        one, two = self.first.checked.figures, self.second.checked.figures
        differences = [f"{key} {one[key]}, {two[key]}" for key in SETTING if one[key] != two[key]]
        passes = [report.checked.passes for report in (self.first, self.second)]
        if passes[0] != passes[1] or None in passes:
            known = ["unknown" if number is None else str(number) for number in passes]
            differences.append(f"passes of a step {', '.join(known)}")
        compared = []
        for key in COMPARED:
            first, second = one[key], two[key]
            ratio = second / first if first and second is not None and not differences else None
            compared.append({"name": key, "first": first, "second": second, "ratio": ratio})
        return {"differences": differences, "compared": compared, "second": self.second.checked.to_json(depth)}

    def table(self) -> Table:
        """Corrected figures and ratios; if the reports measured different things, the title says why there are none."""
        found, (first, second) = self.to_json(0), self.named
        lines = (
            {
                "corrected figure": line["name"].replace("_", " ").replace(" seconds", " time"),
                first: written(line["first"], FIGURES[line["name"]].unit),
                second: written(line["second"], FIGURES[line["name"]].unit),
                "ratio": "" if line["ratio"] is None else f"{line['ratio']:.3g}",
            }
            for line in found["compared"]
        )
        return Table.of(lines, f"no ratios: {'; '.join(found['differences'])}" if found["differences"] else "")

    def plot(self) -> Plot:
        """Times of forward, backward and step, and the forward time that each class of module takes itself."""
        pair = {textwrap.fill(name, NAME_LETTERS): report for name, report in self.named.items()}
        figure, (top, bottom) = new_axes(WIDE, 5.4, rows=2)
        _iteration_bars(figure, top, pair, 1)
        top.set_title("One iteration", loc="left")
        times = {
            name: {share.class_name: share.latency_seconds for share in by_class(root)} if root else {}
            for name, root in ((name, report.checked.root) for name, report in pair.items())
        }
        # The classes that take the most time in both reports together.
        together = {name: sum(each.get(name, 0.0) for each in times.values()) for name in set().union(*times.values())}
        names = sorted(together, key=lambda name: (-together[name], name))[:CLASSES_COMPARED]
        # The first three colours are those of the iteration's parts above it.
        series = {label: [each.get(name) for name in names] for label, each in times.items()}
        bars_beside(bottom, names, series, 1e-3, first_color=3)
        bottom.set_xlabel("ms, without the modules inside")
        bottom.set_title("Forward pass by class of module", loc="left")
        figure.legend(handles=bottom.containers, loc="outside lower right", ncols=2, frameon=False, fontsize=9)
        return Plot(figure, "; ".join(_times_said(*each) for each in self.named.items()))

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return repr(self.table())


# How figures are written for people to read.

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
PREFIXED = ("s", "FLOP/s", "FLOPs", "MACs", "parameters")


def written(value: float | None, unit: str) -> str:
    """A figure for people: `602.3 MMACs`, `55.98 ms`, `3`; empty where there is none."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value)
    factor, prefix = 1.0, ""
    if unit in PREFIXED:
        factor, prefix = next((each for each in PREFIXES if abs(value) >= each[0]), (1.0, ""))
    # A unit that is a word is written apart from its prefix.
    shown = f"{prefix} {unit}".strip() if unit == "parameters" else prefix + unit
    return f"{value / factor:.5g} {shown}".rstrip()


def _cells(of: Module | ClassShare, own: str = "") -> dict[str, str]:
    """Cells by heading for a module, or for what a class does itself: those of the figures that it has."""
    columns = (
        ("parameters (k)", "parameters", 1e3),
        (f"{own}MACs (M)", "macs", 1e6),
        ("MACs (%)", "macs_percent", None),
        (f"{own}latency (ms)", "latency_seconds", 1e-3),
        ("latency (%)", "latency_percent", None),
    )
    cells = {}
    for heading, key, unit in columns:
        if hasattr(of, key):
            value = getattr(of, key)
            cells[heading] = "" if value is None else digits(value / unit) if unit else f"{value:.1f}"
    return cells


def _times_said(name: str, report: ProfileReport) -> str:
    return f"{name}: {', '.join(f'{part} {time:.4g} ms' for part, time in report.milliseconds.items())}"


# Bars: shares of an iteration.

INCHES_WIDE = 10.0
CLASSES_COMPARED = 6
NAME_LETTERS = 22
"""Maximum number of characters in a line of a report's name."""
LABELLED = 0.1
"""Share of the longest bar above which a part carries its label."""


def _iteration_bars(figure: Figure, axes: Axes, reports: dict[str, ProfileReport], columns: int) -> None:
    """Forward, backward and step of each report as one bar in milliseconds, with their shares of that report."""
    times = {part: [each.milliseconds[part] for each in reports.values()] for part in PARTS}
    wholes = [sum(each) for each in zip(*times.values(), strict=True)]
    for bars, widths in zip(stacked_bars(axes, list(reports), times), times.values(), strict=True):
        labels = [
            f"{100 * width / whole:.0f} %" if width > LABELLED * max(wholes) else ""
            for width, whole in zip(widths, wholes, strict=True)
        ]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
    axes.set_xlabel("ms")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns, frameon=False, fontsize=9)


# The tree of modules as rectangles: each as wide as its share of MACs or of latency, with its parts below it.

OTHER, FAINT = "0.8", 0.65
"""Colour of all other classes, and opacity of every colour behind the black letters."""
COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")
"""Colours of the widest classes; C7 is left out since it is grey too."""
LETTER_INCHES = 0.075
"""Width in inches of a letter of a label."""
TITLES = {"macs": "MACs of the forward pass", "latency_seconds": "Latency of the forward pass"}
NARROWEST = 0.001
"""Share of the whole below which nothing is drawn."""


class Box(NamedTuple):
    """A rectangle of the plot; the whole tree is 1 wide."""

    label: str
    class_name: str
    depth: int
    left: float
    width: float


def boxes(module: Module, figure: str, whole: float, label: str = "", depth: int = 0, left: float = 0) -> Iterator[Box]:
    """The rectangles of a tree by `macs` or `latency_seconds`, a parent before its parts.

    A list of modules has no rectangle: its modules stand below the module that holds it, as `block.0`. What a module
    has beyond its parts leaves an empty place to their right.
    """
    width = module.total(figure) / whole if whole else 0.0
    if width < NARROWEST:
        return
    is_list = module.class_name in ("ModuleList", "ModuleDict")
    if not is_list:
        yield Box(label or module.class_name, module.class_name, depth, left, width)
    for child in module.children:
        name = f"{label}.{child.name}" if is_list else child.name
        yield from boxes(child, figure, whole, name, depth + (not is_list), left)
        left += child.total(figure) / whole


def icicle_plot(root: Module) -> Plot:
    """The tree drawn twice: a module is as wide as its share of the MACs, then as its share of the latency."""
    from matplotlib.patches import Patch

    figure, panels = new_axes(INCHES_WIDE, 7.0, rows=2)
    figure.set_layout_engine("constrained", hspace=0.06)
    made = {key: list(boxes(root, key, root.total(key))) for key in TITLES}
    widths: dict[str, float] = {}
    for box in (*made["macs"], *made["latency_seconds"]):
        widths[box.class_name] = widths.get(box.class_name, 0.0) + box.width
    colours = dict(zip(sorted(widths, key=lambda name: widths[name], reverse=True), COLOURS, strict=False))
    said = []
    for axes, (key, drawn_boxes) in zip(panels, made.items(), strict=True):
        for box in drawn_boxes:
            (bar,) = axes.barh([-box.depth], [box.width], left=box.left, height=0.96, edgecolor="white", alpha=FAINT)
            bar.set_facecolor(colours.get(box.class_name, OTHER))
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
