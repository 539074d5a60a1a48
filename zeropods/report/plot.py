"""Plots as PNG, drawn without a display; loss curves."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeropods.report.entry import Entry
from zeropods.report.frame import Margins, beside_legend, legend_beside, listed, literal, nothing, of_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    found = [pair for pair in zip(names, entries, strict=True) if pair[1].losses or pair[1].eval_losses]
    curves = found[:SHOWN_CURVES]
    figure, (axes,) = new_axes(8, 4, margins=beside_legend([name for name, _ in curves]))
    for number, (name, entry) in enumerate(curves):
        color = f"C{number}"
        _curve(axes, entry.losses, color=color, linewidth=1, alpha=0.6)
        _curve(axes, entry.eval_losses, color=color, linewidth=2, marker="o", markersize=4, linestyle="--")
        axes.plot([], [], color=color, label=name)
    title = f"Loss: lines training, dots validation{of_all(len(curves), len(found))}"
    axes.set(xlabel="optimizer step", ylabel="loss a label token (nats)", title=title)
    if curves:
        _logarithmic(axes)
        _steps(axes, [max(loss["step"] for loss in [*entry.losses, *entry.eval_losses]) for _, entry in curves])
        legend_beside(axes)
    else:
        nothing(axes, "no run has a loss yet")
    return drawn(figure, f"training and validation loss by step of {listed([name.strip() for name, _ in curves])}")


def _curve(axes: Axes, losses: list[dict[str, float]], **style: Any) -> None:
    if losses:
        axes.plot([entry["step"] for entry in losses], [entry["loss"] for entry in losses], **style)


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
