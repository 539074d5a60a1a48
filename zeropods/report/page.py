"""A report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from zeropods.report.plot import Plot

PAGE = Path(__file__).with_name("page.html")


def page(title: str, body: str) -> str:
    """A complete page that needs nothing else: no script, no font, no address."""
    return Template(PAGE.read_text(encoding="utf-8")).substitute(title=escape(title), body=body)


def html_list(title: str, items: Iterable[str]) -> str:
    """A paragraph and its items; nothing where there are none."""
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<p>{escape(title)}</p><ul>{lines}</ul>" if lines else ""


def html_plot(plot: Plot) -> str:
    """The plot, held by the page itself."""
    return f"<figure><img src='{plot.data_uri()}' alt='{escape(plot.text)}'></figure>"
