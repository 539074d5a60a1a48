"""Bars of profiler reports: shares of an iteration, two reports side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from zeropods.measure.profile.classes import by_class
from zeropods.measure.profile.derived import Figures
from zeropods.measure.profile.mend import Mended
from zeropods.report.plot import Plot, drawn, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
