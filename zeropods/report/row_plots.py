"""Plots of rows: throughput, memory beside its plan, scaling efficiency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeropods.report.columns import GIB, MIB, Values
from zeropods.report.frame import (
    Margins,
    beside_legend,
    legend_beside,
    listed,
    literal,
    nothing,
    of_all,
    technique_color,
    text_inches,
)
from zeropods.report.plot import SHOWN_CURVES, Plot, drawn, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
