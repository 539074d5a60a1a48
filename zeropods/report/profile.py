"""A profiler report for people: tables and plots of a report that was read, mended and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.measure.profile import Module, total
from zeropods.measure.profile_checks import Checked, Figures, Mended, by_class, check, compare, differences, shares
from zeropods.report.plots import Plot, drawn, new_axes
from zeropods.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# What the lines of a profiler report mean, and how its figures are written for people.

MEANING = {
    "step": "number of the profiled step, counted from 1",
    "world_size": "processes of the run, one a GPU",
    "data_parallel_size": "processes that each work on rows of their own",
    "model_parallel_size": "processes that one copy of the model is cut over; ZeRO cuts none, it shards",
    "batch_size_per_gpu": "rows of one forward pass of one process",
    "expert_tensor_parallelism": "whether the experts of a mixture are cut over processes as well",
    "parameters_per_gpu": "parameters that this process holds, tied ones once",
    "model_parameters": "the line above x model parallel size; under ZeRO-3 as wrong as that",
    "non_expert_parameters": "parameters outside a mixture's experts",
    "expert_parameters": "parameters of all experts of a mixture",
    "forward_macs": "multiply-adds of one forward pass; attention, layers and output, padding included",
    "forward_flops": "a multiply-add is two, and the work that is no product (activations, sums, norms) comes on top",
    "model_forward_flops": "the line above x model parallel size",
    "forward_seconds": "wall time of one forward pass, with the profiler's own stops at each module",
    "forward_flops_per_second": "forward FLOPs / forward time",
    "backward_factor": "a backward pass is taken for so many forward ones",
    "backward_seconds": "wall time of the backward pass, the exchange of gradients included",
    "backward_flops_per_second": "twice the forward FLOPs / backward time: an assumption, nothing is counted here",
    "forward_backward_flops_per_second": "three times the forward FLOPs / both times",
    "step_seconds": "wall time of the optimizer's step; with ZeRO the exchange of parameters is in it",
    "iteration_seconds": "forward + backward + step; loading data and logging are not in it",
    "flops_per_second": "three times the forward FLOPs / the line above",
    "samples_per_second": "rows of all processes / the line above",
}
"""Of each figure of the summary."""
PREFIXED = ("s", "FLOP/s", "FLOPs", "MACs", "parameters")
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_UNITS = {
    "parameters_per_gpu": "parameters",
    "model_parameters": "parameters",
    "non_expert_parameters": "parameters",
    "expert_parameters": "parameters",
    "forward_macs": "MACs",
    "forward_flops": "FLOPs",
    "model_forward_flops": "FLOPs",
    "samples_per_second": "samples/s",
}


def unit_of(name: str) -> str:
    """The unit of a figure by its name in `Summary`; empty for a count."""
    if name.endswith("flops_per_second"):
        return "FLOP/s"
    return "s" if name.endswith("_seconds") else _UNITS.get(name, "")


def written(value: float | bool | None, unit: str) -> str:
    """A figure for people: `602.3 MMACs`, `55.98 ms`, `3`; empty where there is none."""
    return " ".join(scaled(value, value, unit)).rstrip()


def scaled(value: float | bool | None, like: float | bool | None, unit: str) -> tuple[str, str]:
    """A figure and its unit with the prefix that fits `like`, so that two figures can be read beside one another."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value), ""
    if unit not in PREFIXED or like is None:
        return f"{value:.5g}", unit
    factor, prefix = next(((f, p) for f, p in _PREFIXES if abs(like) >= f), (1.0, ""))
    # A word is not written together with a prefix.
    return f"{value / factor:.5g}", f"{prefix} {unit}".strip() if unit == "parameters" else prefix + unit


def is_same(said: float | None, right: float | None) -> bool:
    """Whether a correction changes nothing that rounding had not."""
    if said is None or right is None:
        return said is right
    return abs(said - right) <= 0.005 * abs(said)


def told_apart(names: list[str]) -> list[str]:
    """Names without what they all begin with, cut at a word: `zero1-3-pods`, `zero3_offload-3-pods`."""
    apart = next((at for at, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), 0)
    cut = max(names[0].rfind(mark, 0, apart) for mark in "-/. ") + 1
    return [name[cut:] or name for name in names]


# The summary of a profiler report as a table: what it said, what is right, what it means.


def said_and_corrected(checked: Checked) -> Table:
    """Each line as it was said and as it is right, in one unit; nothing where it was right."""
    return Table.of(_beside(checked, key, label) for key, label in _lines(checked))


def explained(checked: Checked) -> Table:
    """Each line with its value, what it means, and the right value where it is wrong."""
    said, right = vars(checked.report.summary), checked.mended.figures
    return Table.of(
        {
            "line": label,
            "value": written(said[key], unit_of(key)),
            "what it means": MEANING[key],
            "corrected": "" if is_same(said[key], right[key]) else written(right[key], unit_of(key)) or "unknown",
        }
        for key, label in _lines(checked)
    )


def _beside(checked: Checked, key: str, label: str) -> dict[str, str]:
    said, right = vars(checked.report.summary)[key], checked.mended.figures[key]
    figure, unit = scaled(said, said if right is None else right, unit_of(key))
    corrected = scaled(right, right, unit_of(key))[0] or "unknown"
    return {"figure": label, "said": figure, "corrected": "" if is_same(said, right) else corrected, "unit": unit}


def _lines(checked: Checked) -> Iterator[tuple[str, str]]:
    """(key, label) of each line, the heading first."""
    yield "step", "Profile Summary at step"
    for line in checked.report.lines:
        yield line.keys[0], line.label.split(" = ")[0]


# Bars of profiler reports: shares of an iteration, two reports side by side.

PARTS = {"forward": "#4c78a8", "backward": "#f58518", "step": "#54a24b"}
PAIR = ("#72b7b2", "#b279a2")
INCHES_WIDE = 10.0
CLASSES_COMPARED = 6
LABELLED = 0.1
"""Share of a plot's width from which on a part carries its label."""


def shares_plot(reports: Sequence[tuple[str, Figures]]) -> Plot:
    """Forward, backward and step of each report as one bar in milliseconds, with their shares."""
    figure, (axes,) = new_axes(INCHES_WIDE, 1.3 + 0.5 * len(reports))
    _iteration_bars(axes, reports)
    axes.set_title("One iteration: forward, backward, optimizer's step", loc="left")
    return drawn(figure, "; ".join(_shares_text(*each) for each in reports))


def pair_plot(pairs: Sequence[tuple[str, Mended]]) -> Plot:
    """Seconds of the iteration's parts, and the forward seconds that each class of module takes itself."""
    figure, (left, right) = new_axes(INCHES_WIDE, 3.8, columns=2)
    _iteration_bars(left, [(name, mended.figures) for name, mended in pairs])
    left.set_title("One iteration", loc="left")
    _class_bars(right, pairs)
    right.set_title("Forward pass by class of module", loc="left")
    return drawn(figure, "; ".join(_shares_text(name, mended.figures) for name, mended in pairs))


def _iteration_bars(axes: Axes, reports: Sequence[tuple[str, Figures]]) -> None:
    ends = [0.0] * len(reports)
    whole = [1e3 * sum(figures[f"{part}_seconds"] or 0.0 for part in PARTS) for _, figures in reports]
    for part, colour in PARTS.items():
        widths = [1e3 * (figures[f"{part}_seconds"] or 0.0) for _, figures in reports]
        bars = axes.barh(range(len(reports)), widths, left=ends, height=0.6, color=colour, label=part)
        axes.bar_label(bars, _share_labels(widths, whole), label_type="center", color="white", fontsize=9)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(range(len(reports)), [name for name, _ in reports] if len(reports) > 1 else [""])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    figure = axes.get_figure(root=True)
    if figure is not None:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9)


def _share_labels(widths: Sequence[float], whole: Sequence[float]) -> list[str]:
    """Each part's share of its own report, where the part is wide enough for it on the plot."""
    widest = max(whole)
    return [
        f"{100 * width / total:.0f} %" if total and width > LABELLED * widest else ""
        for width, total in zip(widths, whole, strict=True)
    ]


def _class_bars(axes: Axes, pairs: Sequence[tuple[str, Mended]]) -> None:
    by_name = [
        {share.class_name: 1e3 * share.latency_seconds for share in by_class(mended.root)} if mended.root else {}
        for _, mended in pairs
    ]
    together = {name: sum(each.get(name, 0.0) for each in by_name) for name in set().union(*by_name)}
    names = sorted(together, key=lambda name: (-together[name], name))[:CLASSES_COMPARED]
    height = 0.8 / len(pairs)
    for row, ((label, _), each) in enumerate(zip(pairs, by_name, strict=True)):
        places = [place + height * (row - (len(pairs) - 1) / 2) for place in range(len(names))]
        axes.barh(places, [each.get(name, 0.0) for name in names], height=height, color=PAIR[row], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms, without the modules inside")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right", fontsize=9)


def _shares_text(name: str, figures: Figures) -> str:
    parts: Iterable[str] = (f"{part} {1e3 * (figures[f'{part}_seconds'] or 0.0):.4g} ms" for part in PARTS)
    return f"{name}: {', '.join(parts)}"


# Two profiler reports side by side.


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


# A tree of modules as rectangles: each as wide as its share, its parts below it.

NARROWEST = 0.001
"""Share of the whole below which nothing is drawn."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A rectangle; the whole is 1 wide."""

    label: str
    class_name: str
    depth: int
    left: float
    width: float


def cells(root: Module, figure: str) -> Iterator[Cell]:
    """The rectangles of a tree by `macs` or `latency_seconds`, a parent before its parts.

    A list of modules is left out: its modules stand below what holds it, as `block.0`. What a module has beyond its
    parts stays empty at its right.
    """
    whole = total(root, figure)
    if whole > 0:
        yield from _cells(root, root.class_name, figure, whole, 0, 0.0)


def _cells(module: Module, label: str, figure: str, whole: float, depth: int, left: float) -> Iterator[Cell]:
    width = total(module, figure) / whole
    if width < NARROWEST:
        return
    yield Cell(label=label, class_name=module.class_name, depth=depth, left=left, width=width)
    for name, child in _parts(module):
        yield from _cells(child, name, figure, whole, depth + 1, left)
        left += total(child, figure) / whole


def _parts(module: Module) -> Iterator[tuple[str, Module]]:
    for child in module.children:
        if child.class_name in ("ModuleList", "ModuleDict"):
            yield from ((f"{child.name}.{name}", below) for name, below in _parts(child))
        else:
            yield child.name, child


# The tree of modules as a picture: as wide as MACs, and as wide as time.

PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#2f4b7c", "#ff9da6",
)  # fmt: skip
OTHER = "#d0d0d0"
LETTER_INCHES = 0.075
"""Width of a letter of a label."""


def icicle_plot(root: Module) -> Plot:
    """The tree twice: a module is as wide as its share of the MACs, and of the latency."""
    figure, axes = new_axes(INCHES_WIDE, 7.0, columns=1)
    figure.delaxes(axes[0])
    figure.set_layout_engine("constrained", hspace=0.06)
    colours = _colours(root)
    for row, (key, title) in enumerate((("macs", "MACs of the forward pass"), ("latency_seconds", "forward latency"))):
        panel = figure.add_subplot(2, 1, row + 1)
        _icicle(panel, list(cells(root, key)), colours)
        panel.set_title(f"{title}: a module is as wide as its share, with its parts below it", loc="left", fontsize=10)
    _class_legend(figure, colours)
    wide = ", ".join(f"{cell.label} {100 * cell.width:.0f} %" for cell in cells(root, "macs") if cell.depth == 1)
    slow = ", ".join(f"{c.label} {100 * c.width:.0f} %" for c in cells(root, "latency_seconds") if c.depth == 1)
    return drawn(figure, f"tree of modules; MACs: {wide}; latency: {slow}")


def _icicle(axes: Axes, drawn_cells: Sequence[Cell], colours: dict[str, str]) -> None:
    from matplotlib.patches import Rectangle

    for cell in drawn_cells:
        colour = colours.get(cell.class_name, OTHER)
        corner = (cell.left, -cell.depth - 1)
        axes.add_patch(Rectangle(corner, cell.width, 0.96, facecolor=colour, edgecolor="white", linewidth=0.7))
        text = _fitting(cell)
        if text:
            middle = (cell.left + cell.width / 2, -cell.depth - 0.52)
            axes.text(*middle, text, ha="center", va="center", fontsize=8, color=_ink(colour), in_layout=False)
    axes.set(xlim=(0, 1), ylim=(-max(cell.depth for cell in drawn_cells) - 1, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _fitting(cell: Cell) -> str:
    """The longest label that fits into a cell: name and share, the name, nothing."""
    room = cell.width * INCHES_WIDE / LETTER_INCHES - 1
    texts = (f"{cell.label}  {100 * cell.width:.0f} %", cell.label)
    return next((text for text in texts if len(text) <= room), "")


def _colours(root: Module) -> dict[str, str]:
    """A colour for each of the classes that take most of the tree."""
    widths: dict[str, float] = {}
    for cell in [*cells(root, "macs"), *cells(root, "latency_seconds")]:
        widths[cell.class_name] = widths.get(cell.class_name, 0.0) + cell.width
    return dict(zip(sorted(widths, key=lambda name: widths[name], reverse=True), PALETTE, strict=False))


def _class_legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()] + [
        Patch(color=OTHER, label="others")
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _ink(colour: str) -> str:
    """Black or white, whichever is seen better on a colour (ITU-R BT.601 luma)."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "white"


# A profiler report for people: tables and plots of a report that was read, mended and checked.


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
