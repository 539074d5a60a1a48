"""Plots of runs and of rows, drawn without a display: losses, throughput, memory, scaling, memory over time."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.measure.record import Loss, Record
from zeropods.report.entry import Entry, one_line
from zeropods.report.figures import ALLOCATED, DEVICE_USED, RESIDENT, Values
from zeropods.tables import GIB, MIB
from zeropods.techniques import TECHNIQUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
COMPRESSION = 3
"""Of 9: a fifth larger, in a third of the time."""
SHOWN_WIDTH = 720
"""Width of a plot in a notebook, in CSS pixels."""
SHOWN_LETTERS = 40
"""Of a run's name."""
SHOWN_CURVES = 8
"""More cannot be told apart."""
SHOWN_ROWS, SHOWN_PAIRS, SHOWN_RUNS, SHOWN_RANKS = 16, 12, 12, 4
"""Rows of throughput and of memory, runs and ranks of memory over time: more would make a page of one plot."""
BAR_INCHES = 0.4
LINE_STYLES = ("-", ":", "-.", "--")
LONG = 10
"""Times the steps of the shortest run: from there on steps are drawn on a logarithmic scale."""


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


# Frames: axes with their margins, titles, legends and words.


def new_axes(
    width: float, height: float, columns: int = 1, rows: int = 1, margins: dict[str, float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure of that many inches with `rows` x `columns` axes, row by row, bound to no display.

    Args:
        margins: inches at the left, right, top and bottom, and the room between axes in their own widths (`wspace`);
            without them matplotlib measures every text, which takes as long as drawing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=None if margins else "constrained")
    FigureCanvasAgg(figure)
    if margins:
        room = {"right": 0.15, "top": 0.4, "bottom": 0.6, "wspace": 0.1, **margins}
        figure.subplots_adjust(
            left=room["left"] / width,
            right=1 - room["right"] / width,
            top=1 - room["top"] / height,
            bottom=room["bottom"] / height,
            wspace=room["wspace"],
            hspace=0.3,
        )
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


def beside_legend(labels: Sequence[str]) -> dict[str, float]:
    """Margins of axes with a legend at their right."""
    return {"left": 0.7, "right": 0.75 + _text_inches(labels, 8.3)}


def legend_beside(axes: Axes) -> None:
    """A legend at the right, over no curve."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def technique_color(technique: str) -> str:
    """The same in every plot; grey for a technique of the user's own."""
    names = [known.name for known in TECHNIQUES]
    return f"C{names.index(technique)}" if technique in names else "0.6"


def _text_inches(texts: Sequence[str], points: float = 10) -> float:
    """About how wide the longest of some texts is."""
    return 0.0088 * points * max(map(len, texts), default=0)


def _nothing(axes: Axes, why: str) -> None:
    """Say that there is nothing to draw."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def _literal(name: str) -> str:
    """A name, shortened, in which matplotlib sees no formula, and which its legend does not hide."""
    short = name if len(name) <= SHOWN_LETTERS else f"…{name[1 - SHOWN_LETTERS :]}"
    shown = short.replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown


def _of_all(shown: int, found: int, what: str = "rows") -> str:
    """What a title adds where not all is drawn."""
    return f" (the first {shown} of {found} {what})" if shown < found else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no run"


# Loss curves.


def loss_plot(records: Sequence[tuple[str, Record | None]]) -> Plot:
    """Training and validation loss of each run by optimizer step, on a logarithmic scale; of at most eight runs.

    Args:
        records: what the runs are called, and their records.
    """
    found = [(_literal(name), of) for name, of in records if of is not None and (of.losses or of.eval_losses)]
    curves = found[:SHOWN_CURVES]
    figure, (axes,) = new_axes(8, 4, margins=beside_legend([name for name, _ in curves]))
    for number, (name, record) in enumerate(curves):
        _curve(axes, record.losses, color=f"C{number}", linewidth=1, alpha=0.6)
        _curve(axes, record.eval_losses, color=f"C{number}", linewidth=2, marker="o", markersize=4, linestyle="--")
        axes.plot([], [], color=f"C{number}", label=name)
    title = f"Loss: lines training, dots validation{_of_all(len(curves), len(found))}"
    axes.set(xlabel="optimizer step", ylabel="loss per label token (nats)", title=title)
    if curves:
        lasts = [max(point.step for point in (*of.losses, *of.eval_losses)) for _, of in curves]
        _logarithmic(axes, steps_too=max(lasts) > LONG * min(lasts) > 0)
        legend_beside(axes)
    else:
        _nothing(axes, "no run has a loss yet")
    return drawn(figure, f"training and validation loss by step of {_listed([name.strip() for name, _ in curves])}")


def _curve(axes: Axes, losses: list[Loss], **style: Any) -> None:
    if losses:
        axes.plot([point.step for point in losses], [point.loss for point in losses], **style)


def _logarithmic(axes: Axes, *, steps_too: bool) -> None:
    """Logarithmic scales with plain numbers: of losses; of steps where the longest run leaves the shortest no room."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if steps_too:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")


# Plots of rows: throughput, memory beside its plan, scaling efficiency.


def throughput_plot(lines: Sequence[Values]) -> Plot:
    """Training samples per second of each row, with the interval of its repeats and the value at its end."""
    found = [line for line in lines if line["samples_per_second"] is not None]
    timed = found[:SHOWN_ROWS]
    labels = [_literal(line["label"]) for line in timed]
    height = 1.2 + BAR_INCHES * max(2, len(timed))
    figure, (axes,) = new_axes(8, height, margins={"left": 0.25 + _text_inches(labels)})
    rates = [line["samples_per_second"] for line in timed]
    axes.barh(labels, rates, height=0.6, color=[technique_color(line["technique"]) for line in timed])
    for place, (rate, line) in enumerate(zip(rates, timed, strict=True)):
        low, high = line["samples_per_second_interval"] or (rate, rate)
        half = (high - low) / 2
        if half:
            axes.errorbar(rate, place, xerr=half, fmt="none", capsize=3, elinewidth=1, ecolor="0.2")
        axes.annotate(f"{rate:.4g}", (rate + half, place), xytext=(4, 0), textcoords="offset points", va="center")
    title = f"Training throughput, all ranks together{_of_all(len(timed), len(found))}"
    axes.set(xlabel="samples/s; lines: 95 % interval over repeats", title=title)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.set_xlim(left=0)
    if not timed:
        _nothing(axes, "no run was timed yet")
    return drawn(figure, f"training samples per second of {_listed([line['label'] for line in timed])}")


def planned_plot(lines: Sequence[Values]) -> Plot:
    """Peak memory of the fullest pod, and beside it the plan and what is measured against it, by row."""
    found = [line for line in lines if line["peak_memory_bytes"] is not None or line["planned_bytes"] is not None]
    shown = found[:SHOWN_PAIRS]
    labels = [_literal(line["label"]) for line in shown]
    margins, height = {"left": 0.25 + _text_inches(labels)}, 1.2 + 1.4 * BAR_INCHES * max(2, len(shown))
    figure, axes = new_axes(9, height, columns=2, margins=margins)
    kind = _main_kind(shown, "memory_kind")
    _bars(axes[0], labels, {"peak": [one.get("peak_memory_bytes") for one in _of_kind(shown, "memory_kind")]}, GIB)
    axes[0].set(xlabel=f"GiB {kind or ''}", title="Peak of the fullest pod")
    kind, planned = _main_kind(shown, "planned_kind"), _of_kind(shown, "planned_kind")
    _bars(
        axes[1], labels, {name: [one.get(f"{name}_bytes") for one in planned] for name in ("planned", "measured")}, MIB
    )
    axes[1].set(xlabel=f"MiB {kind or ''}", title=f"Plan and measurement{_of_all(len(shown), len(found))}")
    axes[1].set_yticklabels([])
    return drawn(figure, f"memory of {_listed([line['label'] for line in shown])}: peak; planned beside measured")


def scaling_plot(lines: Sequence[Values]) -> Plot:
    """Scaling efficiency against processes: a line for each technique of rows that have one base."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for line in lines:
        if line["scaling_efficiency"] is not None and not line["differs_in"]:
            point = (line["world_size"], line["scaling_efficiency"])
            curves.setdefault((line["technique"], line["base_row"]), []).append(point)
    shown = dict(list(curves.items())[:SHOWN_CURVES])
    bases = list(dict.fromkeys(base for _, base in curves))
    labels = [_literal(f"{technique}, base {base}" if len(bases) > 1 else technique) for technique, base in shown]
    figure, (axes,) = new_axes(8, 4, margins=beside_legend(labels))
    axes.axhline(1.0, color="0.5", linestyle="--", linewidth=1, label="ideal")
    for label, ((technique, base), points) in zip(labels, shown.items(), strict=True):
        style = LINE_STYLES[bases.index(base) % len(LINE_STYLES)]
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", color=technique_color(technique), linestyle=style, label=label)
    title = f"Speed-up over the base row, per process{_of_all(len(shown), len(curves), 'curves')}"
    axes.set(xlabel="processes", ylabel="scaling efficiency", title=title)
    if curves:
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({processes for points in shown.values() for processes, _ in points}))
        legend_beside(axes)
    else:
        _nothing(axes, "no two rows differ in nothing but technique and pods")
    return drawn(figure, f"scaling efficiency by processes of {_listed([technique for technique, _ in shown])}")


def _main_kind(lines: Sequence[Values], key: str) -> str | None:
    """The kind of memory that most rows have: those of another are not drawn beside them."""
    kinds = Counter(line[key] for line in lines if line[key] is not None)
    return max(kinds, key=kinds.__getitem__, default=None)


def _of_kind(lines: Sequence[Values], key: str) -> list[Values]:
    """The rows of the main kind, and nothing in the places of the others."""
    kind = _main_kind(lines, key)
    return [line if line[key] == kind else {} for line in lines]


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
        _nothing(axes, "not measured")
    elif len(series) > 1:
        axes.legend(fontsize="small", loc="lower right")


# Memory over time, as each rank's sampler wrote it: `memory/N.csv` of a run folder.

COLUMNS = {DEVICE_USED: "device_used_bytes", ALLOCATED: "allocated_bytes", RESIDENT: "resident_bytes"}
"""By kind of memory; the first that has samples is drawn."""
SLACK_SECONDS = 1.0
"""Between the clock that a run is timed by and the one that samples have."""
PANEL_COLUMNS, PANEL_INCHES, MARGIN_INCHES = 3, 2.1, 1.2
PHASE_COLORS = {
    "load": "#e8e8e8",
    "first_step": "#fde9c8",
    "steady": "#ffffff",
    "evaluate": "#d9ecd9",
    "save": "#d6e4f5",
}


@dataclass(frozen=True)
class MemorySample:
    """One line of a file of samples."""

    unix_seconds: float
    phase: str
    sizes: dict[str, float | None]
    """Bytes by kind of memory; None where there is nothing of that kind."""


@dataclass(frozen=True)
class Timeline:
    """The samples of the last attempt of one run."""

    label: str
    ranks: dict[int, list[MemorySample]]
    faults: tuple[str, ...]
    """What of it could not be read."""

    @property
    def kind(self) -> str | None:
        """The kind of memory that is drawn."""
        samples = [sample for of_rank in self.ranks.values() for sample in of_rank]
        return next((kind for kind in COLUMNS if any(sample.sizes[kind] for sample in samples)), None)

    def peak_bytes(self) -> float:
        """The highest sample of all ranks."""
        kind = self.kind or RESIDENT
        return max((sample.sizes[kind] or 0.0 for of_rank in self.ranks.values() for sample in of_rank), default=0.0)


def read_timeline(entry: Entry, label: str) -> Timeline:
    """The samples of a run's ranks; what is damaged is named, not raised."""
    ranks, faults = {}, []
    paths = [path for path in (entry.folder / "memory").glob("*.csv") if path.stem.isdigit()]
    for path in sorted(paths, key=lambda path: int(path.stem)):
        number = int(path.stem)
        try:
            samples, fault = _read_samples(path)
        except (UserError, OSError) as error:
            faults.append(one_line(error, entry.folder))
            continue
        if fault is not None:
            faults.append(one_line(fault, entry.folder))
        began = _began(entry, number)
        ranks[number] = [sample for sample in samples if sample.unix_seconds >= began]
    return Timeline(label, {number: samples for number, samples in ranks.items() if samples}, tuple(faults))


def memory_over_time(timelines: Sequence[Timeline], found: int) -> Plot:
    """Small plots of at most twelve runs, a line for each rank, of one scale where they are of one kind of memory.

    Args:
        found: how many runs there are; the title says if not all are drawn.
    """
    shown = [timeline for timeline in timelines if timeline.kind]
    columns = max(1, min(PANEL_COLUMNS, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    height = MARGIN_INCHES + PANEL_INCHES * rows
    margins = {"left": 0.65, "top": 0.45, "bottom": 0.75, "wspace": 0.14}
    figure, axes = new_axes(9, height, columns=columns, rows=rows, margins=margins)
    for number, (one, timeline) in enumerate(zip(axes, shown, strict=False)):
        _panel(one, timeline, is_left=number % columns == 0, is_lowest=number + columns >= len(shown))
        one.set_ylim(0, 1.1 * max(other.peak_bytes() for other in shown if other.kind == timeline.kind) / GIB)
    for empty in axes[len(shown) :]:
        _nothing(empty, "" if shown else "no run has samples of its memory")
        empty.set_axis_off()
    title = f"Memory of each rank over time{_of_all(len(shown), found)}"
    figure.suptitle(title, fontsize="medium", y=1 - 0.08 / height)
    if shown:
        _legend(figure, max(max(timeline.ranks) for timeline in shown) + 1)
    return drawn(figure, f"memory over time of {_listed([timeline.label for timeline in shown])}")


def _read_samples(path: Path) -> tuple[list[MemorySample], str | None]:
    """The samples of a file, and the first line that is none: it is left out.

    Raises:
        UserError: it has no header, or one without the columns that are needed.
    """
    try:
        header, *lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged: {error}; run it again") from None
    names = header.split(",")
    missing = [name for name in ("unix_seconds", "phase", *COLUMNS.values()) if name not in names]
    if missing:
        raise UserError(f"{path}: header {header!r:.60}; expected a column {missing[0]}: run it again")
    samples, fault = [], None
    # The text behind the last line end is empty, or a line that was cut short when the run was killed.
    for number, line in enumerate(lines[:-1], 2):
        try:
            samples.append(_sample(dict(zip(names, line.split(","), strict=True))))
        except ValueError:
            fault = fault or f"{path}:{number}: {line!r:.60} is no sample, left out"
    return samples, fault


def _sample(cells: dict[str, str]) -> MemorySample:
    sizes = {kind: float(cells[name]) if cells[name] else None for kind, name in COLUMNS.items()}
    return MemorySample(float(cells["unix_seconds"]), cells["phase"], sizes)


def _began(entry: Entry, number: int) -> float:
    """When the rank's last attempt began, by its clock; from the beginning where it did not say."""
    rank = next((rank for rank in (entry.record.ranks if entry.record else ()) if rank.rank == number), None)
    if rank is None or rank.ended_unix_seconds is None or rank.wall_seconds is None:
        return 0.0
    return rank.ended_unix_seconds - rank.wall_seconds - SLACK_SECONDS


def _panel(axes: Axes, timeline: Timeline, *, is_left: bool, is_lowest: bool) -> None:
    """One run: a line for each rank, the phases of the first one behind them; few ticks, named at the edges."""
    kind = timeline.kind or RESIDENT
    for number, (rank, samples) in enumerate(timeline.ranks.items()):
        seconds = [sample.unix_seconds - samples[0].unix_seconds for sample in samples]
        if number == 0:
            _shade(axes, seconds, [sample.phase for sample in samples])
        sizes = [math.nan if (size := sample.sizes[kind]) is None else size / GIB for sample in samples]
        axes.plot(seconds, sizes, linewidth=1.2, color=f"C{rank % 10}")
    axes.set_title(_literal(timeline.label), fontsize="small", y=1.0)
    axes.locator_params(nbins=4)
    # Places are given, so that none has to be found.
    axes.xaxis.set_label_coords(0.5, -0.14)
    axes.yaxis.set_label_coords(-0.15, 0.5)
    axes.tick_params(labelsize="small")
    if is_left:
        axes.set_ylabel(f"GiB {kind}", fontsize="small")
    if is_lowest:
        axes.set_xlabel("s", fontsize="small")


def _shade(axes: Axes, seconds: Sequence[float], phases: Sequence[str]) -> None:
    """Colour behind the samples of each phase, up to the first sample of the next one."""
    for phase, members in groupby(range(len(phases)), lambda i: phases[i]):
        places = list(members)
        end = seconds[min(places[-1] + 1, len(seconds) - 1)]
        axes.axvspan(seconds[places[0]], end, color=PHASE_COLORS.get(phase, "white"), linewidth=0, zorder=0)


def _legend(figure: Figure, ranks: int) -> None:
    """One for all panels: what the colours behind the lines mean, and which line is which rank."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=color, edgecolor="0.8", label=phase) for phase, color in PHASE_COLORS.items()]
    lines = [Line2D([], [], color=f"C{rank % 10}", label=f"rank {rank}") for rank in range(min(ranks, SHOWN_RANKS))]
    handles = [*patches, *lines]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize="small", frameon=False)
