"""Runs side by side: records in; tables, plots and a page out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zeropods.report.columns import Values
from zeropods.report.differences import differences
from zeropods.report.documents import csv_text, json_text, markdown_list, write_files
from zeropods.report.entry import Entry, read_entry
from zeropods.report.find import find_runs
from zeropods.report.gate import SCHEMA_VERSION
from zeropods.report.groups import Group, group_runs
from zeropods.report.memory_plot import SHOWN_RUNS, Timeline, memory_over_time, read_timeline
from zeropods.report.page import html_list, html_plot, page
from zeropods.report.plot import Plot, loss_plot
from zeropods.report.reference import NOTE, reference, reference_table
from zeropods.report.remarks import remarks
from zeropods.report.row_plots import planned_plot, scaling_plot, throughput_plot
from zeropods.report.rows import line, row_json, row_labels, tables
from zeropods.report.scaling import Scaling, scalings
from zeropods.report.table import Table
from zeropods.report.uncollected import uncollected

TITLE = "Runs side by side"
REMARKS = "To know before reading the tables:"
DIFFER = "Rows differ in more than technique and pods. No ratio is drawn between rows that do:"
ALLOWED = "Rows differ in more than technique and pods. Ratios between rows that do were asked for, and carry a *:"


@uncollected()
def summarize(
    runs: Sequence[Path], out: Path, *, price_per_hour: float | None = None, allow_differences: bool = False
) -> Summary:
    """Read runs and write `summary.{md,json,csv}`, `index.html` and a PNG for each plot into `out`.

    Args:
        runs: run folders, or folders that hold some below them. A run without a good record is listed
            with the reason; a folder without any run raises `UserError`.
        price_per_hour: of a pod, in any currency.
        allow_differences: draw ratios between rows that differ in more than technique and pods, marked.
    """
    summary = read_runs(runs, price_per_hour=price_per_hour, allow_differences=allow_differences)
    write_summary(summary, out)
    return summary


@uncollected()
def read_runs(runs: Sequence[Path], *, price_per_hour: float | None = None, allow_differences: bool = False) -> Summary:
    """The summary of runs, without its files."""
    entries = tuple(read_entry(folder, name) for name, folder in find_runs(runs).items())
    return Summary(entries, price_per_hour, allow_differences)


@dataclass(frozen=True)
class Summary:
    """What a notebook shows and a report holds of some runs."""

    entries: tuple[Entry, ...]
    price_per_hour: float | None = None
    allow_differences: bool = False

    @cached_property
    def groups(self) -> list[Group]:
        """The rows: repeats together."""
        return group_runs(self.entries, self.price_per_hour)

    @cached_property
    def scalings(self) -> dict[str, Scaling]:
        """Rows against their bases, by letter."""
        return scalings(self.groups, allow_differences=self.allow_differences)

    @cached_property
    def lines(self) -> list[Values]:
        """Rows as tables and plots take them."""
        labels = row_labels(self.groups)
        return [line(group, labels[group.letter], self.scalings.get(group.letter)) for group in self.groups]

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Memory over time of the first run of each row, of as many rows as are drawn."""
        with_samples = (pair for pair in zip(self.lines, self.groups, strict=True) if _is_sampled(pair[1].first))
        chosen = [pair for pair, _ in zip(with_samples, range(SHOWN_RUNS), strict=False)]
        return [read_timeline(group.first, of_row["label"]) for of_row, group in chosen]

    @cached_property
    def losses(self) -> Plot:
        """Training and validation loss by step, of the first run of each row."""
        return loss_plot([group.first for group in self.groups], [of_row["label"] for of_row in self.lines])

    @cached_property
    def throughput(self) -> Plot:
        """Training samples a second of each row."""
        return throughput_plot(self.lines)

    @cached_property
    def memory(self) -> Plot:
        """Peak memory of each row, and the plan beside what is measured against it."""
        return planned_plot(self.lines)

    @cached_property
    def memory_over_time(self) -> Plot:
        """Memory of each rank by time, of the first run of each row."""
        return memory_over_time(self.timelines, sum(_is_sampled(group.first) for group in self.groups))

    @cached_property
    def scaling(self) -> Plot:
        """Scaling efficiency by processes."""
        return scaling_plot(self.lines)

    @cached_property
    def tables(self) -> list[Table]:
        """Results, runs, accuracy and whatever else was measured."""
        return tables(self.groups, self.scalings)

    @property
    def plots(self) -> dict[str, Plot]:
        """Every plot by the name of its file."""
        return {
            "memory_over_time": self.memory_over_time,
            "losses": self.losses,
            "throughput": self.throughput,
            "memory": self.memory,
            "scaling": self.scaling,
        }

    @property
    def reference(self) -> Table:
        """The published rows."""
        return reference_table()

    def remarks(self) -> list[str]:
        """A line for each thing to know about a run: how it ended, what of it could not be read, what is a copy."""
        return remarks(self.groups, self.scalings, self.timelines)

    def differences(self) -> list[str]:
        """A line for each setting besides technique and pods in which rows differ."""
        return differences(self.groups)

    def to_json(self) -> dict[str, Any]:
        """Raw values by run and by row, and what to know about them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "runs": [
                {"row": group.letter, **run.values, "accuracy": run.entry.score}
                for group in self.groups
                for run in group.runs
            ],
            "groups": [row_json(group, self.scalings.get(group.letter)) for group in self.groups],
            "differences": self.differences(),
            "reference": list(reference()),
            "remarks": self.remarks(),
        }

    def to_markdown(self) -> str:
        """The tables, and below them what to know before reading them."""
        parts = [table.to_markdown() for table in self.tables]
        parts += [markdown_list(REMARKS, self.remarks()), markdown_list(self._differ, self.differences())]
        return "\n".join(part for part in [*parts, self.reference.to_markdown(), f"{NOTE}\n"] if part)

    def to_csv(self) -> str:
        """A line for each run, raw values, empty where nothing was measured."""
        return csv_text([{"row": group.letter, **run.values} for group in self.groups for run in group.runs])

    def to_page(self) -> str:
        """The whole report as one HTML page."""
        plots = "".join(html_plot(plot) for plot in self.plots.values())
        return page(TITLE, f"<h1>{TITLE}</h1>{self._repr_html_()}<h2>Plots</h2>{plots}{self._html_reference()}")

    def files(self, document: dict[str, Any] | None = None) -> dict[str, bytes]:
        """Every file of the report by name.

        Args:
            document: what `to_json` has given, where it is there already.
        """
        return {
            "summary.md": self.to_markdown().encode(),
            "summary.json": json_text(document or self.to_json()).encode(),
            "summary.csv": self.to_csv().encode(),
            **{f"{name}.png": plot.png for name, plot in self.plots.items()},
            "index.html": self.to_page().encode(),
        }

    @property
    def _differ(self) -> str:
        return ALLOWED if self.allow_differences else DIFFER

    def _html_reference(self) -> str:
        return f"{self.reference.to_html()}<p>{NOTE}</p>"

    def _repr_html_(self) -> str:
        parts = [table.to_html() for table in self.tables]
        return "".join([*parts, html_list(REMARKS, self.remarks()), html_list(self._differ, self.differences())])


@uncollected()
def write_summary(summary: Summary, out: Path) -> dict[str, Any]:
    """Put the report's files into a folder: each of them whole, none before all are written.

    Returns:
        What `summary.json` holds.
    """
    document = summary.to_json()
    write_files(Path(out), summary.files(document))
    return document


def _is_sampled(entry: Entry) -> bool:
    return (entry.folder / "memory").is_dir()
