"""Plots of rows and of losses, drawn without a display."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeropods.measure.record import Loss
from zeropods.report.entry import Entry
from zeropods.report.rows import GIB, MIB, Values
from zeropods.techniques import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# What frames a plot: its margins, legend, labels and words.

SHOWN_LETTERS = 40
"""Of a run's name."""


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Room around the axes of a figure, in inches, and between them, in their own widths and heights."""

    left: float
    right: float = 0.15
    top: float = 0.4
    bottom: float = 0.6
    between_columns: float = 0.1
    between_rows: float = 0.3

    def place(self, figure: Figure) -> None:
        """Keep that room free."""
        width, height = figure.get_size_inches()
        figure.subplots_adjust(
            left=self.left / width,
            right=1 - self.right / width,
            top=1 - self.top / height,
            bottom=self.bottom / height,
            wspace=self.between_columns,
            hspace=self.between_rows,
        )


def text_inches(texts: Sequence[str], points: float = 10) -> float:
    """About how wide the longest of some texts is."""
    return 0.0088 * points * max(map(len, texts), default=0)


def nothing(axes: Axes, why: str) -> None:
    """Say that there is nothing to draw."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def literal(name: str) -> str:
    """A name, shortened, in which matplotlib sees no formula, and which its legend does not hide."""
    short = name if len(name) <= SHOWN_LETTERS else f"…{name[1 - SHOWN_LETTERS :]}"
    shown = short.replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown


def technique_color(technique: str) -> str:
    """The same in every plot; grey for a technique of the user's own."""
    return f"C{NAMES.index(technique)}" if technique in NAMES else "0.6"


def beside_legend(labels: Sequence[str]) -> Margins:
    """Margins of axes with a legend at their right."""
    return Margins(left=0.7, right=0.75 + text_inches(labels, 8.3))


def legend_beside(axes: Axes) -> None:
    """A legend at the right, over no curve."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def of_all(shown: int, found: int, what: str = "rows") -> str:
    """What a title adds where not all is drawn."""
    return f" (the first {shown} of {found} {what})" if shown < found else ""


def listed(names: Sequence[str]) -> str:
    """Names for the text of a plot."""
    return ", ".join(names) or "no run"


# Plots as PNG, drawn without a display; loss curves.

DOTS_PER_INCH = 150
COMPRESSION = 3
"""Of 9: a fifth larger, in a third of the time."""
SHOWN_WIDTH = 720
"""Of a plot in a notebook, in CSS pixels."""
SHOWN_CURVES = 8
"""More cannot be told apart."""
LONG = 10
"""Times the steps of the shortest run."""


@dataclass(frozen=True)
class Plot:
    """A finished plot: shown by a notebook, written by a report."""

    png: bytes
    text: str
    """What it shows, for those who cannot see it."""

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        image = base64.b64encode(self.png).decode()
        return {"image/png": image, "text/plain": self.text}, {"image/png": {"width": SHOWN_WIDTH}}

    def data_uri(self) -> str:
        """The image as an address that holds it."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def new_axes(
    width: float, height: float, columns: int = 1, rows: int = 1, margins: Margins | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure of that many inches with `rows` x `columns` axes, row by row, bound to no display.

    Args:
        margins: place the axes by them; without them matplotlib measures every text, which takes as long as drawing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=None if margins else "constrained")
    FigureCanvasAgg(figure)
    if margins:
        margins.place(figure)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
    return figure, axes


def drawn(figure: Figure, text: str) -> Plot:
    """The figure as a `Plot`; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None}, pil_kwargs={"compress_level": COMPRESSION})
    return Plot(buffer.getvalue(), text)


def loss_plot(entries: Sequence[Entry], labels: Sequence[str] | None = None) -> Plot:
    """Training and validation loss of each run by optimizer step, on a logarithmic scale; of at most eight runs.

    Args:
        labels: what the runs are called, if not by their names.
    """
    names = [literal(name) for name in labels or [entry.name for entry in entries]]
    recorded = ((name, entry.record) for name, entry in zip(names, entries, strict=True))
    found = [(name, of) for name, of in recorded if of is not None and (of.losses or of.eval_losses)]
    curves = found[:SHOWN_CURVES]
    figure, (axes,) = new_axes(8, 4, margins=beside_legend([name for name, _ in curves]))
    for number, (name, record) in enumerate(curves):
        color = f"C{number}"
        _curve(axes, record.losses, color=color, linewidth=1, alpha=0.6)
        _curve(axes, record.eval_losses, color=color, linewidth=2, marker="o", markersize=4, linestyle="--")
        axes.plot([], [], color=color, label=name)
    title = f"Loss: lines training, dots validation{of_all(len(curves), len(found))}"
    axes.set(xlabel="optimizer step", ylabel="loss a label token (nats)", title=title)
    if curves:
        _logarithmic(axes)
        _steps(axes, [max(loss.step for loss in [*record.losses, *record.eval_losses]) for _, record in curves])
        legend_beside(axes)
    else:
        nothing(axes, "no run has a loss yet")
    return drawn(figure, f"training and validation loss by step of {listed([name.strip() for name, _ in curves])}")


def _curve(axes: Axes, losses: list[Loss], **style: Any) -> None:
    if losses:
        axes.plot([point.step for point in losses], [point.loss for point in losses], **style)


def _steps(axes: Axes, last: Sequence[float]) -> None:
    """A logarithmic scale where the longest run would leave the shortest no room."""
    if max(last) > LONG * min(last) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")


def _logarithmic(axes: Axes) -> None:
    """A logarithmic scale with plain numbers at it."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


# Plots of rows: throughput, memory beside its plan, scaling efficiency.

SHOWN_ROWS = 16
"""More bars would make a page of one plot."""
SHOWN_PAIRS = 12
BAR_INCHES = 0.4
LINES = ("-", ":", "-.", "--")


def throughput_plot(lines: Sequence[Values]) -> Plot:
    """Training samples a second of each row, with the interval of its repeats."""
    found = [line for line in lines if line["samples_per_second"] is not None]
    timed = found[:SHOWN_ROWS]
    labels = [literal(line["label"]) for line in timed]
    margins = Margins(left=0.25 + text_inches(labels))
    figure, (axes,) = new_axes(8, 1.2 + BAR_INCHES * max(2, len(timed)), margins=margins)
    axes.barh(
        labels,
        [line["samples_per_second"] for line in timed],
        height=0.6,
        color=[technique_color(line["technique"]) for line in timed],
    )
    _ends(axes, timed)
    title = f"Training throughput, all ranks together{of_all(len(timed), len(found))}"
    axes.set(xlabel="samples/s; lines: 95 % interval over repeats", title=title)
    _downwards(axes, timed, "no run was timed yet")
    return drawn(figure, f"training samples a second of {listed([line['label'] for line in timed])}")


def planned_plot(lines: Sequence[Values]) -> Plot:
    """Peak memory of the fullest pod, and beside it the plan and what is measured against it, by row."""
    found = [line for line in lines if line["peak_memory_bytes"] is not None or line["planned_bytes"] is not None]
    shown = found[:SHOWN_PAIRS]
    labels = [literal(line["label"]) for line in shown]
    margins = Margins(left=0.25 + text_inches(labels))
    figure, axes = new_axes(9, 1.2 + 1.4 * BAR_INCHES * max(2, len(shown)), columns=2, margins=margins)
    kind = _main_kind(shown, "memory_kind")
    peaks = [line["peak_memory_bytes"] if line["memory_kind"] == kind else None for line in shown]
    _bars(axes[0], labels, {"peak": peaks}, GIB)
    axes[0].set(xlabel=f"GiB {kind or ''}", title="Peak of the fullest pod")
    kind = _main_kind(shown, "planned_kind")
    planned = [line if line["planned_kind"] == kind else {} for line in shown]
    beside = {name: [line.get(f"{name}_bytes") for line in planned] for name in ("planned", "measured")}
    _bars(axes[1], labels, beside, MIB)
    axes[1].set(xlabel=f"MiB {kind or ''}", title=f"Plan and measurement{of_all(len(shown), len(found))}")
    axes[1].set_yticklabels([])
    return drawn(figure, f"memory of {listed([line['label'] for line in shown])}: peak; planned beside measured")


def scaling_plot(lines: Sequence[Values]) -> Plot:
    """Scaling efficiency against processes: a line for each technique of rows that have one base."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for line in lines:
        if line["scaling_efficiency"] is not None and not line["differs_in"]:
            of_base = (line["technique"], line["base_row"])
            curves.setdefault(of_base, []).append((line["world_size"], line["scaling_efficiency"]))
    shown = dict(list(curves.items())[:SHOWN_CURVES])
    bases = list(dict.fromkeys(base for _, base in curves))
    labels = [literal(f"{technique}, base {base}" if len(bases) > 1 else technique) for technique, base in shown]
    figure, (axes,) = new_axes(8, 4, margins=beside_legend(labels))
    axes.axhline(1.0, color="0.5", linestyle="--", linewidth=1, label="ideal")
    for label, ((technique, base), points) in zip(labels, shown.items(), strict=True):
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            color=technique_color(technique),
            linestyle=LINES[bases.index(base) % len(LINES)],
            label=label,
        )
    axes.set(
        xlabel="processes",
        ylabel="scaling efficiency",
        title=f"Speed-up over the base row, a process{of_all(len(shown), len(curves), 'curves')}",
    )
    if curves:
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({processes for points in shown.values() for processes, _ in points}))
        legend_beside(axes)
    else:
        nothing(axes, "no two rows differ in nothing but technique and pods")
    return drawn(figure, f"scaling efficiency by processes of {listed([technique for technique, _ in shown])}")


def _main_kind(lines: Sequence[Values], key: str) -> str | None:
    """The kind of memory that most rows have: those of another are not drawn beside them."""
    kinds = Counter(line[key] for line in lines if line[key] is not None)
    return max(kinds, key=kinds.__getitem__, default=None)


def _bars(axes: Axes, labels: Sequence[str], series: dict[str, list[float | None]], unit: int) -> None:
    """Bars side by side for each label; what was not measured has none."""
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * height for i in range(len(values))]
        sizes = [0.0 if value is None else value / unit for value in values]
        bars = axes.barh(places, sizes, height=0.9 * height, label=name, color=("C0", "C1")[number])
        axes.bar_label(bars, labels=["" if not size else f"{size:.3g}" for size in sizes], padding=3, fontsize="small")
    axes.set_yticks(range(len(labels)), labels)
    axes.margins(x=0.4 if len(series) > 1 else 0.15, y=0.02)
    axes.locator_params(axis="x", nbins=5)
    axes.invert_yaxis()
    if not any(value for values in series.values() for value in values):
        nothing(axes, "not measured")
    elif len(series) > 1:
        axes.legend(fontsize="small", loc="lower right")


def _ends(axes: Axes, timed: Sequence[Values]) -> None:
    """At the end of each bar its interval, where it has one, and behind it the value."""
    intervals = {place: line["samples_per_second_interval"] for place, line in enumerate(timed)}
    halves = {place: (ends[1] - ends[0]) / 2 for place, ends in intervals.items() if ends is not None}
    rates = [line["samples_per_second"] for line in timed]
    centres = [rates[place] for place in halves]
    axes.errorbar(centres, list(halves), xerr=list(halves.values()), fmt="none", capsize=3, elinewidth=1, ecolor="0.2")
    for place, rate in enumerate(rates):
        end = (rate + halves.get(place, 0.0), place)
        axes.annotate(f"{rate:.4g}", end, xytext=(4, 0), textcoords="offset points", va="center")


def _downwards(axes: Axes, shown: Sequence[Values], why: str) -> None:
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.set_xlim(left=0)
    if not shown:
        nothing(axes, why)
