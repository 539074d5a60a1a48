"""The columns of a summary: how each figure is called and written for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zeropods.evaluate.score_file import LM, SQUAD, TEXT2SQL
from zeropods.measure.rank import PHASES
from zeropods.report.accuracy import OWN
from zeropods.report.entry import Entry
from zeropods.report.groups import Group, Run
from zeropods.report.table import Table

GIB, MIB = 2**30, 2**20
GIGA = 1e9
NOT_MEASURED = "n/a"
Values = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """How people read one figure."""

    key: str
    title: str
    unit: str = ""
    form: Callable[[Any], str] = str

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def show(self, values: Values) -> str:
        """The value as people read it, with its 95 % interval where it has one."""
        value = values.get(self.key)
        if value is None:
            return NOT_MEASURED
        interval = values.get(f"{self.key}_interval")
        span = f" [{', '.join(map(self.form, interval))}]" if interval else ""
        return self.form(value) + span


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.2g}"


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def _pods(sizes: Sequence[float]) -> str:
    low, high = _gib(min(sizes)), _gib(max(sizes))
    return low if low == high else f"{low}-{high}"


def _giga(rate: float) -> str:
    return f"{rate / GIGA:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


_ONE, _TWO, _THREE, _FOUR = "{:,.1f}".format, "{:,.2f}".format, "{:.3f}".format, "{:.4f}".format
LABEL = Column("label", "row")
RESULTS = (
    Column("model_id", "model"),
    Column("technique", "technique"),
    Column("pods", "pods"),
    Column("duration_seconds", "duration", "s", _ONE),
    Column("inference_text", "inference result"),
    Column("pod_memory_bytes", "memory of each pod", "GiB", _pods),
    Column("memory_kind", "kind of memory"),
    Column("status", "status"),
)
SPEED = (
    Column("steps", "steps", "", _count),
    Column("train_seconds", "training", "s", _ONE),
    Column("samples_per_second", "throughput", "samples/s", _ONE),
    Column("tokens_per_second", "real tokens/s", "", _count),
    Column("padding_share", "padding", "%", _percent),
    Column("evaluation_samples_per_second", "evaluation", "samples/s", _ONE),
    Column("start_seconds", "start", "s", _ONE),
    Column("save_seconds", "saving", "s", _TWO),
)
SCALING = (
    Column("processes", "processes"),
    Column("speed_up", "speed-up", "", _TWO),
    Column("scaling_efficiency", "scaling efficiency", "", _TWO),
    Column("base", "against row"),
    Column("sharing", "pods on machines"),
    Column("model_flops_per_second", "model", "GFLOP/s", _giga),
    Column("peak_flops_per_second", "peak", "GFLOP/s", _giga),
    Column("peak_flops_kind", "kind of peak"),
    Column("model_flops_utilization", "MFU", "%", _percent),
)
MEMORY = (
    Column("phase_kind", "kind of peaks"),
    *(Column(f"peak_{phase}_bytes", phase.replace("_", " "), "GiB", _gib) for phase in PHASES),
    Column("planned_kind", "kind of plan"),
    Column("planned_bytes", "planned", "MiB", _mib),
    Column("measured_bytes", "measured", "MiB", _mib),
    Column("measured_to_planned", "measured/planned", "", _TWO),
)
LOSSES = (
    Column("train_loss", "final training loss", "nats/token", _FOUR),
    Column("eval_loss", "final eval loss", "nats/token", _FOUR),
)
_SPLIT, _EXAMPLES = Column("split", "split"), Column("examples", "examples", "", _count)
_EXACT = Column("exact_match", "exact match", "", _THREE)
ACCURACY_OF: dict[str, tuple[Column, ...]] = {
    TEXT2SQL: (
        _SPLIT,
        Column("tables", "tables"),
        _EXAMPLES,
        _EXACT,
        Column("logical_form_accuracy", "logical form", "", _THREE),
        Column("execution_accuracy", "execution", "", _THREE),
        Column("executable", "executable", "", _count),
    ),
    SQUAD: (_SPLIT, _EXAMPLES, _EXACT, Column("f1", "F1", "", _THREE)),
    LM: (
        _SPLIT,
        Column("text_tokens", "tokens", "", _count),
        Column("text_loss", "loss of the text", "nats/token", _FOUR),
        Column("perplexity", "perplexity", "", _TWO),
    ),
}
"""By task."""
COST = (
    Column("energy_joules", "energy", "J", _count),
    Column("energy_kwh", "energy", "kWh", "{:.3g}".format),
    Column("cost", "cost", "at the price given", "{:,.4g}".format),
)
RUNS = (
    Column("name", "run"),
    Column("task", "task"),
    Column("init", "weights"),
    Column("prompt", "prompt"),
    Column("precision", "precision"),
    Column("effective_batch_size", "batch", "samples", _count),
    Column("gradient_checkpointing", "checkpointing", "", lambda on: "on" if on else "off"),
    Column("repeats", "repeats"),
)


def accuracy_columns(tasks: Iterable[str], lines: Iterable[Values]) -> list[Column]:
    """The columns of the tasks, each once, and one for each metric of the user's own that a line has."""
    found = [column for task in tasks for column in ACCURACY_OF[task]]
    own = [key for line in lines for key in line if key.startswith(OWN) and not key.endswith("_interval")]
    return list(dict.fromkeys([*found, *(Column(key, key.removeprefix(OWN), "", _THREE) for key in own)]))


def table(title: str, columns: Sequence[Column], lines: Iterable[Values], *, whole: bool = False) -> Table:
    """Lines under their headings, each beginning with its row's label.

    Args:
        whole: keep lines and columns that hold nothing measured.
    """
    found = [(line, [column.show(line) for column in columns]) for line in lines]
    kept = [(line, cells) for line, cells in found if whole or any(cell != NOT_MEASURED for cell in cells)]
    used = [i for i, _ in enumerate(columns) if whole or any(cells[i] != NOT_MEASURED for _, cells in kept)]
    header = (LABEL.heading, *(columns[i].heading for i in used))
    return Table(header, tuple((LABEL.show(line), *(cells[i] for i in used)) for line, cells in kept), title)


def shown(entry: Entry) -> dict[str, str]:
    """What people read of a run, by heading."""
    group = Group("A", (Run(entry),))
    accuracy = accuracy_columns([entry.score["task"]] if entry.score else [], [group.values])
    sections = (RUNS[:1], RESULTS, RUNS[1:], SPEED, SCALING, MEMORY, LOSSES, accuracy)
    columns = [column for section in sections for column in section]
    return {column.heading: column.show(group.values) for column in columns if group.values.get(column.key) is not None}
