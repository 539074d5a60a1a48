"""Memory over time: a small plot for each run, a line for each rank, its phases behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.report.entry import Entry, one_line
from zeropods.report.plots import Margins, Plot, drawn, listed, literal, new_axes, nothing, of_all
from zeropods.report.rows import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Memory over time as a rank's sampler wrote it: `memory/N.csv` of a run folder.

BYTES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "device-used": "device_used_bytes",
    "resident": "resident_bytes",
}
"""Columns by kind of memory."""


@dataclass
class Series:
    """Samples of one rank, in the order of the file."""

    unix_seconds: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    bytes_by_kind: dict[str, list[float | None]] = field(default_factory=lambda: {kind: [] for kind in BYTES})
    """None where a sample has nothing of that kind."""
    fault: str | None = None
    """The first line that is none: it is left out. The last line of a run that was killed may be cut short."""

    def since(self, unix_seconds: float) -> Series:
        """The samples from a moment on."""
        kept = [i for i, seconds in enumerate(self.unix_seconds) if seconds >= unix_seconds]
        return Series(
            [self.unix_seconds[i] for i in kept],
            [self.phases[i] for i in kept],
            {kind: [values[i] for i in kept] for kind, values in self.bytes_by_kind.items()},
            self.fault,
        )


def read_series(path: Path) -> Series:
    """Read a file of samples.

    Raises:
        UserError: it has no header, or one without the columns that are needed.
    """
    try:
        header, *lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged: {error}; run it again") from None
    names = header.split(",")
    missing = [name for name in ("unix_seconds", "phase", *BYTES.values()) if name not in names]
    if missing:
        raise UserError(f"{path}: header {header!r:.60}; expected a column {missing[0]}: run it again")
    series = Series()
    for number, line in enumerate(lines, 2):
        # The text behind the last line end is empty, or a line that was cut short.
        if number - 2 < len(lines) - 1 and not _add(series, names, line) and series.fault is None:
            series.fault = f"{path}:{number}: {line!r:.60} is no sample, left out"
    return series


def _add(series: Series, names: list[str], line: str) -> bool:
    """Add a line's sample; False, and nothing added, where it is none."""
    cells = line.split(",")
    if len(cells) != len(names):
        return False
    by_name = dict(zip(names, cells, strict=True))
    try:
        seconds = float(by_name["unix_seconds"])
        values = {kind: float(by_name[name]) if by_name[name] else None for kind, name in BYTES.items()}
    except ValueError:
        return False
    series.unix_seconds.append(seconds)
    series.phases.append(by_name["phase"])
    for kind, value in values.items():
        series.bytes_by_kind[kind].append(value)
    return True


# Memory over time: a small plot for each run, a line for each rank, its phases behind them.

SHOWN_RUNS = 12
SHOWN_RANKS = 4
"""In the legend; further ones go on with its colours."""
COLUMNS = 3
PANEL_INCHES, MARGIN_INCHES = 2.1, 1.2
PHASE_COLORS = {
    "load": "#e8e8e8",
    "first_step": "#fde9c8",
    "steady": "#ffffff",
    "evaluate": "#d9ecd9",
    "save": "#d6e4f5",
}
KINDS = ("device-used", "allocated", "resident")
"""The first that has samples is drawn."""
SLACK_SECONDS = 1.0
"""Between the clock that a run is timed by and the one that samples have."""


@dataclass(frozen=True)
class Timeline:
    """The samples of one run."""

    label: str
    ranks: dict[int, Series]
    """Of its last attempt."""
    faults: tuple[str, ...]
    """What of it could not be read."""

    @property
    def kind(self) -> str | None:
        """Of the memory that is drawn."""
        found = (kind for kind in KINDS for one in self.ranks.values() if any(one.bytes_by_kind[kind]))
        return next(found, None)

    def peak_bytes(self) -> float:
        """The highest sample of all ranks."""
        values = [value for one in self.ranks.values() for value in one.bytes_by_kind[self.kind or KINDS[-1]]]
        return max((value for value in values if value is not None), default=0.0)


def read_timeline(entry: Entry, label: str) -> Timeline:
    """The samples of a run's ranks; what is damaged is named, not raised."""
    ranks, faults = {}, []
    paths = [path for path in (entry.folder / "memory").glob("*.csv") if path.stem.isdigit()]
    for path in sorted(paths, key=lambda path: int(path.stem)):
        try:
            series = read_series(path).since(_began(entry, int(path.stem)))
        except (UserError, OSError) as error:
            faults.append(one_line(error, entry.folder))
            continue
        if series.fault is not None:
            faults.append(one_line(series.fault, entry.folder))
        if series.unix_seconds:
            ranks[int(path.stem)] = series
    return Timeline(label, ranks, tuple(faults))


def memory_over_time(timelines: Sequence[Timeline], found: int) -> Plot:
    """Small plots of at most twelve runs, of one scale where they are of one kind of memory.

    Args:
        found: how many runs there are; the title says if not all are drawn.
    """
    shown = [timeline for timeline in timelines if timeline.kind]
    columns = max(1, min(COLUMNS, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    height = MARGIN_INCHES + PANEL_INCHES * rows
    margins = Margins(left=0.65, top=0.45, bottom=0.75, between_columns=0.14)
    figure, axes = new_axes(9, height, columns=columns, rows=rows, margins=margins)
    for number, (one, timeline) in enumerate(zip(axes, shown, strict=False)):
        _draw(one, timeline)
        _outer_labels(one, timeline.kind, number % columns == 0, number + columns >= len(shown))
        one.set_ylim(0, 1.1 * max(other.peak_bytes() for other in shown if other.kind == timeline.kind) / GIB)
    for empty in axes[len(shown) :]:
        nothing(empty, "" if shown else "no run has samples of its memory")
        empty.set_axis_off()
    title = f"Memory of each rank over time{of_all(len(shown), found)}"
    figure.suptitle(title, fontsize="medium", y=1 - 0.08 / height)
    if shown:
        _legend(figure, max(max(timeline.ranks) for timeline in shown) + 1)
    return drawn(figure, f"memory over time of {listed([timeline.label for timeline in shown])}")


def _began(entry: Entry, number: int) -> float:
    """When the rank's last attempt began, by its clock; from the beginning where it did not say."""
    ranks = entry.record.ranks if entry.record else []
    rank = next((rank for rank in ranks if rank.rank == number), None)
    if rank is None or rank.ended_unix_seconds is None or rank.wall_seconds is None:
        return 0.0
    return rank.ended_unix_seconds - rank.wall_seconds - SLACK_SECONDS


def _draw(axes: Axes, timeline: Timeline) -> None:
    kind = timeline.kind or KINDS[-1]
    for number, (rank, series) in enumerate(timeline.ranks.items()):
        seconds = [one - series.unix_seconds[0] for one in series.unix_seconds]
        if number == 0:
            _shade(axes, seconds, series.phases)
        sizes = [math.nan if size is None else size / GIB for size in series.bytes_by_kind[kind]]
        axes.plot(seconds, sizes, linewidth=1.2, color=f"C{rank % 10}")
    axes.set_title(literal(timeline.label), fontsize="small", y=1.0)


def _outer_labels(axes: Axes, kind: str | None, is_left: bool, is_lowest: bool) -> None:
    """Few ticks; what they count is said at the edges. Places are given, so that none has to be found."""
    axes.locator_params(nbins=4)
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

    lines = [Line2D([], [], color=f"C{rank % 10}", label=f"rank {rank}") for rank in range(min(ranks, SHOWN_RANKS))]
    patches = [Patch(facecolor=color, edgecolor="0.8", label=phase) for phase, color in PHASE_COLORS.items()]
    figure.legend(
        handles=[*patches, *lines], loc="lower center", ncols=len(patches) + len(lines), fontsize="small", frameon=False
    )
