"""Runs side by side: records in; tables, plots and a page out."""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from zeropods.files import writing
from zeropods.report.entry import Entry, find_runs, read_entry
from zeropods.report.figures import is_resumed
from zeropods.report.gate import SCHEMA_VERSION
from zeropods.report.groups import Group, Scaling, copies, differences, group_runs, scalings
from zeropods.report.memory_plot import SHOWN_RUNS, Timeline, memory_over_time, read_timeline
from zeropods.report.plots import Plot, loss_plot, planned_plot, scaling_plot, throughput_plot
from zeropods.report.rows import Values, line, row_json, row_labels, tables
from zeropods.tables import Table, markdown_text

# What to know about runs before reading their figures.


def remarks(groups: Sequence[Group], scaled: Mapping[str, Scaling], timelines: Sequence[Timeline]) -> list[str]:
    """A line for each run that did not end well, or of which something could not be read; and for each ratio of
    rows that differ in more than technique and pods."""
    entries = [run.entry for group in groups for run in group.runs]
    ended = [f"{e.name}: {e.status}: {e.reason}" for e in entries if e.status != "ok" or e.reason]
    resumed = [f"{e.name}: was resumed: its times are those of its last attempt" for e in entries if _is_resumed(e)]
    faults = [f"{of_run.label}: {fault}" for of_run in timelines for fault in of_run.faults]
    return [*ended, *copies(entries), *resumed, *faults, *_allowed(scaled)]


def _is_resumed(entry: Entry) -> bool:
    return entry.record is not None and is_resumed(entry.record)


def _allowed(scaled: Mapping[str, Scaling]) -> Iterator[str]:
    for letter, scaling in scaled.items():
        if scaling.differs_in:
            yield f"* {letter} is set against {scaling.base} although they differ in {', '.join(scaling.differs_in)}"


# A report's documents as text, and as files that appear together.


def json_text(document: dict[str, Any]) -> str:
    """JSON with each item of a list on a line of its own: Python indents a tenth as fast as it writes."""

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    def part(value: Any) -> str:
        return "[\n" + ",\n".join(map(written, value)) + "\n]" if isinstance(value, list) and value else written(value)

    return "{\n" + ",\n".join(f"{written(key)}: {part(value)}" for key, value in document.items()) + "\n}\n"


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Values by name, a line each; None is empty, a list its items with spaces between them."""
    text = io.StringIO()
    header = dict.fromkeys(key for line in lines for key in line)
    writer = csv.DictWriter(text, list(header), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in line.items()} for line in lines)
    return text.getvalue()


def markdown_list(title: str, items: Sequence[str]) -> str:
    """A line and its items; nothing where there are none."""
    return f"{title}\n\n" + "".join(f"- {markdown_text(item)}\n" for item in items) if items else ""


def write_files(out: Path, files: Mapping[str, bytes]) -> None:
    """Put files into a folder by name: each of them whole, none before all are written."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".summary.") as staging:
        for name, content in files.items():
            with writing(out / name):
                (Path(staging) / name).write_bytes(content)
        for name in files:
            os.replace(Path(staging) / name, out / name)


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


# A report as one HTML page that needs nothing else.

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


# The published reference: figures of other hardware, with what confounds each. Never part of a ratio.

PUBLISHED = Path(__file__).parents[1] / "plan" / "published.csv"
REFERENCE_TITLE = "Published elsewhere: A100-40GB pods, 3 epochs of WikiSQL"
NOTE = (
    "Measured by others on other hardware; memory was read off screenshots of nvidia-smi. "
    "For orientation only: no ratio is drawn to these rows."
)
NOT_PUBLISHED = "n/a"


@cache
def reference() -> tuple[dict[str, str], ...]:
    """The published rows as they were transcribed; an empty text where nothing was published."""
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def reference_table() -> Table:
    """The published rows as people read them."""
    return Table.of((_line(row) for row in reference()), REFERENCE_TITLE)


def _line(row: dict[str, str]) -> dict[str, str]:
    low, high = row["gigabytes_a_pod_low"], row["gigabytes_a_pod_high"]
    return {
        "model": row["model"],
        "technique": row["technique"],
        "pods": row["pods"],
        "training (s)": _number(row["train_seconds"]),
        "samples/s": row["samples_per_second"] or NOT_PUBLISHED,
        "memory of each pod (GB)": (low if low == high else f"{low}-{high}") or NOT_PUBLISHED,
        "batch": row["effective_batch_size"] or NOT_PUBLISHED,
        "what confounds it": row["confounders"],
    }


def _number(text: str) -> str:
    return f"{float(text):,.1f}" if text else NOT_PUBLISHED


# A summary without the garbage collector.


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking, again and again, through records that are all kept.

    What is drawn in the meantime leaves a few figures, which it finds afterwards. Also a decorator.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Runs side by side: records in; tables, plots and a page out.

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
