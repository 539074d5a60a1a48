"""The rows and columns of a summary: as lines of its tables, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeropods.evaluate.score_file import LM, SQUAD, TEXT2SQL
from zeropods.measure.record import PHASES
from zeropods.report.accuracy import OWN, accuracy_lines, task_of
from zeropods.report.entry import Entry
from zeropods.report.groups import NOT_SCALED, Group, Run, Scaling, row_letters
from zeropods.tables import Table

# The columns of a summary: how each figure is called and written for people.

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


# The rows of a summary as lines of its tables, and as JSON.

MARK = "*"
"""Behind the letter of a base that differs in more than technique and pods."""
RESULT = Column("inference_result", "inference result", "", "{:.3f}".format)
PERPLEXITY = Column("inference_result", "inference result", "", "{:,.2f}".format)
SECTIONS = (
    ("Speed", SPEED),
    ("Scaling and arithmetic", SCALING),
    ("Memory", MEMORY),
    ("Losses", LOSSES),
    ("Energy and cost", COST),
)
"""Tables that leave out what no row has; those before them show every row."""


def tables(groups: Sequence[Group], scaled: Mapping[str, Scaling]) -> list[Table]:
    """All tables of a summary: the original's columns first, then ours by what they are about."""
    labels = row_labels(groups)
    lines = [line(group, labels[group.letter], scaled.get(group.letter)) for group in groups]
    return [
        table("Results", RESULTS, lines, whole=True),
        table("Runs", RUNS, lines, whole=True),
        _accuracy_table(groups, labels),
        *(one for one in (table(title, section, lines) for title, section in SECTIONS) if one.rows),
    ]


def row_labels(groups: Sequence[Group]) -> dict[str, str]:
    """What rows are called, by letter: technique, pods and slots behind it, and the model where there are several."""
    models = {group.values["model_id"] for group in groups if group.values["technique"]}
    return {group.letter: _label(group.values, len(models) > 1) for group in groups}


def line(group: Group, label: str, scaling: Scaling | None) -> Values:
    """A row's values, and its words for people."""
    values = {**group.values, **(scaling.to_json() if scaling else NOT_SCALED)}
    words = {"inference_text": _result(values), "sharing": _sharing(values), "base": _base(values)}
    words["processes"] = values["world_size"] if values["samples_per_second"] is not None else None
    if values["planned_bytes"] is None and values["measured_bytes"] is None:
        words["planned_kind"] = None
    return {**values, **words, "label": label, "base_row": values["base"]}


def row_json(group: Group, scaling: Scaling | None) -> dict[str, Any]:
    """A row's raw values, and what another summary needs to find the same row."""
    return {
        **group.values,
        **(scaling.to_json() if scaling else NOT_SCALED),
        "settings": group.settings,
        "arrangement": group.arrangement,
    }


def _label(values: Values, with_model: bool) -> str:
    if values["technique"] is None:
        return f"{values['row']} {values['status']}"
    model = f"{values['model_id'].rsplit('/', 1)[-1]} " if with_model else ""
    slots = values["world_size"] // values["pods"] if values["world_size"] and values["pods"] else 1
    of_slots = f"x{slots}" if slots > 1 else ""
    return f"{values['row']} {model}{values['technique']} x{values['pods']}{of_slots}"


def _accuracy_table(groups: Sequence[Group], labels: Mapping[str, str]) -> Table:
    """Every row, with the columns of the tasks that were trained for or scored."""
    lines = list(_accuracy(groups, labels))
    scored = [task_of(run.entry.score) for group in groups for run in group.measured if run.entry.score]
    tasks = {*(group.task for group in groups if group.first.config), *scored} or {TEXT2SQL}
    known = [task for task in ACCURACY_OF if task in tasks]
    return table("Accuracy", accuracy_columns(known, lines), lines, whole=True)


def _accuracy(groups: Sequence[Group], labels: Mapping[str, str]) -> Iterator[Values]:
    """Lines of the rows that were scored, then one for all that were not; a row that ended badly has none."""
    measured = [number for number, group in enumerate(groups) if group.measured]
    unscored = [number for number in measured if groups[number].values["split"] is None]
    for number in measured:
        entries = [run.entry for run in groups[number].measured]
        if number not in unscored:
            yield from ({**one, "label": labels[groups[number].letter]} for one in accuracy_lines(entries))
    if unscored:
        (nothing,) = accuracy_lines([])
        label = row_letters(unscored, groups) if len(unscored) > 1 else labels[groups[unscored[0]].letter]
        yield {**nothing, "label": label}


def _result(values: Values) -> str | None:
    if values.get("inference_result") is None:
        return None
    column = PERPLEXITY if values["inference_kind"] == "perplexity" else RESULT
    return f"{values['inference_kind']} {column.show(values)} ({values['split']})"


def _sharing(values: Values) -> str | None:
    pods, machines = values["pods"], values["machines"]
    return f"{pods} on {machines}" if machines is not None and machines < pods else None


def _base(values: Values) -> str | None:
    if values["base"] == values["row"]:
        return "is the base"
    return f"{values['base']}{MARK}" if values["differs_in"] else values["base"]
