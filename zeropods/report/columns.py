"""The columns of a summary: each has one name, one unit, one formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zeropods.report.entry import Entry
from zeropods.report.table import Table

GIB = 2**30
NOT_MEASURED = "n/a"


@dataclass(frozen=True, kw_only=True)
class Column:
    """What is shown of a run in one place."""

    key: str
    """Name in JSON and CSV, with the unit of the raw value."""
    title: str
    section: str
    """The table in which people read it: `Runs`, `Training` or `Accuracy`."""
    value: Callable[[Entry], Any]
    """The raw value; None where it was not measured."""
    unit: str = ""
    """Of what people read."""
    form: Callable[[Any], str] = str
    interval: Callable[[Entry], Sequence[float] | None] = lambda entry: None
    """95 % interval of the value, shown behind it."""

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def show(self, entry: Entry) -> str:
        """The value as people read it."""
        value = self.value(entry)
        if value is None:
            return NOT_MEASURED
        interval = self.interval(entry)
        span = f" [{', '.join(map(self.form, interval))}]" if interval else ""
        return self.form(value) + span


def _fact(key: str) -> Callable[[Entry], Any]:
    return lambda entry: entry.facts.get(key)


def _scored(key: str) -> Callable[[Entry], Any]:
    return lambda entry: None if entry.score is None else entry.score[key]


def _interval(key: str) -> Callable[[Entry], Sequence[float] | None]:
    return lambda entry: None if entry.score is None else entry.score["intervals"].get(key)


def _final_eval_loss(entry: Entry) -> float | None:
    return entry.eval_losses[-1]["loss"] if entry.eval_losses else None


def _memory_kind(entry: Entry) -> str | None:
    """`allocated` on GPUs, `resident` on CPUs: different things, never in one comparison."""
    ranks = entry.facts.get("ranks", [])
    for kind in ("allocated", "resident"):
        if ranks and all(rank[f"peak_{kind}_bytes"] is not None for rank in ranks):
            return kind
    return None


def _peak_memory_bytes(entry: Entry) -> int | None:
    """Of the rank that needed most."""
    kind = _memory_kind(entry)
    return max(rank[f"peak_{kind}_bytes"] for rank in entry.facts["ranks"]) if kind else None


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _count(value: int) -> str:
    return f"{value:,}"


COLUMNS = (
    Column(key="run", title="run", section="Runs", value=lambda entry: entry.name),
    Column(key="model_id", title="model", section="Runs", value=_fact("model_id")),
    Column(key="init", title="weights", section="Runs", value=_fact("init")),
    Column(key="technique", title="technique", section="Runs", value=_fact("technique")),
    Column(key="pods", title="pods", section="Runs", value=_fact("pods")),
    Column(key="prompt", title="prompt", section="Runs", value=_fact("prompt")),
    Column(key="precision", title="precision", section="Runs", value=_fact("precision")),
    Column(key="effective_batch_size", title="batch", unit="samples", section="Runs",
           value=_fact("effective_batch_size"), form=_count),
    Column(key="status", title="status", section="Runs", value=lambda entry: entry.status),
    Column(key="reason", title="reason", section="", value=lambda entry: entry.reason),
    Column(key="steps", title="steps", section="Training", value=_fact("steps"), form=_count),
    Column(key="train_seconds", title="training", unit="s", section="Training",
           value=_fact("train_seconds"), form="{:,.1f}".format),
    Column(key="samples_per_second", title="throughput", unit="samples/s", section="Training",
           value=_fact("samples_per_second"), form="{:,.1f}".format),
    Column(key="eval_loss", title="final eval loss", unit="nats/token", section="Training",
           value=_final_eval_loss, form="{:.4f}".format),
    Column(key="peak_memory_bytes", title="peak memory", unit="GiB", section="Training",
           value=_peak_memory_bytes, form=_gib),
    Column(key="memory_kind", title="kind of memory", section="Training", value=_memory_kind),
    Column(key="split", title="split", section="Accuracy", value=lambda entry: entry.split),
    Column(key="tables", title="tables", section="Accuracy",
           value=lambda entry: None if entry.score is None else entry.tables),
    Column(key="examples", title="examples", section="Accuracy", value=_scored("examples"), form=_count),
    Column(key="exact_match", title="exact match", section="Accuracy", value=_scored("exact_match"),
           interval=_interval("exact_match"), form="{:.3f}".format),
    Column(key="logical_form_accuracy", title="logical form", section="Accuracy",
           value=_scored("logical_form_accuracy"), interval=_interval("logical_form_accuracy"),
           form="{:.3f}".format),
    Column(key="execution_accuracy", title="execution", section="Accuracy",
           value=_scored("execution_accuracy"), interval=_interval("execution_accuracy"),
           form="{:.3f}".format),
    Column(key="executable", title="executable", section="Accuracy", value=_scored("executable"),
           form=_count),
)  # fmt: skip
"""Accuracy is a share of 1, on the first of test and dev that was scored."""

SECTIONS = ("Runs", "Training", "Accuracy")
NAME = COLUMNS[0]


def tables(entries: Sequence[Entry]) -> list[Table]:
    """The sections, each row beginning with the run's name; accuracy has a row for each group of tables."""
    return [_table(section, entries) for section in SECTIONS]


def raw(entry: Entry) -> dict[str, Any]:
    """All columns of a run by key, raw."""
    return {column.key: column.value(entry) for column in COLUMNS}


def shown(entry: Entry) -> dict[str, str]:
    """What people read of a run, by heading."""
    return {column.heading: column.show(entry) for column in COLUMNS if column.value(entry) is not None}


def _table(section: str, entries: Sequence[Entry]) -> Table:
    columns = [column for column in COLUMNS if column is NAME or column.section == section]
    lines = [line for entry in entries for line in (entry.by_tables() if section == "Accuracy" else [entry])]
    rows = tuple(tuple(column.show(line) for column in columns) for line in lines)
    return Table(tuple(column.heading for column in columns), rows, section)
