"""Plots of runs and of rows, drawn without a display: speed against memory, losses, rates, memory
and use over time.

They are made for a page that may be as narrow as a phone: a few inches wide, text of one size,
legends below.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from zeropods.measure.record import Loss, Record
from zeropods.report.entry import MEMORY_COLUMNS, USE_COLUMNS, Timeline
from zeropods.report.formulas import DEVICE_USED
from zeropods.report.row import Figures, Row
from zeropods.tables import GIB, MIB, digits
from zeropods.techniques import color_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

# A finished plot, as a notebook and a page show it.

DOTS_PER_INCH = 150
COMPRESSION = 3
"""PNG compression level, at most 9: a file is a fifth larger, and written in a third of the
time."""
SHOWN_WIDTH = 720
"""Width of a plot in a notebook, in CSS pixels."""
HOVER = "hover "
"""Prefix of the id of a drawn element; the rest of the id is shown when the pointer is over the
element."""


@dataclass(frozen=True)
class Plot:
    """A finished plot, which a notebook shows and a report writes."""

    figure: Figure
    text: str
    """What the plot shows, for those who cannot see it."""

    @cached_property
    def svg(self) -> str:
        """The SVG image for a page, which scales to any width; its words are text. Equal figures
        give equal SVG."""
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.StringIO()
        # Matplotlib's ids are random without a salt, and would repeat those of the page's other
        # plots with the same salt.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.text}):
            # Not savefig, which would draw twice: first for the layout, which every drawing
            # computes anyway.
            metadata = {"Date": None, "Creator": None}
            FigureCanvasSVG(self.figure).print_svg(buffer, metadata=metadata)
        # A page has no place for the XML declaration before the image.
        _, _, drawing = buffer.getvalue().partition("<svg ")
        # Browsers show the title of an element when the pointer is over it.
        titled = re.sub(rf'<g id="{HOVER}([^"]*)">', r"<g><title>\1</title>", drawing)
        return f'<svg role="img" aria-label="{escape(self.text)}" {titled}'

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        buffer = io.BytesIO()
        self.figure.savefig(
            buffer,
            format="png",
            dpi=DOTS_PER_INCH,
            metadata={"Software": None},
            pil_kwargs={"compress_level": COMPRESSION},
        )
        image = base64.b64encode(buffer.getvalue()).decode()
        return {"image/png": image, "text/plain": self.text}, {"image/png": {"width": SHOWN_WIDTH}}


def _finished_plot(
    figure: Figure, what: str, names: Sequence[str], nothing: str = "", more: str = ""
) -> Plot:
    """The finished plot, with a text of `what`, the names and `more`.

    Args:
        what: what is drawn of each name, such as `memory of`.
        names: labels of all rows or runs that are drawn.
        nothing: why nothing is drawn, which is written into the plot where there are no names;
            if empty, the plot says so itself.
        more: what follows the names in the plot's text.
    """
    if nothing and not names:
        _write_instead(figure.axes[0], nothing)
    return Plot(figure, f"{what} {', '.join(names) or 'no run'}{more}")


# Frames: axes with their titles, legends and words.

PAGE_WIDTH = 4.8
"""Width of a summary's plot in inches: shown 420 pixels wide, its words are still 10 pixels
high."""
WIDE = 6.4
"""Width in inches of a plot that only a notebook shows."""
LONGEST_NAME = 34
"""Maximum number of characters shown of a run's name."""
BAR_INCHES = 0.34
LONG_RATIO = 10
"""Ratio of the largest value to the smallest above which a scale is logarithmic."""
CROWDED_RATIO = 100
"""The same ratio, above which a horizontal logarithmic scale labels only the powers of ten."""


def new_axes(
    width: float, height: float, columns: int = 1, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches and its `rows` x `columns` axes, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which would keep every figure and look for a display. The canvas attaches itself
    # to the figure.
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return figure, all_axes


def stacked_bars(
    axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]
) -> list[BarContainer]:
    """Draw a bar for each name, the first one on top, with its parts end to end, each in a colour
    of its own; return the bars of each part.

    Args:
        parts: lengths by the label of a part, one for each name.
    """
    drawn_parts = []
    ends = [0.0] * len(names)
    for label, widths in parts.items():
        drawn_parts.append(
            axes.barh(range(len(names)), widths, left=ends, height=0.65, label=label)
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    return drawn_parts


def bars_beside(
    axes: Axes,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    unit: float,
    first_color: int = 0,
) -> None:
    """Draw a bar of each series for each label, side by side, with its value written behind it; a
    value that was not measured has no bar.

    Args:
        series: values by name of the series, one for each label.
        unit: what the values are divided by.
        first_color: number of the first series' colour in matplotlib's cycle.
    """
    # The bars of a label fill 0.8 of the distance to the next label.
    height = 0.8 / len(series)
    middle = (len(series) - 1) / 2
    for number, (name, values) in enumerate(series.items()):
        positions = [i + (number - middle) * height for i in range(len(values))]
        lengths = [0.0 if value is None else value / unit for value in values]
        color = f"C{first_color + number}"
        bars = axes.barh(positions, lengths, height=0.9 * height, label=name, color=color)
        texts = [digits(length) if length else "" for length in lengths]
        axes.bar_label(bars, labels=texts, padding=3, fontsize="small")
    axes.set_yticks(range(len(labels)), labels)
    axes.margins(x=0.15, y=0.02)
    axes.locator_params(axis="x", nbins=5)
    axes.invert_yaxis()
    has_a_bar = any(any(values) for values in series.values())
    if not has_a_bar:
        _write_instead(axes, "not measured")


def legend_below(figure: Figure, columns: int = 2, handles: Sequence[Any] = ()) -> None:
    """Put a legend below all axes, where it covers no curve or bar.

    Args:
        handles: what it explains; everything that has a label if not given.
    """
    chosen = {"handles": handles} if handles else {}
    figure.legend(
        loc="outside lower center", ncols=columns, fontsize="small", frameon=False, **chosen
    )


def _write_instead(axes: Axes, why: str) -> None:
    """Write into empty axes why there is nothing to draw."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, fontsize="small")
    axes.set(xticks=[], yticks=[])


def _shown_name(name: str) -> str:
    """A name, shortened, and changed so that matplotlib sees no formula in it and its legend does
    not hide it."""
    if len(name) > LONGEST_NAME:
        # The end tells runs apart.
        name = f"…{name[1 - LONGEST_NAME :]}"
    name = name.replace("$", r"\$")
    # Matplotlib leaves labels that begin with `_` out of legends.
    return f" {name}" if name.startswith("_") else name


def _set_title(axes: Axes, text: str, shown: int = 0, total: int = 0, what: str = "rows") -> None:
    """Set a title, which says so where fewer things are drawn than there are.

    Args:
        shown: number of things that are drawn.
        total: number of things that there are.
        what: what the things are, in the plural.
    """
    if shown < total:
        text += f"\n(the first {shown} of {total} {what})"
    axes.set_title(text, fontsize="medium")


def _set_limits(axes: Axes, which: str, values: Sequence[float], top: float = 0.0) -> None:
    """Set a scale with room at its ends, which reaches at least `top`; it is logarithmic where
    values lie far apart.

    Args:
        which: the axis, `x` or `y`.
    """
    smallest = min(values)
    largest = max(values)
    if _lie_far_apart(values):
        _set_logarithmic(axes, which)
        limits = (smallest / 1.5, max(largest * 1.7, top))
    else:
        limits = (0, max(1.15 * largest, 1.03 * top))
    axes.set(**{f"{which}lim": limits})


def _lie_far_apart(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic scale, which is possible only where all are above 0."""
    smallest = min(values)
    return smallest > 0 and max(values) > LONG_RATIO * smallest


def _set_logarithmic(axes: Axes, which: str) -> None:
    """Set a logarithmic scale with plain numbers, for what is drawn already.

    Args:
        which: the axis, `x` or `y`.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    smallest, largest = axis.get_data_interval()
    is_crowded = which == "x" and largest > CROWDED_RATIO * smallest
    labelled_multiples: tuple[int, ...] = (1, 2, 5)
    if is_crowded:
        labelled_multiples = (1,)
    axis.set_major_locator(LogLocator(subs=labelled_multiples))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


# What is drawn of rows.


def _of_main_kind(
    rows: Sequence[Row], kind_of: Callable[[Row], str | None]
) -> tuple[str | None, list[Row | None]]:
    """The kind of memory that most rows have, None where no row has one; and the rows in their
    order, with None in place of each one of another kind, which is not drawn."""
    kinds = [kind_of(row) for row in rows]
    counts = Counter(kind for kind in kinds if kind is not None)
    main_kind = max(counts, key=counts.__getitem__, default=None)
    rows_of_main_kind: list[Row | None] = []
    for row, kind in zip(rows, kinds, strict=True):
        rows_of_main_kind.append(row if kind == main_kind else None)
    return main_kind, rows_of_main_kind


def _figures(rows: Sequence[Row | None]) -> list[Figures]:
    """The figures of rows; empty ones in place of a row that is not drawn."""
    return [Figures() if row is None else row.figures for row in rows]


def _memory_kind(row: Row) -> str | None:
    return row.figures.memory_kind


def _planned_kind(row: Row) -> str | None:
    return row.figures.planned_kind


def _memory_unit(kind: str | None) -> tuple[int, str]:
    """The unit in which memory of this kind is drawn: its number of bytes, and its name. Live
    states on CPUs are those of small models."""
    return (GIB, "GiB") if kind == DEVICE_USED else (MIB, "MiB")


def _rate_interval(row: Row) -> tuple[float, float]:
    """The 95 % interval of a timed row's samples per second; where there is none, the mean
    twice."""
    low, high = row.samples_per_second_interval or (row.rate, row.rate)
    return low, high


# Speed against memory: one point per row, the first plot of a page.

PLOTTED_ROWS = 16
"""Most rows in plots of speed, where more would fill a whole page."""
MARKERS = "os^Dv<>pP*Xh"
"""Marker shapes by number of pods."""
POINTS_PER_INCH = 72
MARKER_POINTS = 10
"""Width of a marker in points."""
LETTER_WIDTH = 6.5
"""Approximate width in points of a letter beside a marker."""
LETTER_HEIGHT = 9
"""Approximate height in points of a letter."""
BESIDE = ((7, 4), (7, -12), (-7, 4), (-7, -12), (0, 9), (0, -17), (18, 4), (-18, 4))
"""Offsets of the letters from the centre of their marker, in points to the right and up; the first
at which they cover nothing is taken."""


def speed_memory_plot(rows: Sequence[Row]) -> Plot:
    """Samples per second against memory: on GPUs the memory in use on the fullest one, on CPUs the
    live states.

    It shows the rows that are compared with each other; where none are, all rows. Up and to the
    left is better. Colours are techniques, shapes are numbers of pods; points at the same place
    share one text with their letters.
    """
    kind, rows_of_kind = _of_main_kind(_measured_rows(rows), _planned_kind)
    comparable = [row for row in rows_of_kind if row is not None]
    shown = comparable[:PLOTTED_ROWS]

    figure, (axes,) = new_axes(PAGE_WIDTH, 3.4 + 0.09 * len(shown))
    unit, unit_name = _memory_unit(kind)
    what = "of parameters, gradients, optimizer states"
    if kind == DEVICE_USED:
        what = "of GPU memory in use"
    axes.set(xlabel=f"{unit_name} {what}, per process", ylabel="samples/s; lines: 95 % interval")
    _set_title(axes, "Speed against memory: up and left is better", len(shown), len(comparable))

    sizes = [(row.figures.measured_bytes or 0.0) / unit for row in shown]
    rates = [row.rate for row in shown]
    pods = sorted({row.known_config.pods for row in shown})
    for row, size in zip(shown, sizes, strict=True):
        marker = MARKERS[pods.index(row.known_config.pods) % len(MARKERS)]
        _draw_point(axes, row, size, unit_name, marker)
    if shown:
        _set_limits(axes, "x", sizes)
        ends_of_intervals = [_rate_interval(row)[1] for row in shown]
        _set_limits(axes, "y", rates, top=max(ends_of_intervals))
        legend_below(figure)
        letters = [row.letter for row in shown]
        _write_letters(axes, letters, list(zip(sizes, rates, strict=True)))
    return _finished_plot(
        figure,
        "samples per second against memory of",
        [row.label for row in shown],
        nothing="no run has measured both its speed and its memory",
    )


def _measured_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows whose speed and memory were measured: of those that are compared with each other,
    or of all where none are."""
    compared = [row for row in rows if row.is_compared]
    measured = []
    for row in compared or rows:
        if row.figures.samples_per_second and row.figures.measured_bytes:
            measured.append(row)
    return measured


def _draw_point(axes: Axes, row: Row, size: float, unit_name: str, marker: str) -> None:
    """Draw a row's samples per second, with their interval, at the size of its memory.

    Args:
        size: the memory in the unit of the plot.
        marker: the marker's shape, as matplotlib calls it.
    """
    color = color_of(row.known_config.technique)
    rate = row.rate
    low, high = _rate_interval(row)
    # Lengths below and above the point; rounding must not make one of them negative.
    span = [[max(0.0, rate - low)], [max(0.0, high - rate)]]
    axes.errorbar(size, rate, yerr=span, fmt="none", color=color, capsize=3, elinewidth=1)
    (point,) = axes.plot(
        size,
        rate,
        marker,
        color=color,
        markersize=MARKER_POINTS - 2,
        markeredgecolor="white",
        zorder=3,
        label=_shown_name(row.label),
    )
    point.set_gid(f"{HOVER}{row.label}: {digits(rate)} samples/s, {digits(size)} {unit_name}")


class Area(NamedTuple):
    """A rectangle of a plot, in points."""

    left: float
    bottom: float
    width: float
    height: float

    def overlaps(self, other: Area) -> bool:
        """Whether both areas have a point in common that is not on their edges."""
        in_width = self.left < other.left + other.width and other.left < self.left + self.width
        in_height = (
            self.bottom < other.bottom + other.height and other.bottom < self.bottom + self.height
        )
        return in_width and in_height


def _write_letters(
    axes: Axes, letters: Sequence[str], points: Sequence[tuple[float, float]]
) -> None:
    """Write each point's letter beside its marker, where it covers no marker and no other letter if
    possible; points whose markers lie over each other share one text with their letters.

    Args:
        letters: one for each point.
        points: in the units of the axes, whose limits must be set already.
    """
    figure = axes.get_figure(root=True)
    # `new_axes` has made the axes on a figure.
    assert figure is not None
    # Only a drawing computes the layout, and with it where on the page a point lies.
    figure.draw_without_rendering()
    centres = []
    for point in points:
        x, y = axes.transData.transform(point) * POINTS_PER_INCH / figure.dpi
        centres.append((x, y))
    half = MARKER_POINTS / 2
    covered = [Area(x - half, y - half, MARKER_POINTS, MARKER_POINTS) for x, y in centres]
    for indices in _groups_of_near_centres(centres):
        first = indices[0]
        text = ", ".join(letters[index] for index in indices)
        offset, area = _free_offset(centres[first], text, covered)
        covered.append(area)
        axes.annotate(
            text,
            points[first],
            xytext=offset,
            textcoords="offset points",
            ha=_alignment(offset),
            fontsize="small",
        )


def _groups_of_near_centres(centres: Sequence[tuple[float, float]]) -> list[list[int]]:
    """The indices of the centres in groups: a centre joins the first group whose first centre lies
    within half a marker of it."""
    groups: list[list[int]] = []
    radius = MARKER_POINTS / 2
    for index, centre in enumerate(centres):
        near_groups = [group for group in groups if math.dist(centres[group[0]], centre) < radius]
        if near_groups:
            near_groups[0].append(index)
        else:
            groups.append([index])
    return groups


def _free_offset(
    centre: tuple[float, float], text: str, covered: Sequence[Area]
) -> tuple[tuple[int, int], Area]:
    """The first offset of `BESIDE` at which a text overlaps no covered area, or the first of all
    where it overlaps one at each; and the area of the text there."""
    for offset in BESIDE:
        area = _text_area(centre, offset, text)
        if not any(area.overlaps(other) for other in covered):
            return offset, area
    return BESIDE[0], _text_area(centre, BESIDE[0], text)


def _text_area(centre: tuple[float, float], offset: tuple[int, int], text: str) -> Area:
    """The area of a text at an offset from the centre of a marker, all in points."""
    x, y = centre
    right, up = offset
    width = LETTER_WIDTH * len(text)
    left = x + right
    if right == 0:
        left -= width / 2
    elif right < 0:
        left -= width
    return Area(left, y + up, width, LETTER_HEIGHT)


def _alignment(offset: tuple[int, int]) -> str:
    """The side of a text, in matplotlib's words, that stands at its offset from the marker: a text
    on the right begins there, one on the left ends there."""
    right, _ = offset
    if right == 0:
        return "center"
    return "left" if right > 0 else "right"


# Loss curves.

SHOWN_CURVES = 8
"""Maximum number of curves in a plot; more could not be told apart."""
NAMES_OF_CURVE = 8
"""Maximum number of runs that are named beside one curve."""


@dataclass
class _LossCurve:
    """The losses of a run, which may be those of other runs as well."""

    record: Record
    names: list[str] = field(default_factory=list)
    """Names of all runs that share the curve."""

    @property
    def shown_names(self) -> list[str]:
        """The names, or the first ones and `others`."""
        if len(self.names) <= NAMES_OF_CURVE:
            return self.names
        return [*self.names[: NAMES_OF_CURVE - 1], "others"]

    @property
    def last_step(self) -> int:
        """The number of the last optimizer step that has a loss."""
        return max(point.step for point in (*self.record.losses, *self.record.eval_losses))


def loss_plot(records: Sequence[tuple[str, Record | None]]) -> Plot:
    """Training and validation loss of each run by optimizer step, on a logarithmic scale, with at
    most eight curves.

    Runs whose losses are equal after rounding share a curve: if drawn over each other, only the
    last would be seen.

    Args:
        records: names of the runs, and their records.
    """
    all_curves = _loss_curves(records)
    curves = all_curves[:SHOWN_CURVES]
    lines_of_names = sum(len(curve.shown_names) for curve in curves)
    figure, (axes,) = new_axes(PAGE_WIDTH, 3.4 + 0.09 * lines_of_names)
    for number, curve in enumerate(curves):
        _draw_curve(axes, curve, f"C{number}")
    axes.set(xlabel="optimizer step", ylabel="loss per label token (nats)")
    _set_title(
        axes, "Loss: lines training, dots validation", len(curves), len(all_curves), "curves"
    )
    axes.xaxis.set_major_formatter("{x:,g}")
    if curves:
        _set_logarithmic(axes, "y")
        if _lie_far_apart([curve.last_step for curve in curves]):
            # On a linear scale the longest run would leave no room for the shortest.
            _set_logarithmic(axes, "x")
        legend_below(figure)
    return _finished_plot(
        figure,
        "training and validation loss by step of",
        [" = ".join(curve.shown_names) for curve in curves],
        nothing="no run has a loss yet",
    )


def _loss_curves(records: Sequence[tuple[str, Record | None]]) -> list[_LossCurve]:
    """The curves of all runs that have a loss; runs with losses that look the same share one."""
    # By steps and losses, rounded as far as a plot shows them.
    curves: dict[tuple[tuple[int, str], ...], _LossCurve] = {}
    for name, record in records:
        if record is None:
            continue
        points = [*record.losses, *record.eval_losses]
        if points:
            rounded_points = tuple((point.step, f"{point.loss:.2g}") for point in points)
            curve = curves.setdefault(rounded_points, _LossCurve(record))
            curve.names.append(_shown_name(name))
    return list(curves.values())


def _draw_curve(axes: Axes, curve: _LossCurve, color: str) -> None:
    """Draw training losses as a line and validation losses as dots, with one entry in the
    legend."""
    training = curve.record.losses
    if training:
        axes.plot(*_steps_and_losses(training), color=color, linewidth=1, alpha=0.6)
    validation = curve.record.eval_losses
    if validation:
        axes.plot(
            *_steps_and_losses(validation),
            color=color,
            linewidth=2,
            marker="o",
            markersize=4,
            linestyle="--",
        )
    # An empty line, whose only use is its entry in the legend.
    axes.plot([], [], color=color, label="\n= ".join(curve.shown_names))


def _steps_and_losses(points: Sequence[Loss]) -> tuple[list[int], list[float]]:
    """The steps and the losses of points, as matplotlib takes them."""
    return [point.step for point in points], [point.loss for point in points]


# Plots of rows: throughput, memory beside its plan, scaling efficiency.

PLOTTED_PAIRS = 12
"""Most rows in the plot of memory, where more would fill a whole page."""
LINE_STYLES = ("-", ":", "-.", "--")


def throughput_plot(rows: Sequence[Row]) -> Plot:
    """Training samples per second of each row: the mean, a dot for each repeat, and the interval
    where there is one."""
    timed = [row for row in rows if row.figures.samples_per_second is not None]
    shown = timed[:PLOTTED_ROWS]
    figure, (axes,) = new_axes(PAGE_WIDTH, 1.3 + BAR_INCHES * max(2, len(shown)))
    axes.barh(
        [_shown_name(row.label) for row in shown],
        [row.rate for row in shown],
        height=0.6,
        color=[color_of(row.known_config.technique) for row in shown],
    )
    for bar, row in enumerate(shown):
        _draw_spread(axes, bar, row)
    axes.set_xlabel("samples/s\ndots: repeats; lines: 95 % interval", fontsize="small")
    _set_title(axes, "Training throughput, all ranks together", len(shown), len(timed))
    axes.invert_yaxis()
    axes.margins(x=0.2, y=0.02)
    axes.set_xlim(left=0)
    return _finished_plot(
        figure,
        "training samples per second of",
        [row.label for row in shown],
        nothing="no run was timed yet",
    )


def _draw_spread(axes: Axes, bar: int, row: Row) -> None:
    """Draw over a row's bar its repeats and its interval, and write its mean to the right of them.

    Args:
        bar: index of the bar, which is its height on the axis.
    """
    rate = row.rate
    repeats = row.samples_per_second_values
    low, high = _rate_interval(row)
    if len(repeats) > 1:
        axes.plot(repeats, [bar] * len(repeats), ".", color="0.2", markersize=4)
    if high > low:
        span = [[max(0.0, rate - low)], [high - rate]]
        axes.errorbar(rate, bar, xerr=span, fmt="none", capsize=3, elinewidth=1, ecolor="0.2")
    end = max(high, *repeats, rate)
    axes.annotate(digits(rate), (end, bar), xytext=(4, 0), textcoords="offset points", va="center")


def planned_memory_plot(rows: Sequence[Row]) -> Plot:
    """Above, peak memory of the fullest pod of each row; below, planned and measured memory of one
    rank. Each of the two draws the kind of memory that most rows have."""
    known = []
    for row in rows:
        figures = row.figures
        if figures.peak_memory_bytes is not None or figures.planned_bytes is not None:
            known.append(row)
    shown = known[:PLOTTED_PAIRS]
    labels = [_shown_name(row.label) for row in shown]
    height = 2.2 + 2.2 * BAR_INCHES * max(2, len(shown))
    figure, (top, bottom) = new_axes(PAGE_WIDTH, height, rows=2)

    peak_kind, rows_of_peak_kind = _of_main_kind(shown, _memory_kind)
    peaks = [row.peak_memory_bytes for row in _figures(rows_of_peak_kind)]
    bars_beside(top, labels, {"peak": peaks}, GIB)
    top.set_xlabel(f"GiB {peak_kind or ''}")
    _set_title(top, "Peak of the fullest pod", len(shown), len(known))

    plan_kind, rows_of_plan_kind = _of_main_kind(shown, _planned_kind)
    unit, unit_name = _memory_unit(plan_kind)
    planned = [row.planned_bytes for row in _figures(rows_of_plan_kind)]
    measured = [row.measured_bytes for row in _figures(rows_of_plan_kind)]
    bars_beside(bottom, labels, {"planned": planned, "measured": measured}, unit)
    bottom.set_xlabel(f"{unit_name} {plan_kind or ''}")
    _set_title(bottom, "Plan and measurement")
    legend_below(figure, handles=bottom.containers)
    names = [row.label for row in shown]
    return _finished_plot(figure, "memory of", names, more=": peak; planned beside measured")


def scaling_plot(rows: Sequence[Row]) -> Plot:
    """Scaling efficiency against processes: a line for each technique and base of the rows that are
    compared with each other, with at most eight lines."""
    # By technique and letter of the base: numbers of processes, each with its efficiency.
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        base = row.comparison.base
        efficiency = row.comparison.scaling_efficiency
        if row.is_compared and base is not None and efficiency is not None:
            config = row.known_config
            points = curves.setdefault((config.technique, base), [])
            points.append((config.world_size, efficiency))
    shown = dict(list(curves.items())[:SHOWN_CURVES])
    # Each base once, in the order of the curves.
    bases = list(dict.fromkeys(base for _, base in curves))

    figure, (axes,) = new_axes(PAGE_WIDTH, 3.4)
    axes.axhline(1.0, color="0.5", linestyle="--", linewidth=1, label="ideal")
    for (technique, base), points in shown.items():
        name = technique
        if len(bases) > 1:
            name = f"{technique}, baseline {base}"
        processes, efficiencies = zip(*sorted(points), strict=True)
        axes.plot(
            processes,
            efficiencies,
            marker="o",
            color=color_of(technique),
            linestyle=LINE_STYLES[bases.index(base) % len(LINE_STYLES)],
            label=_shown_name(name),
        )
    axes.set(xlabel="processes", ylabel="scaling efficiency")
    _set_title(axes, "Speed-up over the baseline, per process", len(shown), len(curves), "curves")
    if curves:
        world_sizes = set[int]()
        for points in shown.values():
            world_sizes.update(world_size for world_size, _ in points)
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted(world_sizes))
        legend_below(figure)
    return _finished_plot(
        figure,
        "scaling efficiency by processes of",
        [technique for technique, _ in shown],
        nothing="no two rows differ only in technique and pods",
    )


# Memory and use over time, as each rank's sampler wrote them: `memory/N.csv` of a run folder.

PLOTTED_RUNS = 12
"""Most runs in plots over time, where more would fill a whole page."""
LEGEND_RANKS = 4
"""Most ranks in the legend of a plot over time."""
PANEL_COLUMNS = 2
PANEL_INCHES = 1.6
PERCENT_TOP = 105.0
"""Upper end of a scale of use: all of a GPU or of the cores, and room for the line there."""
PHASE_COLORS = {
    "load": "#e8e8e8",
    "first_step": "#fde9c8",
    "steady": "#ffffff",
    "evaluate": "#d9ecd9",
    "save": "#d6e4f5",
}


def over_time(timelines: Sequence[Timeline], total: int, what: str) -> Plot:
    """Memory or use of each rank over time, by phase, in a panel for each run. Panels of the same
    kind of memory share one scale; that of use always reaches 100 %.

    Args:
        timelines: at most `PLOTTED_RUNS`; those without samples are left out.
        total: number of runs there are; the title says so if not all are drawn.
        what: `memory`, of the first kind that has samples; `use`, of the GPU, or of the cores if
            there is no GPU.
    """
    kinds = MEMORY_COLUMNS if what == "memory" else USE_COLUMNS
    unit = GIB if what == "memory" else 1
    shown = _with_samples(timelines, kinds)
    columns = max(1, min(PANEL_COLUMNS, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    figure, panels = new_axes(PAGE_WIDTH, 1.1 + PANEL_INCHES * rows, columns=columns, rows=rows)
    for number, (timeline, column) in enumerate(shown):
        axes = panels[number]
        _draw_panel(axes, timeline, column, unit)
        top = PERCENT_TOP
        if what == "memory":
            top = 1.1 * (_highest_peak(shown, column) / unit)
        axes.set_ylim(0, top)
        is_leftmost = number % columns == 0
        is_lowest = number + columns >= len(shown)
        if is_leftmost:
            axes.set_ylabel(kinds[column], fontsize="small")
        if is_lowest:
            axes.set_xlabel("s", fontsize="small")
    # What is left of the last row of panels; where there is nothing to draw, the only panel.
    unused_panels = panels[len(shown) :]
    for axes in unused_panels:
        if not shown:
            _write_instead(axes, f"no run has samples of its {what}")
        axes.set_axis_off()

    title = f"{what.capitalize()} of each rank over time"
    if len(shown) < total:
        title += f"\n(the first {len(shown)} of {total} rows)"
    figure.suptitle(title, fontsize="medium")
    if shown:
        last_rank = max(max(timeline.ranks) for timeline, _ in shown)
        _phase_legend(figure, min(LEGEND_RANKS, last_rank + 1))
    names = [timeline.label for timeline, _ in shown]
    return _finished_plot(figure, f"{what} over time of", names)


def _with_samples(
    timelines: Sequence[Timeline], columns: Iterable[str]
) -> list[tuple[Timeline, str]]:
    """The timelines that have samples, each with the first of the columns that has some."""
    sampled = []
    for timeline in timelines:
        column = timeline.column(columns)
        if column:
            sampled.append((timeline, column))
    return sampled


def _highest_peak(shown: Sequence[tuple[Timeline, str]], column: str) -> float:
    """The highest sample of a column in all timelines that are drawn by this column."""
    peaks = []
    for timeline, drawn_column in shown:
        if drawn_column == column:
            peaks.append(timeline.peak(column))
    return max(peaks)


def _draw_panel(axes: Axes, timeline: Timeline, column: str, unit: int) -> None:
    """Draw one run: a line for each rank, and behind them the phases of the first rank, each up to
    the first sample of the next phase."""
    for number, (rank, samples) in enumerate(timeline.ranks.items()):
        seconds = list(samples["unix_seconds"] - samples["unix_seconds"].iloc[0])
        if number == 0:
            _draw_phases(axes, seconds, list(samples["phase"]))
        axes.plot(seconds, samples[column] / unit, linewidth=1.2, color=_rank_color(rank))
    axes.set_title(_shown_name(timeline.label), fontsize="small")
    axes.locator_params(nbins=5)
    axes.tick_params(labelsize="small")


def _draw_phases(axes: Axes, seconds: Sequence[float], phases: Sequence[str]) -> None:
    """Fill the background of each stretch of samples with the colour of its phase."""
    first = 0
    for phase, samples in groupby(phases):
        first_of_next = first + len(list(samples))
        # After the last sample there is no next phase.
        end = seconds[min(first_of_next, len(seconds) - 1)]
        color = PHASE_COLORS.get(phase, "white")
        axes.axvspan(seconds[first], end, color=color, linewidth=0, zorder=0)
        first = first_of_next


def _phase_legend(figure: Figure, ranks: int) -> None:
    """Put a legend below: what the colours behind the lines mean, and which line is which rank.

    Args:
        ranks: number of the first ranks that it explains.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    phases = []
    for phase, color in PHASE_COLORS.items():
        phases.append(Patch(fc=color, ec="0.8", label=phase.replace("_", " ")))
    lines = []
    for rank in range(ranks):
        lines.append(Line2D([], [], color=_rank_color(rank), label=f"rank {rank}"))
    legend_below(figure, 5, [*phases, *lines])


def _rank_color(rank: int) -> str:
    """The colour of a rank's line; matplotlib's cycle has ten."""
    return f"C{rank % 10}"
