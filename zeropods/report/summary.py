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

from zeropods.files import writing
from zeropods.measure.record import RunConfig, no_rate
from zeropods.plan.machines import GIGA
from zeropods.report.answers import Answers, answers
from zeropods.report.columns import SETTINGS_TITLE, hardware_text, labelled_rows, tables
from zeropods.report.entry import Entry, Timeline, find_runs, read_entry, read_timeline
from zeropods.report.formulas import is_resumed
from zeropods.report.gate import SCHEMA_VERSION
from zeropods.report.groups import (
    Group,
    copy_remarks,
    differences,
    disturbed_peaks,
    group_runs,
    remark_lines,
    unlike_formats,
)
from zeropods.report.plots import (
    PLOTTED_RUNS,
    Plot,
    loss_plot,
    over_time,
    planned_memory_plot,
    scaling_plot,
    speed_memory_plot,
    throughput_plot,
)
from zeropods.report.row import Row
from zeropods.tables import GIB, Table, markdown_text
from zeropods.tasks import TEXT2SQL

PAGE_TEMPLATE = Path(__file__).with_name("page.html")
PAGE_TITLE = "Runs side by side"
REMARKS_HEADING = "Notes on the runs:"
DIFFERENCES_HEADING = (
    "Rows differ in more than technique and pods. No ratio is computed between such rows:"
)
ALLOWED_DIFFERENCES_HEADING = (
    "Rows differ in more than technique and pods. Ratios between such rows were requested, and are "
    "marked with *:"
)
REFERENCE = Path(__file__).with_name("published.csv")
REFERENCE_TITLE = "Published elsewhere: A100-40GB pods, 3 epochs of WikiSQL"
REFERENCE_NOTE = (
    "Measured by others on other hardware; memory was read off screenshots of nvidia-smi. "
    "For orientation only: no ratio is computed for these rows. Caveats:"
)
NOT_PUBLISHED = "n/a"
NOTHING_PUBLISHED = "nothing of the models of these runs"
NAMED_VERSIONS = ("zeropods", "torch", "deepspeed", "transformers")
DEFINITIONS = "Each figure is defined in docs/figures.md of zeropods."


def read_runs(
    runs: Sequence[Path],
    *,
    price_per_hour: float | None = None,
    allow_differences: bool = False,
) -> Summary:
    """Runs side by side; `Summary.write` makes the files of a report.

    Args:
        runs: run folders, or folders that hold some below them. A run without a good record is
            listed with the reason.
        price_per_hour: price of a pod, in any currency.
        allow_differences: compute ratios, marked as such, between rows that differ in more than
            technique and pods.

    Raises:
        UserError: a folder is missing, or no folder has a run.
    """
    entries = [read_entry(folder, name) for name, folder in find_runs(runs).items()]
    groups = group_runs(entries, price_per_hour, allow_differences=allow_differences)
    return Summary(groups, allow_differences=allow_differences)


class Summary:
    """A summary of some runs, which a notebook shows and a report holds."""

    def __init__(self, groups: Sequence[Group], *, allow_differences: bool) -> None:
        """Make the tables; plots are drawn when they are first asked for.

        Args:
            groups: the rows, as `group_runs` returns them.
            allow_differences: what `group_runs` was told, so that a heading can say it.
        """
        self.groups = groups
        self.allow_differences = allow_differences
        self.entries = [run for group in groups for run in group.runs]
        self.rows = labelled_rows(groups)
        """The rows with their labels, as tables and plots take them."""
        self.tables = tables(groups, self.rows)
        """Tables of results first, then, from the one of the settings on, of how they came
        about."""
        self._first_runs: list[tuple[Entry, str]] = []
        """The first run of each row, with the row's label."""
        self._first_runs_with_samples: list[tuple[Entry, str]] = []
        """Those of `_first_runs` that have samples of their memory."""
        for group, row in zip(groups, self.rows, strict=True):
            labelled_run = (group.first, row.label)
            self._first_runs.append(labelled_run)
            if (group.first.folder / "memory").is_dir():
                self._first_runs_with_samples.append(labelled_run)

    def table(self, title: str) -> Table:
        """The table with a title, such as `Scaling and arithmetic`; an empty one where no run has
        anything for it."""
        for table in self.tables:
            if table.title == title:
                return table
        return Table((), (), title)

    def answers(self) -> Answers:
        """A sentence or two each: does it fit, which technique, how long and at what cost, is the
        model still good."""
        return answers(self.rows)

    @cached_property
    def reference(self) -> list[dict[str, str]]:
        """The published rows of the models that these runs train on text-to-SQL, which is what was
        published; no rows for runs of other tasks. Values are text as transcribed; an empty one was
        not published."""
        models = set()
        for row in self.rows:
            if row.config is not None and row.config.task == TEXT2SQL:
                models.add(row.config.model_id.rsplit("/", 1)[-1])
        with open(REFERENCE, encoding="utf-8", newline="") as file:
            return [line for line in csv.DictReader(file) if line["model"] in models]

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Memory and use over time of the first run of each row that has samples, at most
        `PLOTTED_RUNS`."""
        return [
            read_timeline(entry, label)
            for entry, label in self._first_runs_with_samples[:PLOTTED_RUNS]
        ]

    @cached_property
    def plots(self) -> dict[str, Plot]:
        """Every plot by the name of its file without `.svg`; the first one comes at the top of the
        page.

        Losses are of the first run of each row; memory, and use of GPU or cores, over time are
        those of `timelines`.
        """
        records = [(label, entry.record) for entry, label in self._first_runs]
        # `timelines` are at most `PLOTTED_RUNS`; a title says of how many.
        number_with_samples = len(self._first_runs_with_samples)
        return {
            "speed_memory": speed_memory_plot(self.rows),
            "throughput": throughput_plot(self.rows),
            "memory": planned_memory_plot(self.rows),
            "losses": loss_plot(records),
            "scaling": scaling_plot(self.rows),
            "memory_over_time": over_time(self.timelines, number_with_samples, "memory"),
            "use_over_time": over_time(self.timelines, number_with_samples, "use"),
        }

    def remarks(self) -> list[str]:
        """A line for each thing to know about runs, and for each ratio between rows that differ in
        more than technique and pods.

        Of a run: how a repeat failed, what could not be read, why it has no samples/s, whether it
        is a copy, was disturbed, was resumed, or computed in another precision than it was asked
        for. Why a whole row failed stands in a table of its own.
        """
        remarks = remark_lines(self._failed_repeats())
        remarks += copy_remarks(self.entries)
        remarks += remark_lines(_without_a_rate(self.entries))
        remarks += remark_lines(unlike_formats(self.entries))
        remarks += disturbed_peaks(self.entries)
        remarks += remark_lines(_resumed(self.entries))
        for timeline in self.timelines:
            remarks += [f"{timeline.label}: {fault}" for fault in timeline.faults]
        remarks += _ratio_remarks(self.rows)
        return remarks

    def _failed_repeats(self) -> Iterator[tuple[str, str]]:
        """The name of each run that failed or could not be read as a whole, with its status and the
        reason, of the rows that have a result all the same."""
        for group in self.groups:
            if not group.row.is_done:
                # The table of failed rows says why.
                continue
            for run in group.runs:
                if run.status != "ok" or run.reason:
                    yield run.name, f"{run.status}: {run.reason}"

    def origin(self) -> str:
        """When, on which hardware and with which versions the runs were made, and where their
        figures are defined."""
        configs = [entry.config for entry in self.entries if entry.config is not None]
        hardware = {hardware_text(config) for config in configs} - {""}
        parts = [
            _days_text(configs),
            " and ".join(sorted(hardware)),
            ", ".join(sorted(_versions(configs))),
        ]
        known_parts = [part for part in parts if part]
        if not known_parts:
            return DEFINITIONS
        return f"Measured: {'; '.join(known_parts)}. {DEFINITIONS}"

    def differences(self) -> list[str]:
        """A line for each setting besides technique and pods in which rows differ."""
        return differences(self.groups)

    def to_json(self) -> dict[str, Any]:
        """What `summary.json` holds: raw values by run and by row, and what to know about them."""
        # Their headings are for people; the second one depends on `allow_differences`.
        remarks, differences = self.notes.values()
        runs = []
        for group in self.groups:
            for run, values in zip(group.runs, group.runs_to_json(), strict=True):
                accuracy = None if run.score is None else asdict(run.score)
                runs.append({**values, "accuracy": accuracy})
        return {
            "schema_version": SCHEMA_VERSION,
            "answers": self.answers().to_json(),
            "runs": runs,
            "groups": [group.to_json() for group in self.groups],
            "differences": differences,
            "reference": self.reference,
            "remarks": remarks,
        }

    def to_markdown(self) -> str:
        """The answers, where the figures come from, the tables, and below them what to know before
        reading them."""
        tables_and_notes = self.to_text(Table.to_markdown)
        return f"{self.answers().to_markdown()}\n{self.origin()}\n\n{tables_and_notes}"

    def to_text(self, shown: Callable[[Table], str] = str) -> str:
        """The tables, below them what to know before reading them, then the published rows.

        Args:
            shown: makes a table's text: for a terminal if not given.
        """
        parts = [shown(table) for table in self.tables]
        parts += [_markdown_list(heading, items) for heading, items in self.notes.items()]
        if self.reference:
            parts.append(shown(reference_table(self.reference)))
        parts.append(_markdown_list(REFERENCE_NOTE, self.confounders))
        return "\n".join(part for part in parts if part)

    def to_csv(self) -> str:
        """A line of raw values for each run; a cell is empty where nothing was measured, and spaces
        separate the items of a list."""
        runs = []
        for group in self.groups:
            runs += group.runs_to_json()
        # The keys of all runs, in the order in which they are first met: a run that was scored has
        # more of them.
        keys: dict[str, None] = {}
        for run in runs:
            keys |= dict.fromkeys(run)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(keys), lineterminator="\n")
        writer.writeheader()
        for run in runs:
            writer.writerow({key: _csv_cell(value) for key, value in run.items()})
        return text.getvalue()

    def to_page(self) -> str:
        """The whole report as one HTML page that loads nothing: no script, no font, no image."""
        first_plot, *other_plots = (plot.svg for plot in self.plots.values())
        published = ""
        if self.reference:
            published = reference_table(self.reference).to_html()
            published += html_list(REFERENCE_NOTE, self.confounders)
        # Not jinja2, whose import takes longer than making all tables.
        template = Template(PAGE_TEMPLATE.read_text(encoding="utf-8").rstrip())
        return template.substitute(
            title=PAGE_TITLE,
            answers=self.answers()._repr_html_(),
            origin=escape(self.origin()),
            first=first_plot,
            shown=self._results_html(),
            notes=self._notes_html(),
            folded=self._further_html(),
            others="\n".join(f"<figure>{plot}</figure>" for plot in other_plots),
            published=published,
        )

    def write(self, out: Path) -> dict[str, Any]:
        """Write the report's files into a folder, which is made where it is missing.

        All of them are written to a folder beside their places first: so each appears whole, and
        where one cannot be written, those of an earlier report stay.

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
        """What to know before reading the tables, as lines by their heading: first the remarks,
        then the differences."""
        heading = DIFFERENCES_HEADING
        if self.allow_differences:
            heading = ALLOWED_DIFFERENCES_HEADING
        return {REMARKS_HEADING: self.remarks(), heading: self.differences()}

    @property
    def confounders(self) -> list[str]:
        """A line for each published row: what makes it hard to compare."""
        lines = []
        for row in self.reference:
            name = f"{row['model']} {row['technique']} x{row['pods']}"
            lines.append(f"{name}: {row['confounders']}")
        return lines

    def _notes_html(self) -> str:
        return "".join(html_list(heading, items) for heading, items in self.notes.items())

    @property
    def _number_of_results(self) -> int:
        """How many tables tell results; the others, which begin with the one of the settings, say
        how the results came about."""
        titles = [table.title for table in self.tables]
        return titles.index(SETTINGS_TITLE)

    def _results_html(self) -> str:
        """The tables of results."""
        return "\n".join(table.to_html() for table in self.tables[: self._number_of_results])

    def _further_html(self) -> str:
        """All other tables, folded under their titles."""
        folded_tables = []
        for table in self.tables[self._number_of_results :]:
            # The fold has the title already.
            cells = replace(table, title="").to_html()
            folded_tables.append(f"<details><summary>{table.title}</summary>{cells}</details>")
        return "\n".join(folded_tables)

    def _repr_html_(self) -> str:
        answers_html = self.answers()._repr_html_()
        results = self._results_html()
        return f"{answers_html}{results}{self._notes_html()}{self._further_html()}"

    def __repr__(self) -> str:
        return self.to_text()


def _without_a_rate(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """The name of each run that ended well without samples/s, with a text that says why."""
    for entry in entries:
        record = entry.record
        if entry.status != "ok" or record is None:
            continue
        if record.samples_per_second is None:
            yield entry.name, no_rate(record)


def _resumed(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """The name of each run that was resumed, with a text that says so."""
    for entry in entries:
        if entry.record is not None and is_resumed(entry.record):
            yield entry.name, "was resumed: its times are those of its last attempt"


def _ratio_remarks(rows: Sequence[Row]) -> list[str]:
    """Why ratios are marked with `*`: a line for all rows that differ from one base in the same
    settings; none where all rows differ from their base only in technique and pods."""
    labels_by_text: dict[str, list[str]] = {}
    for row in rows:
        if row.comparison.differs_in:
            settings = ", ".join(row.comparison.differs_in)
            text = f"compared with {row.base_label}, but they differ in {settings}"
            labels_by_text.setdefault(text, []).append(row.short_label)
    lines = []
    for text, labels in labels_by_text.items():
        verb = "is" if len(labels) == 1 else "are each"
        lines.append(f"* {', '.join(labels)} {verb} {text}")
    return lines


def _days_text(configs: Sequence[RunConfig]) -> str:
    """The days on which the first and the last run started; empty without a run."""
    days = sorted(config.started_at[:10] for config in configs)
    if not days:
        return ""
    first_day = days[0]
    last_day = days[-1]
    return first_day if first_day == last_day else f"{first_day} to {last_day}"


def _versions(configs: Sequence[RunConfig]) -> set[str]:
    """The versions of `NAMED_VERSIONS` that runs have recorded, such as `torch 2.7.1`."""
    versions = set()
    for config in configs:
        for name in NAMED_VERSIONS:
            version = config.versions.get(name)
            if version:
                versions.add(f"{name} {version}")
    return versions


def _csv_cell(value: object) -> object:
    """The value; the items of a list are separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def reference_table(rows: Sequence[dict[str, str]]) -> Table:
    """The published rows as people read them: figures that were measured on other hardware.

    Args:
        rows: lines of `published.csv`, as `Summary.reference` has them; without any, the table
            says so.
    """
    if not rows:
        return Table(("",), ((NOTHING_PUBLISHED,),), REFERENCE_TITLE)
    lines = []
    for row in rows:
        seconds = row["train_seconds"]
        low = _published_gib(row["gigabytes_a_pod_low"])
        high = _published_gib(row["gigabytes_a_pod_high"])
        lines.append(
            {
                "model": row["model"],
                "technique": row["technique"],
                "pods": row["pods"],
                "training (s)": f"{float(seconds):,.1f}" if seconds else NOT_PUBLISHED,
                "samples/s": row["samples_per_second"] or NOT_PUBLISHED,
                "memory of each pod (GiB)": low if low == high else f"{low}-{high}",
                "batch": row["effective_batch_size"],
            }
        )
    return Table.of(lines, REFERENCE_TITLE)


def _published_gib(gigabytes: str) -> str:
    """Published GB in GiB, as text."""
    return f"{float(gigabytes) * GIGA / GIB:.1f}"


def _markdown_list(title: str, items: Sequence[str]) -> str:
    """A title and its items as a list; empty where there are no items."""
    if not items:
        return ""
    lines = "".join(f"- {markdown_text(item)}\n" for item in items)
    return f"{title}\n\n{lines}"


def html_list(title: str, items: Sequence[str]) -> str:
    """A title and its items as a list; empty where there are no items."""
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<p>{escape(title)}</p><ul>{lines}</ul>" if lines else ""
