"""Runs side by side: their records are read, and tables, plots and a page are made of them."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from zeropods.evaluate.score_json import TEXT2SQL
from zeropods.files import writing
from zeropods.measure.record import no_rate
from zeropods.plan.machines import GIGA
from zeropods.report.answers import Answers, answers
from zeropods.report.columns import SETTINGS_TITLE, hardware_text, row_lines, tables
from zeropods.report.entry import Entry, Timeline, find_runs, read_entry, read_timeline
from zeropods.report.formulas import is_resumed
from zeropods.report.gate import SCHEMA_VERSION
from zeropods.report.groups import Group, copies, differences, disturbed_peaks, group_runs, unlike_formats
from zeropods.report.plots import (
    SHOWN_RUNS,
    Plot,
    loss_plot,
    over_time,
    planned_plot,
    scaling_plot,
    speed_memory_plot,
    throughput_plot,
)
from zeropods.tables import GIB, Table, markdown_text

PAGE = Path(__file__).with_name("page.html")
TITLE = "Runs side by side"
REMARKS = "Notes on the runs:"
DIFFER = "Rows differ in more than technique and pods. No ratio is computed between such rows:"
ALLOWED = "Rows differ in more than technique and pods. Ratios between such rows were requested, and are marked with *:"
REFERENCE = Path(__file__).with_name("published.csv")
REFERENCE_TITLE = "Published elsewhere: A100-40GB pods, 3 epochs of WikiSQL"
REFERENCE_NOTE = (
    "Measured by others on other hardware; memory was read off screenshots of nvidia-smi. "
    "For orientation only: no ratio is computed for these rows. Caveats:"
)
NOT_PUBLISHED = "n/a"
VERSIONS = ("zeropods", "torch", "deepspeed", "transformers")
DEFINED = "Each figure is defined in docs/figures.md of zeropods."


def read_runs(runs: Sequence[Path], *, price_per_hour: float | None = None, allow_differences: bool = False) -> Summary:
    """Runs side by side; `Summary.write` makes the files of a report.

    Args:
        runs: run folders, or folders that hold some below them. A run without a good record is listed
            with the reason; a missing folder, or folders without any run, raise `UserError`.
        price_per_hour: price of a pod, in any currency.
        allow_differences: draw ratios, marked as such, between rows that differ in more than technique and pods.
    """
    entries = [read_entry(folder, name) for name, folder in find_runs(runs).items()]
    groups = group_runs(entries, price_per_hour, allow_differences=allow_differences)
    return Summary(groups, allow_differences=allow_differences)


class Summary:
    """A summary of some runs, which a notebook shows and a report holds."""

    def __init__(self, groups: Sequence[Group], *, allow_differences: bool) -> None:
        self.groups, self.allow_differences = groups, allow_differences
        self.entries = [run for group in groups for run in group.runs]
        # Rows in the form that tables and plots take.
        self.lines = row_lines(groups)
        # The first run of each row, with the row's label; and those of them that have samples of their memory.
        self._firsts = [(group.first, line["label"]) for group, line in zip(groups, self.lines, strict=True)]
        self._sampled = [(entry, label) for entry, label in self._firsts if (entry.folder / "memory").is_dir()]
        # Results, runs that are not compared, settings, accuracy and whatever else was measured.
        self.tables = tables(groups, self.lines)

    def table(self, title: str) -> Table:
        """The table with a title, such as `Scaling and arithmetic`; an empty one where no run has anything for it."""
        return next((table for table in self.tables if table.title == title), Table((), (), title))

    def answers(self) -> Answers:
        """A sentence or two each: does it fit, which technique, how long and at what cost, is the model still good."""
        return answers(self.lines)

    @cached_property
    def reference(self) -> list[dict[str, str]]:
        """The published rows as transcribed, if a run may have their task; an empty string means not published."""
        with open(REFERENCE, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file)) if any(line["task"] in (TEXT2SQL, None) for line in self.lines) else []

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Memory and use over time of the first run of each row, for as many rows as are drawn."""
        return [read_timeline(entry, label) for entry, label in self._sampled[:SHOWN_RUNS]]

    @cached_property
    def plots(self) -> dict[str, Plot]:
        """Every plot by the name of its file; the first one comes at the top of the page.

        Losses, memory and use over time are of the first run of each row.
        """
        return {
            "speed_memory": speed_memory_plot(self.lines),
            "throughput": throughput_plot(self.lines),
            "memory": planned_plot(self.lines),
            "losses": loss_plot([(label, entry.record) for entry, label in self._firsts]),
            "scaling": scaling_plot(self.lines),
            **{f"{what}_over_time": over_time(self.timelines, len(self._sampled), what) for what in ("memory", "use")},
        }

    def remarks(self) -> list[str]:
        """A line for each thing to know about a run, and for each ratio between rows that differ in more than technique
        and pods. Of a run: how it ended, what could not be read, why it has no samples/s, whether it is a copy or
        computed in another precision than it was asked to."""
        entries = self.entries
        resumed = (entry.name for entry in entries if entry.record is not None and is_resumed(entry.record))
        return [
            *(f"{e.name}: {e.status}: {e.reason}" for e in entries if e.status != "ok" or e.reason),
            *copies(entries).values(),
            *_without_a_rate(entries),
            *unlike_formats(entries),
            *disturbed_peaks(entries),
            *(f"{name}: was resumed: its times are those of its last attempt" for name in resumed),
            *(f"{timeline.label}: {fault}" for timeline in self.timelines for fault in timeline.faults),
            *(
                f"* {line['row']} is compared with {line['base']}, but they differ in {', '.join(line['differs_in'])}"
                for line in self.lines
                if line["differs_in"]
            ),
        ]

    def origin(self) -> str:
        """When, on which hardware and with which versions the runs were made, and where their figures are defined."""
        configs = [entry.config for entry in self.entries if entry.config is not None]
        days = sorted(config.started_at[:10] for config in configs)
        versions = {f"{name} {c.versions[name]}" for c in configs for name in VERSIONS if c.versions.get(name)}
        said = [
            " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
            " and ".join(sorted({hardware_text(config) for config in configs} - {""})),
            ", ".join(sorted(versions)),
        ]
        known = "; ".join(filter(None, said))
        return f"{f'Measured: {known}. ' if known else ''}{DEFINED}"

    def differences(self) -> list[str]:
        """A line for each setting besides technique and pods in which rows differ."""
        return differences(self.groups)

    def to_json(self) -> dict[str, Any]:
        """Raw values by run and by row, and what to know about them."""
        remarks, differences = self.notes.values()
        return {
            "schema_version": SCHEMA_VERSION,
            "answers": self.answers().to_json(),
            "runs": [
                {"row": group.letter, **run.values, "accuracy": run.score and asdict(run.score)}
                for group in self.groups
                for run in group.runs
            ],
            "groups": [group.to_json() for group in self.groups],
            "differences": differences,
            "reference": self.reference,
            "remarks": remarks,
        }

    def to_markdown(self) -> str:
        """The answers, where the figures come from, the tables, and below them what to know before reading them."""
        return f"{self.answers().to_markdown()}\n{self.origin()}\n\n{self.to_text(Table.to_markdown)}"

    def to_text(self, shown: Callable[[Table], str] = str) -> str:
        """The tables, and below them what to know before reading them."""
        published = [shown(reference_table(self.reference))] if self.reference else []
        notes = (_markdown_list(title, items) for title, items in self.notes.items())
        about = _markdown_list(REFERENCE_NOTE, self.confounders)
        return "\n".join(part for part in (*map(shown, self.tables), *notes, *published, about) if part)

    def to_csv(self) -> str:
        """A line of raw values for each run, empty where nothing was measured; spaces separate the items of a list."""
        lines = [{"row": group.letter, **run.values} for group in self.groups for run in group.runs]
        text = io.StringIO()
        table = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
        table.writeheader()
        for line in lines:
            table.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in line.items()})
        return text.getvalue()

    def to_page(self) -> str:
        """The whole report as one HTML page that needs nothing else: no script, no font, no address."""
        last = [table.title for table in self.tables].index(SETTINGS_TITLE)
        folds = {table.title: replace(table, title="").to_html() for table in self.tables[last:]}
        first, *others = (plot.svg for plot in self.plots.values())
        published = reference_table(self.reference).to_html() + html_list(REFERENCE_NOTE, self.confounders)
        # Not jinja2, whose import takes longer than making all tables.
        return Template(PAGE.read_text(encoding="utf-8").rstrip()).substitute(
            title=TITLE,
            answers=self.answers()._repr_html_(),
            origin=escape(self.origin()),
            first=first,
            shown="\n".join(table.to_html() for table in self.tables[:last]),
            notes="".join(html_list(title, items) for title, items in self.notes.items()),
            folded="\n".join(f"<details><summary>{title}</summary>{fold}</details>" for title, fold in folds.items()),
            others="\n".join(f"<figure>{other}</figure>" for other in others),
            published=published if self.reference else "",
        )

    def write(self, out: Path) -> dict[str, Any]:
        """Write the report's files into a folder: each file appears whole, and none before all of them are written.

        Returns:
            What `summary.json` holds.
        """
        from pydantic_core import to_json

        document = self.to_json()
        files = {
            "summary.md": self.to_markdown().encode(),
            "summary.json": to_json(document, indent=2) + b"\n",
            "summary.csv": self.to_csv().encode(),
            **{f"{name}.svg": plot.svg.encode() for name, plot in self.plots.items()},
            "index.html": self.to_page().encode(),
        }
        out.mkdir(parents=True, exist_ok=True)
        with writing(out), tempfile.TemporaryDirectory(dir=out, prefix=".summary.") as staging:
            for name, content in files.items():
                (Path(staging) / name).write_bytes(content)
            for name in files:
                os.replace(Path(staging) / name, out / name)
        return document

    @cached_property
    def notes(self) -> dict[str, list[str]]:
        """What to know before reading the tables: lists of lines by their heading."""
        return {REMARKS: self.remarks(), ALLOWED if self.allow_differences else DIFFER: self.differences()}

    @property
    def confounders(self) -> list[str]:
        """What makes each published row hard to compare."""
        return [f"{row['model']} {row['technique']} x{row['pods']}: {row['confounders']}" for row in self.reference]

    def _repr_html_(self) -> str:
        notes = (html_list(title, items) for title, items in self.notes.items())
        return "".join([self.answers()._repr_html_(), *(table.to_html() for table in self.tables), *notes])

    def __repr__(self) -> str:
        return self.to_text()


def _without_a_rate(entries: Sequence[Entry]) -> Iterator[str]:
    """A line for each run that ended well without samples/s, which says why."""
    for entry in entries:
        if entry.status == "ok" and entry.record is not None and entry.record.samples_per_second is None:
            yield f"{entry.name}: {no_rate(entry.record)}"


def reference_table(rows: Sequence[dict[str, str]]) -> Table:
    """The published rows as people read them: figures that were measured on other hardware."""
    return Table.of(
        (
            {
                "model": row["model"],
                "technique": row["technique"],
                "pods": row["pods"],
                "training (s)": f"{float(seconds):,.1f}" if (seconds := row["train_seconds"]) else NOT_PUBLISHED,
                "samples/s": row["samples_per_second"] or NOT_PUBLISHED,
                "memory of each pod (GiB)": "-".join(
                    dict.fromkeys(f"{float(row[f'gigabytes_a_pod_{end}']) * GIGA / GIB:.1f}" for end in ("low", "high"))
                ),
                "batch": row["effective_batch_size"],
            }
            for row in rows
        ),
        REFERENCE_TITLE,
    )


def _markdown_list(title: str, items: Sequence[str]) -> str:
    return f"{title}\n\n" + "".join(f"- {markdown_text(item)}\n" for item in items) if items else ""


def html_list(title: str, items: Sequence[str]) -> str:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<p>{escape(title)}</p><ul>{lines}</ul>" if lines else ""
