"""Plots of runs and of rows, drawn without a display: speed against memory, losses, rates, memory and use over time.

They are made for a page that may be as narrow as a phone: a few inches wide, text of one size, legends below.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from zeropods.measure.record import Record
from zeropods.report.entry import MEMORY_COLUMNS, USE_COLUMNS, Timeline
from zeropods.report.formulas import DEVICE_USED, Values
from zeropods.tables import GIB, MIB, digits
from zeropods.techniques import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
COMPRESSION = 3
"""PNG compression level, at most 9: a file is a fifth larger, and written in a third of the time."""
SHOWN_WIDTH = 720
"""Width of a plot in a notebook, in CSS pixels."""
WIDTH = 4.8
"""Width of a summary's plot in inches: shown 420 pixels wide, its words are still 10 pixels high."""
WIDE = 6.4
"""Width in inches of a plot that only a notebook shows."""
SHOWN_LETTERS = 34
"""Maximum number of characters shown of a run's name."""
SHOWN_CURVES, SHOWN_NAMES = 8, 8
"""Maximum number of curves in a plot, more could not be told apart, and of runs that are named beside one curve."""
SHOWN_ROWS, SHOWN_PAIRS, SHOWN_RUNS, SHOWN_RANKS = 16, 12, 12, 4
"""Most rows in plots of speed and memory, runs over time, and ranks in their legend; more would fill a whole page."""
BAR_INCHES = 0.34
LINE_STYLES = ("-", ":", "-.", "--")
COLORS = ("C0", "C1", "C2", "C8", "C4", "C5", "C9", "C3")
"""Colours of techniques, in the order of `NAMES`."""
MARKERS = "os^Dv<>pP*Xh"
"""Marker shapes by number of pods."""
POINT, MARKER = 72, 10
"""Number of points in an inch; width of a marker in points."""
LETTER_WIDTH, LETTER_HEIGHT = 6.5, 9
"""Approximate size in points of a letter beside a marker."""
BESIDE = ((7, 4), (7, -12), (-7, 4), (-7, -12), (0, 9), (0, -17), (18, 4), (-18, 4))
"""Places for the letters of a marker, in points from its centre; the first place that is free is taken."""
LONG = 10
"""Ratio of the largest value to the smallest above which a scale is logarithmic."""
CROWDED = 100
"""The same ratio, above which a horizontal logarithmic scale labels only the powers of ten."""
HOVER = "hover "
"""Prefix of the id of a drawn element; the rest of that id is shown when the pointer is over the element."""


@dataclass(frozen=True)
class Plot:
    """A finished plot, which a notebook shows and a report writes."""

    figure: Figure
    text: str
    """What the plot shows, for those who cannot see it."""

    @cached_property
    def svg(self) -> str:
        """The SVG image for a page, which scales to any width; its words are text. Equal figures give equal SVG."""
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.text}):
            # Not savefig, which would draw twice: first for the layout, which every drawing computes anyway.
            FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
        drawn = buffer.getvalue().partition("<svg ")[2]
        titled = re.sub(rf'<g id="{HOVER}([^"]*)">', r"<g><title>\1</title>", drawn)
        return f'<svg role="img" aria-label="{escape(self.text)}" {titled}'

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        buffer = io.BytesIO()
        quick = {"compress_level": COMPRESSION}
        self.figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None}, pil_kwargs=quick)
        image = base64.b64encode(buffer.getvalue()).decode()
        return {"image/png": image, "text/plain": self.text}, {"image/png": {"width": SHOWN_WIDTH}}


# Frames: axes with their titles, legends and words.


def new_axes(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches with `rows` x `columns` axes, row by row, bound to no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
    return figure, axes


def technique_color(technique: str) -> str:
    """The colour of a technique, the same in every plot; grey for a technique of the user's own."""
    return COLORS[NAMES.index(technique)] if technique in NAMES else "0.6"


def stacked_bars(axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> list[BarContainer]:
    """Draw a bar for each name, the first one on top, with its parts end to end, each in a colour of its own."""
    drawn_parts, ends = [], [0.0] * len(names)
    for label, widths in parts.items():
        drawn_parts.append(axes.barh(range(len(names)), widths, left=ends, height=0.65, label=label))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    return drawn_parts


def legend_below(figure: Figure, columns: int = 2, handles: Sequence[Any] = ()) -> None:
    """Put a legend below all axes, where it covers no curve or bar; without handles, it has everything with a label."""
    given = {"handles": handles} if handles else {}
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small", frameon=False, **given)


def _nothing(axes: Axes, why: str) -> None:
    """Say in place of a plot why there is nothing to draw."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, fontsize="small")
    axes.set(xticks=[], yticks=[])


def _literal(name: str) -> str:
    """A name, shortened, and changed so that matplotlib sees no formula in it and its legend does not hide it."""
    short = name if len(name) <= SHOWN_LETTERS else f"…{name[1 - SHOWN_LETTERS :]}"
    shown = short.replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown


def _title(axes: Axes, text: str, shown: int = 0, found: int = 0, what: str = "rows") -> None:
    """Set a title, which says so where not everything is drawn."""
    axes.set_title(text + (f"\n(the first {shown} of {found} {what})" if shown < found else ""), fontsize="medium")


def _plot(figure: Figure, what: str, names: Sequence[str], nothing: str = "", more: str = "") -> Plot:
    """The finished plot of something that each name has; without names, it says in words why nothing is drawn."""
    if nothing and not names:
        _nothing(figure.axes[0], nothing)
    return Plot(figure, f"{what} {', '.join(names) or 'no run'}{more}")


def _of_main_kind(lines: Sequence[Values], key: str) -> tuple[str | None, list[Values]]:
    """The kind of memory that most rows have, and all rows, emptied where they have another kind and are not drawn."""
    kinds = Counter(line[key] for line in lines if line[key] is not None)
    main = max(kinds, key=kinds.__getitem__, default=None)
    return main, [line if line[key] == main else {} for line in lines]


def _unit(kind: str | None) -> tuple[int, str]:
    """The unit in which sizes of this kind are drawn: its number of bytes, and its name."""
    return (GIB, "GiB") if kind == DEVICE_USED else (MIB, "MiB")


# Speed against memory: one point per row, the first plot of a page.


def speed_memory_plot(lines: Sequence[Values]) -> Plot:
    """Samples per second against memory: on GPUs the memory in use on the fullest one, on CPUs the live states.

    It shows the rows that are compared with each other; where none are, all rows. Up and to the left is better. Colours
    are techniques, shapes are numbers of pods; points at the same place share one text with their letters.
    """
    about = [line for line in lines if line["is_compared"]] or lines
    timed = [line for line in about if line["samples_per_second"] and line["measured_bytes"]]
    kind, of_kind = _of_main_kind(timed, "planned_kind")
    found = [line for line in of_kind if line]
    shown = found[:SHOWN_ROWS]
    figure, (axes,) = new_axes(WIDTH, 3.4 + 0.09 * len(shown))
    (unit, name), pods = _unit(kind), sorted({line["pods"] for line in shown})
    what = "of GPU memory in use" if kind == DEVICE_USED else "of parameters, gradients, optimizer states"
    axes.set(xlabel=f"{name} {what}, per process", ylabel="samples/s; lines: 95 % interval")
    _title(axes, "Speed against memory: up and left is better", len(shown), len(found))
    sizes, rates = [line["measured_bytes"] / unit for line in shown], [line["samples_per_second"] for line in shown]
    for line, size, rate in zip(shown, sizes, rates, strict=True):
        color, (low, high) = technique_color(line["technique"]), line["samples_per_second_interval"] or (rate, rate)
        span = [[max(0.0, rate - low)], [max(0.0, high - rate)]]
        axes.errorbar(size, rate, yerr=span, fmt="none", color=color, capsize=3, elinewidth=1)
        (point,) = axes.plot(
            size, rate, MARKERS[pods.index(line["pods"]) % len(MARKERS)], color=color, markersize=MARKER - 2,
            markeredgecolor="white", zorder=3, label=_literal(line["label"]),
        )  # fmt: skip
        point.set_gid(f"{HOVER}{line['label']}: {digits(rate)} samples/s, {digits(size)} {name}")
    if shown:
        _room(axes, "x", sizes)
        _room(axes, "y", rates, max((line["samples_per_second_interval"] or [0])[-1] for line in shown))
        legend_below(figure)
        _letters(axes, [line["row"] for line in shown], list(zip(sizes, rates, strict=True)))
    nothing = "no run has measured both its speed and its memory"
    return _plot(figure, "samples per second against memory of", [line["label"] for line in shown], nothing)


def _letters(axes: Axes, letters: Sequence[str], points: Sequence[tuple[float, float]]) -> None:
    """Write each point's letter beside it where it covers nothing; points at one place share one text of letters."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    places = [tuple(axes.transData.transform(point) * POINT / figure.dpi) for point in points]
    texts: dict[tuple[float, ...], list[int]] = {}
    for number, place in enumerate(places):
        near = next((one for one in texts if math.dist(one, place) < MARKER / 2), place)
        texts.setdefault(near, []).append(number)
    # Left, bottom, width and height of everything that is placed already.
    taken: list[Sequence[float]] = [(x - MARKER / 2, y - MARKER / 2, MARKER, MARKER) for x, y in places]
    for (x, y), numbers in texts.items():
        text = ", ".join(letters[number] for number in numbers)
        width = LETTER_WIDTH * len(text)
        boxes = {
            (right, up): (x + right - width * (1 - (right > 0) - (right == 0) / 2), y + up, width, LETTER_HEIGHT)
            for right, up in BESIDE
        }
        chosen = next((at for at, box in boxes.items() if not any(_overlap(box, one) for one in taken)), BESIDE[0])
        taken.append(boxes[chosen])
        side = "center" if chosen[0] == 0 else "left" if chosen[0] > 0 else "right"
        axes.annotate(text, points[numbers[0]], xytext=chosen, textcoords="offset points", ha=side, fontsize="small")


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(one[i] < other[i] + other[i + 2] and other[i] < one[i] + one[i + 2] for i in (0, 1))


def _room(axes: Axes, which: str, values: Sequence[float], top: float = 0.0) -> None:
    """Set a scale with room at its ends, which reaches at least `top`; it is logarithmic where values lie far apart."""
    least, most = min(values), max(values)
    if most > LONG * least > 0:
        _logarithmic(axes, which)
        axes.set(**{f"{which}lim": (least / 1.5, max(most * 1.7, top))})
    else:
        axes.set(**{f"{which}lim": (0, max(1.15 * most, 1.03 * top))})


def _logarithmic(axes: Axes, which: str) -> None:
    """Set a logarithmic scale with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    least, most = axis.get_data_interval()
    is_crowded = which == "x" and most > CROWDED * least
    axis.set_major_locator(LogLocator(subs=(1,) if is_crowded else (1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


# Loss curves.


def loss_plot(records: Sequence[tuple[str, Record | None]]) -> Plot:
    """Training and validation loss of each run by optimizer step, on a logarithmic scale, with at most eight curves.

    Runs whose losses are equal after rounding share a curve: if drawn over each other, only the last would be seen.

    Args:
        records: names of the runs, and their records.
    """
    alike: dict[tuple[Any, ...], tuple[list[str], Record]] = {}
    for name, of in records:
        if of is not None and (of.losses or of.eval_losses):
            losses = tuple((point.step, f"{point.loss:.2g}") for point in (*of.losses, *of.eval_losses))
            alike.setdefault(losses, ([], of))[0].append(_literal(name))
    curves = list(alike.values())[:SHOWN_CURVES]
    named = [names if len(names) <= SHOWN_NAMES else [*names[: SHOWN_NAMES - 1], "others"] for names, _ in curves]
    figure, (axes,) = new_axes(WIDTH, 3.4 + 0.09 * sum(map(len, named)))
    lines: dict[str, Any] = {"linewidth": 1, "alpha": 0.6}
    dots: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4, "linestyle": "--"}
    for number, (_, record) in enumerate(curves):
        color = f"C{number}"
        for points, style in ((record.losses, lines), (record.eval_losses, dots)):
            if points:
                axes.plot([point.step for point in points], [point.loss for point in points], color=color, **style)
        axes.plot([], [], color=color, label="\n= ".join(named[number]))
    axes.set(xlabel="optimizer step", ylabel="loss per label token (nats)")
    _title(axes, "Loss: lines training, dots validation", len(curves), len(alike), "curves")
    axes.xaxis.set_major_formatter("{x:,g}")
    if curves:
        lasts = [max(point.step for point in (*of.losses, *of.eval_losses)) for _, of in curves]
        _logarithmic(axes, "y")
        if max(lasts) > LONG * min(lasts) > 0:
            # On a linear scale the longest run would leave no room for the shortest.
            _logarithmic(axes, "x")
        legend_below(figure)
    shown = [" = ".join(names) for names in named]
    return _plot(figure, "training and validation loss by step of", shown, "no run has a loss yet")


# Plots of rows: throughput, memory beside its plan, scaling efficiency.


def throughput_plot(lines: Sequence[Values]) -> Plot:
    """Training samples per second of each row: the mean, a dot for each repeat, and the interval where there is one."""
    found = [line for line in lines if line["samples_per_second"] is not None]
    timed = found[:SHOWN_ROWS]
    figure, (axes,) = new_axes(WIDTH, 1.3 + BAR_INCHES * max(2, len(timed)))
    rates = [line["samples_per_second"] for line in timed]
    colors = [technique_color(line["technique"]) for line in timed]
    axes.barh([_literal(line["label"]) for line in timed], rates, height=0.6, color=colors)
    for place, (rate, line) in enumerate(zip(rates, timed, strict=True)):
        low, high = line["samples_per_second_interval"] or (rate, rate)
        repeats = line["samples_per_second_values"]
        if len(repeats) > 1:
            axes.plot(repeats, [place] * len(repeats), ".", color="0.2", markersize=4)
        if high > low:
            span = [[max(0.0, rate - low)], [high - rate]]
            axes.errorbar(rate, place, xerr=span, fmt="none", capsize=3, elinewidth=1, ecolor="0.2")
        end = max(high, *repeats, rate)
        axes.annotate(digits(rate), (end, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlabel("samples/s\ndots: repeats; lines: 95 % interval", fontsize="small")
    _title(axes, "Training throughput, all ranks together", len(timed), len(found))
    axes.invert_yaxis()
    axes.margins(x=0.2, y=0.02)
    axes.set_xlim(left=0)
    return _plot(figure, "training samples per second of", [line["label"] for line in timed], "no run was timed yet")


def planned_plot(lines: Sequence[Values]) -> Plot:
    """Peak memory of the fullest pod of each row, and below it the planned memory and the measured one."""
    found = [line for line in lines if line["peak_memory_bytes"] is not None or line["planned_bytes"] is not None]
    shown = found[:SHOWN_PAIRS]
    labels = [_literal(line["label"]) for line in shown]
    figure, axes = new_axes(WIDTH, 2.2 + 2.2 * BAR_INCHES * max(2, len(shown)), rows=2)
    kind, used = _of_main_kind(shown, "memory_kind")
    bars_beside(axes[0], labels, {"peak": [one.get("peak_memory_bytes") for one in used]}, GIB)
    axes[0].set_xlabel(f"GiB {kind or ''}")
    _title(axes[0], "Peak of the fullest pod", len(shown), len(found))
    kind, planned = _of_main_kind(shown, "planned_kind")
    unit, name = _unit(kind)
    bars_beside(
        axes[1], labels, {each: [one.get(f"{each}_bytes") for one in planned] for each in ("planned", "measured")}, unit
    )
    axes[1].set_xlabel(f"{name} {kind or ''}")
    _title(axes[1], "Plan and measurement")
    legend_below(figure, handles=axes[1].containers)
    return _plot(figure, "memory of", [line["label"] for line in shown], more=": peak; planned beside measured")


def scaling_plot(lines: Sequence[Values]) -> Plot:
    """Scaling efficiency against processes: a line for each technique of the rows that are compared with each other."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for line in lines:
        if line["is_compared"] and line["scaling_efficiency"] is not None:
            point = (line["world_size"], line["scaling_efficiency"])
            curves.setdefault((line["technique"], line["base"]), []).append(point)
    shown = dict(list(curves.items())[:SHOWN_CURVES])
    bases = list(dict.fromkeys(base for _, base in curves))
    figure, (axes,) = new_axes(WIDTH, 3.4)
    axes.axhline(1.0, color="0.5", linestyle="--", linewidth=1, label="ideal")
    for (technique, base), points in shown.items():
        style = LINE_STYLES[bases.index(base) % len(LINE_STYLES)]
        label = _literal(f"{technique}, baseline {base}" if len(bases) > 1 else technique)
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", color=technique_color(technique), linestyle=style, label=label)
    axes.set(xlabel="processes", ylabel="scaling efficiency")
    _title(axes, "Speed-up over the baseline, per process", len(shown), len(curves), "curves")
    if curves:
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({processes for points in shown.values() for processes, _ in points}))
        legend_below(figure)
    nothing = "no two rows differ only in technique and pods"
    return _plot(figure, "scaling efficiency by processes of", [technique for technique, _ in shown], nothing)


def bars_beside(
    axes: Axes, labels: Sequence[str], series: dict[str, list[float | None]], unit: float, first_color: int = 0
) -> None:
    """Draw bars side by side for each label; a value that was not measured has none."""
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * height for i in range(len(values))]
        sizes = [0.0 if value is None else value / unit for value in values]
        bars = axes.barh(places, sizes, height=0.9 * height, label=name, color=f"C{first_color + number}")
        axes.bar_label(bars, labels=[digits(size) if size else "" for size in sizes], padding=3, fontsize="small")
    axes.set_yticks(range(len(labels)), labels)
    axes.margins(x=0.15, y=0.02)
    axes.locator_params(axis="x", nbins=5)
    axes.invert_yaxis()
    if not any(value for values in series.values() for value in values):
        _nothing(axes, "not measured")


# Memory and use over time, as each rank's sampler wrote them: `memory/N.csv` of a run folder.

PANEL_COLUMNS, PANEL_INCHES = 2, 1.6
PHASE_COLORS = {
    "load": "#e8e8e8",
    "first_step": "#fde9c8",
    "steady": "#ffffff",
    "evaluate": "#d9ecd9",
    "save": "#d6e4f5",
}


def over_time(timelines: Sequence[Timeline], found: int, what: str) -> Plot:
    """Memory or use of each rank over time, by phase, of at most twelve runs; those of the same kind share one scale.

    Args:
        found: number of runs there are; the title says so if not all are drawn.
        what: `memory`, of the first kind that has samples; `use`, of the GPU, or of the cores if there is no GPU.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds, unit = (MEMORY_COLUMNS, GIB) if what == "memory" else (USE_COLUMNS, 1)
    shown = [(timeline, column) for timeline in timelines if (column := timeline.column(kinds))]
    columns = max(1, min(PANEL_COLUMNS, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    figure, axes = new_axes(WIDTH, 1.1 + PANEL_INCHES * rows, columns=columns, rows=rows)
    for number, (one, (timeline, column)) in enumerate(zip(axes, shown, strict=False)):
        _panel(one, timeline, column, unit)
        one.set_ylim(0, 1.1 * (max(other.peak(column) for other, kind in shown if kind == column) / unit))
        if number % columns == 0:
            one.set_ylabel(kinds[column], fontsize="small")
        if number + columns >= len(shown):
            one.set_xlabel("s", fontsize="small")
    for empty in axes[len(shown) :]:
        _nothing(empty, "" if shown else f"no run has samples of its {what}")
        empty.set_axis_off()
    more = f"\n(the first {len(shown)} of {found} rows)" if len(shown) < found else ""
    figure.suptitle(f"{what.capitalize()} of each rank over time{more}", fontsize="medium")
    if shown:
        # The legend says what the colours behind the lines mean, and which line is which rank.
        ranks = min(SHOWN_RANKS, max(max(timeline.ranks) for timeline, _ in shown) + 1)
        handles = [Patch(fc=color, ec="0.8", label=phase.replace("_", " ")) for phase, color in PHASE_COLORS.items()]
        lines = [Line2D([], [], color=f"C{rank % 10}", label=f"rank {rank}") for rank in range(ranks)]
        legend_below(figure, 5, [*handles, *lines])
    return _plot(figure, f"{what} over time of", [timeline.label for timeline, _ in shown])


def _panel(axes: Axes, timeline: Timeline, column: str, unit: int) -> None:
    """Draw one run: a line for each rank, and behind them the phases of the first rank, each up to the first sample of
    the next phase."""
    for number, (rank, samples) in enumerate(timeline.ranks.items()):
        seconds = list(samples["unix_seconds"] - samples["unix_seconds"].iloc[0])
        for phase, members in groupby(enumerate(samples["phase"] if number == 0 else ()), lambda pair: pair[1]):
            places = [place for place, _ in members]
            end = seconds[min(places[-1] + 1, len(seconds) - 1)]
            axes.axvspan(seconds[places[0]], end, color=PHASE_COLORS.get(phase, "white"), linewidth=0, zorder=0)
        axes.plot(seconds, samples[column] / unit, linewidth=1.2, color=f"C{rank % 10}")
    axes.set_title(_literal(timeline.label), fontsize="small")
    axes.locator_params(nbins=5)
    axes.tick_params(labelsize="small")
