"""A profiler report for people: tables and plots of a report that was read, mended and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.measure.profile import Module
from zeropods.measure.profile_checks import Checked, by_class, check, compare, differences, shares
from zeropods.report.plots import Plot, drawn, new_axes
from zeropods.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
PREFIXED = ("s", "FLOP/s", "FLOPs", "MACs", "parameters")
UNITS = (
    ("flops_per_second", "FLOP/s"),
    ("samples_per_second", "samples/s"),
    ("_seconds", "s"),
    ("parameters_per_gpu", "parameters"),
    ("parameters", "parameters"),
    ("macs", "MACs"),
    ("flops", "FLOPs"),
)
"""Units by how the name of a figure ends; a count has none."""


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
        """Each line of the summary as it was said, and right, in one unit; nothing where it was right."""
        return Table.of(
            {"figure": label, "said": said, "corrected": right, "unit": unit}
            for label, _, said, right, unit in self._lines()
        )

    def line_by_line(self) -> Table:
        """Each line of the summary with its value, what it means, and the right value where it is wrong."""
        said, right = vars(self.checked.report.summary), self.checked.mended.figures
        return Table.of(
            {
                "line": label,
                "value": written(said[key], unit_of(key)),
                "what it means": MEANING[key],
                "corrected": written(right[key], unit_of(key)) or "unknown" if corrected else "",
            }
            for label, key, _, corrected, _ in self._lines()
        )

    def _lines(self) -> Iterator[tuple[str, str, str, str, str]]:
        """(label, key, what was said, what is right if that is another, unit) of each line, the heading first."""
        said, right = vars(self.checked.report.summary), self.checked.mended.figures
        labels = [("step", "Profile Summary at step")]
        labels += [(line.keys[0], line.label.split(" = ")[0]) for line in self.checked.report.lines]
        for key, label in labels:
            is_same = (
                said[key] is right[key]
                if said[key] is None or right[key] is None
                else (abs(said[key] - right[key]) <= 0.005 * abs(said[key]))
            )
            figure, unit = scaled(said[key], said[key] if right[key] is None else right[key], unit_of(key))
            corrected = "" if is_same else scaled(right[key], right[key], unit_of(key))[0] or "unknown"
            yield label, key, figure, corrected, unit

    def shares(self) -> Plot:
        """Shares of forward, backward and the optimizer's step in one iteration."""
        figure, (axes,) = new_axes(INCHES_WIDE, 1.8)
        _iteration_bars(axes, [("", self)])
        axes.set_title("One iteration: forward, backward, optimizer's step", loc="left")
        return drawn(figure, self.shares_text(self.name))

    def shares_text(self, name: str) -> str:
        """The same in words."""
        figures = self.checked.mended.figures
        return f"{name}: {', '.join(f'{part} {_milliseconds(figures, part):.4g} ms' for part in PARTS)}"

    def shares_table(self) -> Table:
        """The same in figures."""
        figures = self.checked.mended.figures
        return Table.of(
            {
                "part of an iteration": name,
                "seconds": written(figures[f"{name}_seconds"], "s"),
                "share": f"{100 * share:.1f} %",
            }
            for name, share in (shares(figures) or {}).items()
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
            for path, module in self._root().walk()
            if len(path.split(".")) * bool(path) <= depth
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
        first, second = self._names()
        title = f"no ratios: {'; '.join(self.differences)}" if self.differences else ""
        lines = (
            {
                "corrected figure": _spelled(one.name),
                first: written(one.first, unit_of(one.name)),
                second: written(one.second, unit_of(one.name)),
                "ratio": "" if one.ratio is None else f"{one.ratio:.3g}",
            }
            for one in compare(self.first.checked.mended.figures, self.second.checked.mended.figures)
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
        """Seconds of forward, backward and step, and the forward seconds that each class of module takes itself."""
        pairs = list(zip(self._names(), (self.first, self.second), strict=True))
        figure, (left, right) = new_axes(INCHES_WIDE, 3.8, columns=2)
        _iteration_bars(left, pairs)
        left.set_title("One iteration", loc="left")
        _class_bars(right, pairs)
        right.set_title("Forward pass by class of module", loc="left")
        return drawn(figure, "; ".join(report.shares_text(name) for name, report in pairs))

    def _names(self) -> list[str]:
        """Their names without what both begin with, cut at a word: `zero1-3-pods`, `zero3_offload-3-pods`."""
        names = [self.first.name, self.second.name]
        if names[0] == names[1]:
            return ["first", "second"]
        apart = next((at for at, (one, two) in enumerate(zip(*names, strict=False)) if one != two), 0)
        cut = max(names[0].rfind(mark, 0, apart) for mark in "-/. ") + 1
        return [name[cut:] or name for name in names]

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return repr(self.table())


# How figures are written for people.


def unit_of(name: str) -> str:
    """The unit of a figure by its name in `ReportSummary`; empty for a count."""
    return next((unit for ending, unit in UNITS if name.endswith(ending)), "")


def written(value: float | bool | None, unit: str) -> str:
    """A figure for people: `602.3 MMACs`, `55.98 ms`, `3`; empty where there is none."""
    return " ".join(scaled(value, value, unit)).rstrip()


def scaled(value: float | bool | None, like: float | bool | None, unit: str) -> tuple[str, str]:
    """A figure and its unit with the prefix that fits `like`, so that two figures can be read beside one another."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value), ""
    if unit not in PREFIXED or like is None:
        return f"{value:.5g}", unit
    factor, prefix = next(((f, p) for f, p in PREFIXES if abs(like) >= f), (1.0, ""))
    # A word is not written together with a prefix.
    return f"{value / factor:.5g}", f"{prefix} {unit}".strip() if unit == "parameters" else prefix + unit


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _spelled(name: str) -> str:
    for small, large in (("_", " "), ("macs", "MACs"), ("flops", "FLOPs"), ("gpu", "GPU")):
        name = name.replace(small, large)
    return name


# Bars: shares of an iteration, classes of modules.

PARTS = {"forward": "#4c78a8", "backward": "#f58518", "step": "#54a24b"}
PAIR = ("#72b7b2", "#b279a2")
INCHES_WIDE = 10.0
CLASSES_COMPARED = 6
LABELLED = 0.1
"""Share of a plot's width from which on a part carries its label."""
Named = Sequence[tuple[str, ProfileReport]]


def _milliseconds(figures: dict[str, Any], part: str) -> float:
    return 1e3 * (figures[f"{part}_seconds"] or 0.0)


def _iteration_bars(axes: Axes, reports: Named) -> None:
    """Forward, backward and step of each report as one bar in milliseconds, with their shares of that report."""
    totals = [sum(_milliseconds(report.checked.mended.figures, part) for part in PARTS) for _, report in reports]
    for row, ((_, report), whole) in enumerate(zip(reports, totals, strict=True)):
        end, figures = 0.0, report.checked.mended.figures
        for part, colour in PARTS.items():
            width = _milliseconds(figures, part)
            bar = axes.barh([row], [width], left=end, height=0.6, color=colour, label=part if row == 0 else None)
            share = f"{100 * width / whole:.0f} %" if width > LABELLED * max(totals) else ""
            axes.bar_label(bar, [share], label_type="center", color="white", fontsize=9)
            end += width
    _across(axes, [name for name, _ in reports], "ms")
    figure = axes.get_figure(root=True)
    if figure is not None:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9)


def _class_bars(axes: Axes, pairs: Named) -> None:
    """The classes that take most time in both reports together."""
    roots = [report.checked.mended.root for _, report in pairs]
    times = [{one.class_name: 1e3 * one.latency_seconds for one in by_class(root)} if root else {} for root in roots]
    together = {name: sum(each.get(name, 0.0) for each in times) for name in set().union(*times)}
    names = sorted(together, key=lambda name: (-together[name], name))[:CLASSES_COMPARED]
    height = 0.8 / len(pairs)
    for row, ((label, _), each) in enumerate(zip(pairs, times, strict=True)):
        places = [place + height * (row - (len(pairs) - 1) / 2) for place in range(len(names))]
        axes.barh(places, [each.get(name, 0.0) for name in names], height=height, color=PAIR[row], label=label)
    _across(axes, names, "ms, without the modules inside")
    axes.legend(frameon=False, loc="lower right", fontsize=9)


def _across(axes: Axes, names: Sequence[str], unit: str) -> None:
    """Bars from the left, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


# The tree of modules as rectangles: each as wide as its share of the MACs, or of the latency, its parts below it.

PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#2f4b7c", "#ff9da6",
)  # fmt: skip
OTHER = "#d0d0d0"
LETTER_INCHES = 0.075
"""Width of a letter of a label."""
TITLES = ("MACs of the forward pass", "forward latency")
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


def cells(root: Module, figure: str) -> Iterator[Box]:
    """The rectangles of a tree by `macs` or `latency_seconds`, a parent before its parts.

    A list of modules is left out: its modules stand below what holds it, as `block.0`. What a module has beyond its
    parts stays empty at its right.
    """
    whole = root.total(figure)
    if whole > 0:
        yield from _cells(root, root.class_name, figure, whole, 0, 0.0)


def _cells(module: Module, label: str, figure: str, whole: float, depth: int, left: float) -> Iterator[Box]:
    width = module.total(figure) / whole
    if width < NARROWEST:
        return
    yield Box(label=label, class_name=module.class_name, depth=depth, left=left, width=width)
    for name, child in _parts(module):
        yield from _cells(child, name, figure, whole, depth + 1, left)
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
    made = {key: list(cells(root, key)) for key in ("macs", "latency_seconds")}
    widths: dict[str, float] = {}
    for cell in (*made["macs"], *made["latency_seconds"]):
        widths[cell.class_name] = widths.get(cell.class_name, 0.0) + cell.width
    colours = dict(zip(sorted(widths, key=lambda name: widths[name], reverse=True), PALETTE, strict=False))
    for axes, drawn_cells, title in zip(panels, made.values(), TITLES, strict=True):
        _icicle(axes, drawn_cells, colours)
        axes.set_title(f"{title}: a module is as wide as its share, with its parts below it", loc="left", fontsize=10)
    patches = [Patch(color=colour, label=name) for name, colour in {**colours, "others": OTHER}.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    wide, slow = (
        ", ".join(f"{cell.label} {100 * cell.width:.0f} %" for cell in drawn_cells if cell.depth == 1)
        for drawn_cells in made.values()
    )
    return drawn(figure, f"tree of modules; MACs: {wide}; latency: {slow}")


def _icicle(axes: Axes, drawn_cells: Sequence[Box], colours: dict[str, str]) -> None:
    from matplotlib.patches import Rectangle

    for cell in drawn_cells:
        colour = colours.get(cell.class_name, OTHER)
        corner = (cell.left, -cell.depth - 1)
        axes.add_patch(Rectangle(corner, cell.width, 0.96, facecolor=colour, edgecolor="white", linewidth=0.7))
        # The longest label that fits into the cell: name and share, the name, nothing.
        room = cell.width * INCHES_WIDE / LETTER_INCHES - 1
        texts = (f"{cell.label}  {100 * cell.width:.0f} %", cell.label, "")
        text = next(text for text in texts if len(text) <= room or not text)
        middle = (cell.left + cell.width / 2, -cell.depth - 0.52)
        axes.text(*middle, text, ha="center", va="center", fontsize=8, color=_ink(colour), in_layout=False)
    axes.set(xlim=(0, 1), ylim=(-max(cell.depth for cell in drawn_cells) - 1, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _ink(colour: str) -> str:
    """Black or white, whichever is seen better on a colour (ITU-R BT.601 luma)."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "white"
