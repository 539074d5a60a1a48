"""Tables and plots that show people a profiler report, after it was read, corrected and checked."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zeropods.errors import UserError
from zeropods.measure.profile import FIGURES, Module
from zeropods.measure.profile_corrections import Checked, ClassShare, by_class, check
from zeropods.measure.profile_corrections import shares as iteration_shares
from zeropods.report.plots import WIDE, Plot, bars_beside, new_axes, stacked_bars
from zeropods.tables import Table, digits, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ITERATION_PARTS = ("forward", "backward", "step")
"""Parts of an iteration, in the order of their bars; `step` is that of the optimizer."""
TOP_CLASSES = (
    ("parameters", "parameters", "parameters"),
    ("MACs", "macs", "MACs"),
    ("latency", "seconds", "s"),
)
"""Heading, figure and unit of each list of top classes at a depth."""
SAME_SHARE = 0.005
"""Share of a reported figure by which the corrected one may differ and still count as the same."""


@dataclass(frozen=True)
class ProfileReport:
    """A report in a notebook, shown as its summary."""

    checked: Checked
    name: str
    """Name of the report in tables and plots."""

    @classmethod
    def read(cls, path: Path) -> ProfileReport:
        """The report of a file or a run folder, named after the file, or after the folder for a
        `profile.txt`; `UserError` where there is none."""
        checked = check(Path(path))
        file = checked.report.path
        # Runs have all written a file of this name.
        if file.name == "profile.txt":
            return cls(checked, file.resolve().parent.name)
        return cls(checked, file.name)

    @property
    def text(self) -> str:
        """The report as DeepSpeed wrote it."""
        return self.checked.report.text

    @property
    def milliseconds(self) -> dict[str, float]:
        """Corrected time of each part of an iteration in milliseconds; 0 where it is not known."""
        times = {}
        for part in ITERATION_PARTS:
            seconds = self.checked.figures[f"{part}_seconds"] or 0.0
            times[part] = 1e3 * seconds
        return times

    def summary(self, *, with_meaning: bool = False) -> Table:
        """Each line of the summary with its value, the corrected value where it is wrong, and, if
        `with_meaning`, what the line means."""
        report = self.checked.report
        lines = []
        for key, (_, label) in report.lines.items():
            line = {
                "line": label,
                "reported": self._reported_text(key),
                "corrected": self._corrected_text(key),
            }
            if with_meaning:
                line["what it means"] = FIGURES[key].meaning
            lines.append(line)
        title = f"The report is incomplete: {report.missing}." if report.missing else ""
        return Table.of(lines, title)

    def shares(self) -> Plot:
        """Shares of forward, backward and the optimizer's step in one iteration."""
        figure, (axes,) = new_axes(WIDE, 1.8)
        _iteration_bars(figure, axes, {"": self}, columns=len(ITERATION_PARTS))
        axes.set_title("One iteration: forward, backward, optimizer's step", loc="left")
        return Plot(figure, _times_text(self.name, self))

    def icicle(self) -> Plot:
        """Where MACs and time go: the tree of modules, once as wide as their MACs and once as their
        latency; `UserError` where the report has no whole tree."""
        return icicle_plot(self._root())

    def classes(self, top: int = 8) -> Table:
        """Where MACs and time go: classes of modules by what they do themselves, without the
        modules inside them.

        The table has the `top` classes by MACs and the `top` classes by time; the most time comes
        first. `UserError` where the report has no whole tree.
        """
        # The most MACs come first.
        by_macs = by_class(self._root())
        by_time = sorted(by_macs, key=lambda share: share.latency_seconds, reverse=True)
        top_classes = [*by_time[:top], *by_macs[:top]]
        lines = []
        for share in by_time:
            if share in top_classes:
                lines.append(
                    {
                        "class": share.class_name,
                        "modules": share.modules,
                        **_cells(share, prefix="own "),
                    }
                )
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

    def to_text(
        self, depth: int | None = None, top: int = 8, pair: ReportPair | None = None
    ) -> str:
        """What a terminal shows: the summary, shares, classes, the tree down to a depth, a
        comparison, faults.

        Where the tree is not whole, the top classes of each depth, as printed, replace the table of
        classes, and the tree is shown as far as it was printed.

        Args:
            depth: of the deepest modules of the tree, the root's being 0; no tree if not given.
            top: number of classes by MACs, and by time.
            pair: this report beside another one; no comparison if not given.
        """
        report = self.checked.report
        tables = [self.summary(), self._shares_table()]
        if self.checked.root is not None:
            tables.append(self.classes(top))
        else:
            tables.append(self._depths_table())
        if depth is not None:
            tables.append(self._tree_table(depth))
        if pair is not None:
            tables.append(pair.table())
        heading = f"{report.path}, line {report.line_number}; {self.checked.run}\n"
        texts = [str(table) for table in tables if table.rows]
        return "\n".join([heading, *texts, *self._fault_paragraphs()])

    def against(self, other: ProfileReport) -> ReportPair:
        """This report and another one side by side, corrected."""
        return ReportPair(self, other)

    def _root(self) -> Module:
        """The root of the whole tree; `UserError`, with the remedy, where there is none."""
        if self.checked.root is not None:
            return self.checked.root
        report = self.checked.report
        lacks = "no module tree" if report.root is None else "its module tree is incomplete"
        raise UserError(f'{report.path}: {lacks}; profile with "detailed": true')

    def _reported_text(self, key: str) -> str:
        """A figure of the summary as reported; an impossible one as it was printed."""
        report = self.checked.report
        if key in report.impossible:
            return report.impossible[key]
        return written(report.summary[key], FIGURES[key].unit)

    def _corrected_text(self, key: str) -> str:
        """A figure of the summary, corrected; empty where the reported one is right, and `unknown`
        where it is wrong and cannot be corrected."""
        report = self.checked.report
        corrected = self.checked.figures[key]
        is_possible = key not in report.impossible
        if is_possible and _is_same(report.summary[key], corrected):
            return ""
        return written(corrected, FIGURES[key].unit) or "unknown"

    def _shares_table(self) -> Table:
        """Time and share of each part of an iteration; empty where they are not known."""
        times = self.milliseconds
        shares = iteration_shares(self.checked.figures) or {}
        return Table.of(
            {
                "part of an iteration": part,
                "time (ms)": f"{times[part]:.5g}",
                "share (%)": f"{100 * share:.1f}",
            }
            for part, share in shares.items()
        )

    def _depths_table(self) -> Table:
        """The top classes at each depth, as DeepSpeed printed them."""
        lines = []
        for depth in self.checked.report.depths:
            line: dict[str, object] = {"depth": depth.depth}
            for heading, figure, unit in TOP_CLASSES:
                classes = getattr(depth, figure)
                texts = [f"{name} {written(value, unit)}" for name, value in classes.items()]
                line[heading] = ", ".join(texts)
            lines.append(line)
        return Table.of(lines)

    def _tree_table(self, depth: int) -> Table:
        """The modules down to a depth, the root's being 0; empty where the report has no tree."""
        tree = self.checked.root or self.checked.report.root
        if tree is None:
            return Table.of([])
        lines = []
        for path, module in tree.walk():
            module_depth = len(path.split(".")) if path else 0
            if module_depth <= depth:
                line = {"module": path or "(root)", "class": module.class_name}
                lines.append({**line, **_cells(module)})
        return Table.of(lines)

    def _fault_paragraphs(self) -> list[str]:
        """The faults as numbered paragraphs, wrapped for a terminal."""
        paragraphs = []
        for number, row in enumerate(self.faults().rows, 1):
            name, where, reported, corrected, reason = row
            figures = []
            if reported:
                figures.append(reported)
            if corrected:
                figures.append(f"should be {corrected}")
            parts = [f"{number}. {name}, {where}", ", ".join(figures), reason]
            paragraphs.append(wrapped(": ".join(part for part in parts if part)))
        return paragraphs

    def _repr_html_(self) -> str:
        return self.summary(with_meaning=True).to_html()

    def __repr__(self) -> str:
        return repr(self.summary())


# Two reports beside each other.

COMPARED_FIGURES = (
    "parameters_per_gpu",
    "forward_macs",
    "forward_flops",
    "forward_seconds",
    "forward_flops_per_second",
    "backward_seconds",
    "step_seconds",
    "iteration_seconds",
    "flops_per_second",
    "samples_per_second",
)
SETTING_FIGURES = ("world_size", "batch_size_per_gpu", "model_parallel_size")
"""Figures that must be equal in two reports for their ratios to mean something."""
CLASSES_COMPARED = 6
"""Most classes of modules in the plot of two reports."""
NAME_LETTERS = 22
"""Maximum number of characters in a line of a report's name."""


class ComparedFigure(NamedTuple):
    """A corrected figure of two reports."""

    name: str
    first: float | None
    second: float | None
    ratio: float | None
    """The second value / the first one; None where one is missing, the first is 0, or the settings
    differ."""


@dataclass(frozen=True)
class ReportPair:
    """Two reports side by side, with ratios where they measured the same thing, shown as their
    table."""

    first: ProfileReport
    second: ProfileReport

    @property
    def named(self) -> dict[str, ProfileReport]:
        """Both reports by name, the first one first; named `first` and `second` where their names
        are equal."""
        if self.first.name == self.second.name:
            return {"first": self.first, "second": self.second}
        return {self.first.name: self.first, self.second.name: self.second}

    def to_json(self, depth: int | None = None) -> dict[str, Any]:
        """The second report; what keeps the two from being compared, such as `world_size 3, 2`; and
        of each corrected figure the name, both values and their ratio, which is None where one is
        missing or the settings differ."""
        return {
            "differences": self._differences(),
            "compared": [figure._asdict() for figure in self._compared()],
            "second": self.second.checked.to_json(depth),
        }

    def table(self) -> Table:
        """Corrected figures and ratios; if the reports measured different things, the title says
        why there are none."""
        first_name, second_name = self.named
        lines = []
        for figure in self._compared():
            unit = FIGURES[figure.name].unit
            name = figure.name.replace("_", " ").replace(" seconds", " time")
            ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
            lines.append(
                {
                    "corrected figure": name,
                    first_name: written(figure.first, unit),
                    second_name: written(figure.second, unit),
                    "ratio": ratio,
                }
            )
        differences = "; ".join(self._differences())
        return Table.of(lines, f"no ratios: {differences}" if differences else "")

    def plot(self) -> Plot:
        """Times of forward, backward and step, and the forward time that the slowest classes of
        modules take themselves."""
        reports = {}
        for name, report in self.named.items():
            reports[textwrap.fill(name, NAME_LETTERS)] = report

        figure, (top, bottom) = new_axes(WIDE, 5.4, rows=2)
        _iteration_bars(figure, top, reports, columns=1)
        top.set_title("One iteration", loc="left")

        seconds = {name: _seconds_by_class(report) for name, report in reports.items()}
        classes = _slowest_classes(seconds.values())[:CLASSES_COMPARED]
        series: dict[str, list[float | None]] = {}
        for name, seconds_of_classes in seconds.items():
            series[name] = [seconds_of_classes.get(class_name) for class_name in classes]
        # The first three colours are those of the iteration's parts above it.
        bars_beside(bottom, classes, series, 1e-3, first_color=len(ITERATION_PARTS))
        bottom.set_xlabel("ms, without the modules inside")
        bottom.set_title("Forward pass by class of module", loc="left")
        figure.legend(
            handles=bottom.containers,
            loc="outside lower right",
            ncols=2,
            frameon=False,
            fontsize=9,
        )
        texts = [_times_text(name, report) for name, report in self.named.items()]
        return Plot(figure, "; ".join(texts))

    def _differences(self) -> list[str]:
        """What keeps the reports from being compared, such as `world_size 3, 2`; empty where they
        can be compared."""
        first = self.first.checked
        second = self.second.checked
        differences = []
        for key in SETTING_FIGURES:
            if first.figures[key] != second.figures[key]:
                differences.append(f"{key} {first.figures[key]}, {second.figures[key]}")
        are_known = first.passes is not None and second.passes is not None
        # Two unknown numbers may differ.
        if not are_known or first.passes != second.passes:
            numbers = [_passes_text(first.passes), _passes_text(second.passes)]
            differences.append(f"passes of a step {', '.join(numbers)}")
        return differences

    def _compared(self) -> list[ComparedFigure]:
        """Each of `COMPARED_FIGURES` with its values and their ratio."""
        are_comparable = not self._differences()
        compared = []
        for key in COMPARED_FIGURES:
            first = self.first.checked.figures[key]
            second = self.second.checked.figures[key]
            ratio = None
            if are_comparable and first and second is not None:
                ratio = second / first
            compared.append(ComparedFigure(key, first, second, ratio))
        return compared

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return repr(self.table())


def _passes_text(passes: int | None) -> str:
    """A number of passes as text, `unknown` for None."""
    return "unknown" if passes is None else str(passes)


def _seconds_by_class(report: ProfileReport) -> dict[str, float]:
    """Seconds of the forward pass that each class of modules takes itself, without the modules
    inside; empty where the tree is not whole."""
    root = report.checked.root
    if root is None:
        return {}
    return {share.class_name: share.latency_seconds for share in by_class(root)}


def _slowest_classes(seconds_of_reports: Iterable[dict[str, float]]) -> list[str]:
    """The classes, those first that take the most time in all reports together.

    Args:
        seconds_of_reports: for each report what `_seconds_by_class` returns.
    """
    totals: dict[str, float] = {}
    for seconds_by_class in seconds_of_reports:
        for class_name, seconds in seconds_by_class.items():
            totals[class_name] = totals.get(class_name, 0.0) + seconds
    return sorted(totals, key=lambda class_name: (-totals[class_name], class_name))


# How figures are written for people to read.

UNIT_PREFIXES = (
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "u"),
)
PREFIXED_UNITS = ("s", "FLOP/s", "FLOPs", "MACs", "parameters")


def written(value: float | None, unit: str) -> str:
    """A figure for people: `602.3 MMACs`, `55.98 ms`, `3`; empty where there is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value)
    if unit not in PREFIXED_UNITS:
        return f"{value:.5g} {unit}".rstrip()
    factor, prefix = _prefix_of(value)
    prefixed_unit = f"{prefix}{unit}"
    if unit == "parameters":
        # A unit that is a word is written apart from its prefix.
        prefixed_unit = f"{prefix} {unit}".strip()
    return f"{value / factor:.5g} {prefixed_unit}"


def _prefix_of(value: float) -> tuple[float, str]:
    """The largest factor that is no larger than the value, and its prefix; 1 and none for what is
    smaller than all factors, such as 0."""
    for factor, prefix in UNIT_PREFIXES:
        if abs(value) >= factor:
            return factor, prefix
    return 1.0, ""


def _is_same(reported: float | None, corrected: float | None) -> bool:
    """Whether a reported figure is right: equal to the corrected one, or nearly so."""
    if reported == corrected:
        return True
    if not reported or not corrected:
        return False
    return abs(reported - corrected) <= SAME_SHARE * reported


def _cells(source: Module | ClassShare, prefix: str = "") -> dict[str, str]:
    """Cells by heading for a module, or for what a class does itself: those of the figures that it
    has.

    Args:
        prefix: what is put before the headings of MACs and latency.
    """
    # Heading, field, and the unit in which a value is written; None for a share in percent.
    columns = (
        ("parameters (k)", "parameters", 1e3),
        (f"{prefix}MACs (M)", "macs", 1e6),
        ("MACs (%)", "macs_percent", None),
        (f"{prefix}latency (ms)", "latency_seconds", 1e-3),
        ("latency (%)", "latency_percent", None),
    )
    cells = {}
    for heading, figure, unit in columns:
        if not hasattr(source, figure):
            continue
        value = getattr(source, figure)
        if value is None:
            cells[heading] = ""
        elif unit is None:
            cells[heading] = f"{value:.1f}"
        else:
            cells[heading] = digits(value / unit)
    return cells


def _times_text(name: str, report: ProfileReport) -> str:
    """The times of an iteration's parts, for those who cannot see their bars."""
    times = [f"{part} {time:.4g} ms" for part, time in report.milliseconds.items()]
    return f"{name}: {', '.join(times)}"


# Bars: shares of an iteration.

LABELLED_SHARE = 0.1
"""Share of the longest bar above which a part carries its label."""


def _iteration_bars(
    figure: Figure, axes: Axes, reports: dict[str, ProfileReport], columns: int
) -> None:
    """Draw forward, backward and step of each report as one bar in milliseconds, each part with its
    share of the bar, and put their legend below.

    Args:
        reports: by the name that stands beside the bar.
        columns: number of columns of the legend.
    """
    times_of_reports = [report.milliseconds for report in reports.values()]
    by_part = {part: [times[part] for times in times_of_reports] for part in ITERATION_PARTS}
    totals = [sum(times.values()) for times in times_of_reports]
    shortest_labelled = LABELLED_SHARE * max(totals)
    containers = stacked_bars(axes, list(reports), by_part)
    for bars, milliseconds in zip(containers, by_part.values(), strict=True):
        labels = []
        for value, total in zip(milliseconds, totals, strict=True):
            labels.append(f"{100 * value / total:.0f} %" if value > shortest_labelled else "")
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
    axes.set_xlabel("ms")
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower left", ncols=columns, frameon=False, fontsize=9
    )


# The tree of modules as rectangles: each as wide as its share of MACs or of latency, with its parts
# below it.

ICICLE_INCHES = 10.0
OTHER_COLOR = "0.8"
CLASS_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")
"""Colours of the widest classes; C7 is left out since it is grey too."""
OPACITY = 0.65
"""Opacity of every colour behind the black letters."""
LETTER_INCHES = 0.075
"""Width in inches of a letter of a label."""
ICICLE_FIGURES = {
    "macs": ("MACs", "MACs of the forward pass"),
    "latency_seconds": ("latency", "Latency of the forward pass"),
}
"""Figures by which the tree is drawn, each with its name and its title."""
NARROWEST = 0.001
"""Share of the whole below which nothing is drawn."""


class Box(NamedTuple):
    """A rectangle of the plot; the whole tree is 1 wide."""

    label: str
    class_name: str
    depth: int
    """Number of rectangles above it."""
    left: float
    """Where it begins, as a share of the whole."""
    width: float


def boxes(
    module: Module,
    figure: str,
    whole: float,
    label: str = "",
    depth: int = 0,
    left: float = 0,
) -> Iterator[Box]:
    """The rectangles of a tree by `macs` or `latency_seconds`, a parent before its parts.

    A list of modules has no rectangle: its modules stand below the module that holds it, as
    `block.0`. What a module has beyond its parts leaves an empty place to their right. A module
    narrower than `NARROWEST` is left out with its parts.

    Args:
        module: the root of the tree, or in a recursive call one of its modules.
        whole: the figure of the root.
        label: name of the module; the root goes by its class.
        depth: number of rectangles above the module.
        left: where its rectangle begins, as a share of the whole.
    """
    width = module.total(figure) / whole if whole else 0.0
    if width < NARROWEST:
        return
    is_list = module.class_name in ("ModuleList", "ModuleDict")
    if not is_list:
        yield Box(
            label=label or module.class_name,
            class_name=module.class_name,
            depth=depth,
            left=left,
            width=width,
        )
    depth_of_children = depth if is_list else depth + 1
    for child in module.children:
        name = f"{label}.{child.name}" if is_list else child.name
        yield from boxes(child, figure, whole, name, depth_of_children, left)
        left += child.total(figure) / whole


def icicle_plot(root: Module) -> Plot:
    """The tree drawn twice: a module is as wide as its share of the MACs, then as its share of the
    latency."""
    from matplotlib.patches import Patch

    figure, panels = new_axes(ICICLE_INCHES, 7.0, rows=2)
    figure.set_layout_engine("constrained", hspace=0.06)
    boxes_by_figure = {key: list(boxes(root, key, root.total(key))) for key in ICICLE_FIGURES}
    # One set of colours, so that a class has the same in both trees.
    colors = _class_colors(list(itertools.chain.from_iterable(boxes_by_figure.values())))
    texts = []
    for axes, (key, boxes_of_tree) in zip(panels, boxes_by_figure.items(), strict=True):
        name, title = ICICLE_FIGURES[key]
        _draw_boxes(axes, boxes_of_tree, colors)
        axes.set_title(
            f"{title}: a module is as wide as its share, with its parts below it", loc="left"
        )
        parts = [f"{box.label} {100 * box.width:.0f} %" for box in boxes_of_tree if box.depth == 1]
        texts.append(f"{name}: {', '.join(parts)}")
    patches = []
    for class_name, color in {**colors, "others": OTHER_COLOR}.items():
        patches.append(Patch(color=color, label=class_name, alpha=OPACITY))
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return Plot(figure, f"tree of modules; {'; '.join(texts)}")


def _class_colors(rectangles: Sequence[Box]) -> dict[str, str]:
    """The colours of the classes whose rectangles together are the widest, the widest first."""
    widths: dict[str, float] = {}
    for box in rectangles:
        widths[box.class_name] = widths.get(box.class_name, 0.0) + box.width
    widest_first = sorted(widths, key=lambda class_name: widths[class_name], reverse=True)
    # Classes beyond the last colour have none here; they are drawn in `OTHER_COLOR`.
    return dict(zip(widest_first, CLASS_COLORS, strict=False))


def _draw_boxes(axes: Axes, boxes_of_tree: Sequence[Box], colors: dict[str, str]) -> None:
    """Draw the rectangles of one tree, the root on top, each with the label that fits into it."""
    for box in boxes_of_tree:
        (bar,) = axes.barh(
            [-box.depth], [box.width], left=box.left, height=0.96, edgecolor="white", alpha=OPACITY
        )
        bar.set_facecolor(colors.get(box.class_name, OTHER_COLOR))
        axes.text(
            box.left + box.width / 2,
            -box.depth,
            _fitting_label(box),
            ha="center",
            va="center",
            fontsize=8,
            # The layout makes no room for labels, which fit into their boxes.
            in_layout=False,
        )
    axes.set(xlim=(0, 1), xticks=[], yticks=[])
    axes.margins(y=0)
    axes.spines[:].set_visible(False)


def _fitting_label(box: Box) -> str:
    """The longest label that fits into a box: name and share, the name, nothing."""
    # One letter less, for the margins.
    letters_that_fit = box.width * ICICLE_INCHES / LETTER_INCHES - 1
    for text in (f"{box.label}  {100 * box.width:.0f} %", box.label):
        if len(text) <= letters_that_fit:
            return text
    return ""
