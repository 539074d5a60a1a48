"""Plots as PNG, drawn without a display."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeropods.report.entry import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
SHOWN_WIDTH = 720
"""Of a plot in a notebook, in CSS pixels."""


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


def new_axes(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of that many inches with `columns` axes side by side, bound to no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3)
    return figure, axes


def drawn(figure: Figure, text: str) -> Plot:
    """The figure as a `Plot`; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return Plot(buffer.getvalue(), text)


def loss_plot(entries: Sequence[Entry]) -> Plot:
    """Training and validation loss of each run by optimizer step, on a logarithmic scale."""
    figure, (axes,) = new_axes(8, 4)
    curves = [entry for entry in entries if entry.losses or entry.eval_losses]
    for number, entry in enumerate(curves):
        _curve(axes, entry.losses, color=f"C{number % 10}", linewidth=1, alpha=0.6, label=entry.name)
        _curve(
            axes,
            entry.eval_losses,
            color=f"C{number % 10}",
            linewidth=2,
            marker="o",
            markersize=4,
            linestyle="--",
        )
    axes.set(
        xlabel="optimizer step",
        ylabel="loss a label token (nats)",
        title="Loss: lines training, dots validation",
    )
    if curves:
        _logarithmic(axes)
        _legend(axes, len(curves))
    else:
        _nothing(axes, "no run has a loss yet")
    return drawn(figure, f"training and validation loss by step of {_names(curves)}")


def throughput_plot(entries: Sequence[Entry]) -> Plot:
    """Training samples a second of each run, all ranks together."""
    rates = [(entry, entry.facts.get("samples_per_second")) for entry in entries]
    timed = [(entry, rate) for entry, rate in rates if rate is not None]
    figure, (axes,) = new_axes(8, 1.2 + 0.4 * max(2, len(timed)))
    axes.set(xlabel="samples/s", title="Training throughput, all ranks together")
    bars = axes.barh([_literal(entry.name) for entry, _ in timed], [rate for _, rate in timed], height=0.6)
    axes.bar_label(bars, fmt="%.4g", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if not timed:
        _nothing(axes, "no run was timed yet")
    return drawn(figure, f"training samples a second of {_names([entry for entry, _ in timed])}")


def _curve(axes: Axes, losses: list[dict[str, float]], label: str | None = None, **style: Any) -> None:
    if losses:
        shown = _literal(label) if label else None
        axes.plot([entry["step"] for entry in losses], [entry["loss"] for entry in losses], label=shown, **style)


def _logarithmic(axes: Axes) -> None:
    """A logarithmic scale with plain numbers at it."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes, runs: int) -> None:
    if runs > 6:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    else:
        axes.legend(frameon=False)


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def _literal(name: str) -> str:
    """A name in which matplotlib sees no formula, and which its legend does not hide."""
    shown = name.replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown


def _names(entries: Sequence[Entry]) -> str:
    return ", ".join(entry.name for entry in entries) or "no run"
