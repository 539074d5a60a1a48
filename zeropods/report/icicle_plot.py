"""The tree of modules as a picture: as wide as MACs, and as wide as time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeropods.measure.profile.report import Module
from zeropods.report.icicle import Cell, cells
from zeropods.report.plot import Plot, drawn, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#2f4b7c", "#ff9da6",
)  # fmt: skip
OTHER = "#d0d0d0"
INCHES_WIDE = 10.0
LETTER_INCHES = 0.075
"""Width of a letter of a label."""


def icicle_plot(root: Module) -> Plot:
    """The tree twice: a module is as wide as its share of the MACs, and of the latency."""
    figure, axes = new_axes(INCHES_WIDE, 7.0, columns=1)
    figure.delaxes(axes[0])
    figure.set_layout_engine("constrained", hspace=0.06)
    colours = _colours(root)
    for row, (key, title) in enumerate((("macs", "MACs of the forward pass"), ("latency_seconds", "forward latency"))):
        panel = figure.add_subplot(2, 1, row + 1)
        _icicle(panel, list(cells(root, key)), colours)
        panel.set_title(f"{title}: a module is as wide as its share, with its parts below it", loc="left", fontsize=10)
    _class_legend(figure, colours)
    wide = ", ".join(f"{cell.label} {100 * cell.width:.0f} %" for cell in cells(root, "macs") if cell.depth == 1)
    slow = ", ".join(f"{c.label} {100 * c.width:.0f} %" for c in cells(root, "latency_seconds") if c.depth == 1)
    return drawn(figure, f"tree of modules; MACs: {wide}; latency: {slow}")


def _icicle(axes: Axes, drawn_cells: Sequence[Cell], colours: dict[str, str]) -> None:
    from matplotlib.patches import Rectangle

    for cell in drawn_cells:
        colour = colours.get(cell.class_name, OTHER)
        corner = (cell.left, -cell.depth - 1)
        axes.add_patch(Rectangle(corner, cell.width, 0.96, facecolor=colour, edgecolor="white", linewidth=0.7))
        text = _fitting(cell)
        if text:
            middle = (cell.left + cell.width / 2, -cell.depth - 0.52)
            axes.text(*middle, text, ha="center", va="center", fontsize=8, color=_ink(colour), in_layout=False)
    axes.set(xlim=(0, 1), ylim=(-max(cell.depth for cell in drawn_cells) - 1, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _fitting(cell: Cell) -> str:
    """The longest label that fits into a cell: name and share, the name, nothing."""
    room = cell.width * INCHES_WIDE / LETTER_INCHES - 1
    texts = (f"{cell.label}  {100 * cell.width:.0f} %", cell.label)
    return next((text for text in texts if len(text) <= room), "")


def _colours(root: Module) -> dict[str, str]:
    """A colour for each of the classes that take most of the tree."""
    widths: dict[str, float] = {}
    for cell in [*cells(root, "macs"), *cells(root, "latency_seconds")]:
        widths[cell.class_name] = widths.get(cell.class_name, 0.0) + cell.width
    return dict(zip(sorted(widths, key=lambda name: widths[name], reverse=True), PALETTE, strict=False))


def _class_legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()] + [
        Patch(color=OTHER, label="others")
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _ink(colour: str) -> str:
    """Black or white, whichever is seen better on a colour (ITU-R BT.601 luma)."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "white"
