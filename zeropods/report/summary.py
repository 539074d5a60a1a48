"""Runs side by side: records in; tables, plots and a page out."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zeropods.data.writing import writing
from zeropods.report.columns import COLUMNS, raw, tables
from zeropods.report.differences import differences
from zeropods.report.entry import Entry, read_entry
from zeropods.report.find import find_runs
from zeropods.report.page import html_list, html_plot, page
from zeropods.report.plot import Plot, loss_plot, throughput_plot
from zeropods.report.table import markdown_text

SCHEMA_VERSION = 1
TITLE = "Runs side by side"
REMARKS = "Runs that are not complete:"
DIFFER = "These runs differ in more than technique and pods, so their figures do not compare techniques:"


def summarize(runs: Sequence[Path], out: Path) -> Summary:
    """Read runs and write `summary.{md,json,csv}`, `losses.png`, `throughput.png`, `index.html` into `out`.

    Args:
        runs: run folders, or folders that hold some below them. A run without a good record is listed
            with the reason; a folder without any run raises `UserError`.
    """
    summary = read_runs(runs)
    _write(Path(out), summary.files())
    return summary


def read_runs(runs: Sequence[Path]) -> Summary:
    """The summary of runs, without its files."""
    return Summary(tuple(read_entry(folder, name) for name, folder in find_runs(runs).items()))


@dataclass(frozen=True)
class Summary:
    """What a notebook shows and a report holds of some runs."""

    entries: tuple[Entry, ...]

    @cached_property
    def losses(self) -> Plot:
        """Training and validation loss by step of each run."""
        return loss_plot(self.entries)

    @cached_property
    def throughput(self) -> Plot:
        """Training samples a second of each run."""
        return throughput_plot(self.entries)

    def remarks(self) -> list[str]:
        """A line for each run that did not end well, or of which something could not be read."""
        return [f"{e.name}: {e.status}: {e.reason}" for e in self.entries if e.status != "ok" or e.reason]

    def to_json(self) -> dict[str, Any]:
        """Raw values of every column by run, and what the runs differ in."""
        runs = [{**raw(entry), "accuracy": entry.score} for entry in self.entries]
        return {"schema_version": SCHEMA_VERSION, "runs": runs, "differences": differences(self.entries)}

    def to_markdown(self) -> str:
        """The tables, and below them what to know before reading them."""
        parts = [table.to_markdown() for table in tables(self.entries)]
        parts += [_markdown_list(REMARKS, self.remarks()), _markdown_list(DIFFER, differences(self.entries))]
        return "\n".join(part for part in parts if part)

    def to_csv(self) -> str:
        """A row for each run, raw values, empty where nothing was measured."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [column.key for column in COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(raw, self.entries))
        return text.getvalue()

    def to_page(self) -> str:
        """The whole report as one HTML page."""
        plots = html_plot(self.losses) + html_plot(self.throughput)
        return page(TITLE, f"<h1>{TITLE}</h1>{self._repr_html_()}<h2>Plots</h2>{plots}")

    def files(self) -> dict[str, bytes]:
        """Every file of the report by name."""
        document = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        return {
            "summary.md": self.to_markdown().encode(),
            "summary.json": f"{document}\n".encode(),
            "summary.csv": self.to_csv().encode(),
            "losses.png": self.losses.png,
            "throughput.png": self.throughput.png,
            "index.html": self.to_page().encode(),
        }

    def _repr_html_(self) -> str:
        parts = [table.to_html() for table in tables(self.entries)]
        return "".join([*parts, html_list(REMARKS, self.remarks()), html_list(DIFFER, differences(self.entries))])


def _markdown_list(title: str, items: Sequence[str]) -> str:
    return f"{title}\n\n" + "".join(f"- {markdown_text(item)}\n" for item in items) if items else ""


def _write(out: Path, files: dict[str, bytes]) -> None:
    """Put files into a folder: each of them whole, none before all are written."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".summary.") as staging:
        for name, content in files.items():
            with writing(out / name):
                (Path(staging) / name).write_bytes(content)
        for name in files:
            os.replace(Path(staging) / name, out / name)
