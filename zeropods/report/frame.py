"""What frames a plot: its margins, legend, labels and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_LETTERS = 40
"""Of a run's name."""
TECHNIQUES = ("none", "ddp", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")


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
    return f"C{TECHNIQUES.index(technique)}" if technique in TECHNIQUES else "0.6"


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
