"""The rows and columns of a summary: as lines of its tables, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeropods.evaluate.score_file import LM, SQUAD, TEXT2SQL
from zeropods.measure.record import PHASES, RunConfig
from zeropods.report.entry import OWN, ROUGE, Entry, accuracy_lines
from zeropods.report.figures import Values
from zeropods.report.groups import NOT_SCALED, Group, Scaling, SummaryRun, compared_rows, row_letters
from zeropods.report.planned import WHAT
from zeropods.tables import GIB, MIB, Table

GIGA = 1e9
NOT_MEASURED = "n/a"
MARK = "*"
"""Behind the letter of a base that differs in more than technique and pods."""
OUTSIDE = " (outside)"
"""Behind a measured value that lies outside of its plan's interval."""
SETTINGS_TITLE = "Settings"
"""Of the first table that says more of rows than what came of them."""


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
        """The value as people read it, with its 95 % interval; of too few repeats for one, the values themselves."""
        value = values.get(self.key)
        if value is None:
            return NOT_MEASURED
        interval, repeats = values.get(f"{self.key}_interval"), values.get(f"{self.key}_values") or ()
        if not interval and len(repeats) > 1:
            return ", ".join(map(self.form, repeats))
        span = f" [{', '.join(map(self.form, interval))}]" if interval else ""
        return self.form(value) + span


# Tables of rows.


def tables(groups: Sequence[Group], lines: Sequence[Values]) -> list[Table]:
    """All tables of a summary: what it is about, the rows that stand alone, then more by what it is about.

    The first shows the rows that are set against one another, the second those that are not; where none are, the first
    shows all. The settings are those of every row; the others leave out what no row has.

    Args:
        lines: the groups as `row_lines` gives them.
    """
    about = [line for line in lines if line["is_compared"]]
    alone = [line for line in lines if not line["is_compared"]] if about else []
    return [
        table("Results", RESULTS, about or lines, whole=True),
        *([table("Other runs", RESULTS, alone, whole=True)] if alone else []),
        table(SETTINGS_TITLE, SETTINGS, lines, whole=True),
        _accuracy_table(groups, row_labels(groups)),
        *(one for one in (table(title, columns, lines) for title, columns in SECTIONS.items()) if one.rows),
    ]


def table(title: str, columns: Sequence[Column], lines: Iterable[Values], *, whole: bool = False) -> Table:
    """Lines under their headings, each beginning with its row's label.

    Args:
        whole: keep lines and columns that hold nothing measured.
    """
    found = [(LABEL.show(line), [column.show(line) for column in columns]) for line in lines]
    kept = [(label, cells) for label, cells in found if whole or set(cells) - {NOT_MEASURED}]
    used = [i for i in range(len(columns)) if whole or any(cells[i] != NOT_MEASURED for _, cells in kept)]
    header = (LABEL.heading, *(columns[i].heading for i in used))
    return Table(header, tuple((label, *(cells[i] for i in used)) for label, cells in kept), title)


def run_table(entry: Entry) -> Table:
    """What people read of one run, a figure per line."""
    values = Group("A", (SummaryRun(entry),)).values
    accuracy = accuracy_columns([entry.score.task] if entry.score else [], [values])
    columns = [*SETTINGS[:1], *RESULTS, *SETTINGS[1:], *SPEED, *SCALING, *MEMORY, *LOSSES, *accuracy]
    return Table.of_facts(
        {column.heading: column.show(values) for column in columns if values.get(column.key) is not None}
    )


def accuracy_columns(tasks: Iterable[str], lines: Iterable[Values]) -> list[Column]:
    """The columns of the tasks, each once, and one for ROUGE and for each custom metric that a line has."""
    found = [column for task in tasks for column in ACCURACY[task]]
    keys = [key for line in lines for key in line if not key.endswith("_interval")]
    own = [key for key in keys if key in ROUGE or key.startswith(OWN)]
    return list(dict.fromkeys([*found, *(Column(key, key.removeprefix(OWN), "", _THREE) for key in own)]))


# Rows as lines of tables and plots, and as JSON.


def row_lines(groups: Sequence[Group], scaled: Mapping[str, Scaling]) -> list[Values]:
    """The values of each row, and its words for people."""
    labels, compared = row_labels(groups), compared_rows(groups, scaled)
    return [
        {
            **_line(group, labels[group.letter], scaled.get(group.letter, NOT_SCALED)),
            "is_compared": group.letter in compared,
        }
        for group in groups
    ]


def row_json(group: Group, scaling: Scaling) -> Values:
    """A row's raw values, and what another summary needs to find the same row."""
    return {**group.values, **scaling.to_json(), "settings": group.settings, "arrangement": group.arrangement}


def row_labels(groups: Sequence[Group]) -> dict[str, str]:
    """What rows are called, by letter: technique, pods and slots behind it, and the model where there are several."""
    models = {group.values["model_id"] for group in groups if group.values["technique"]}
    return {group.letter: _label(group.values, len(models) > 1) for group in groups}


def _label(values: Values, with_model: bool) -> str:
    if values["technique"] is None:
        return f"{values['row']} {values['status']}"
    model = f"{values['model_id'].rsplit('/', 1)[-1]} " if with_model else ""
    slots = values["world_size"] // max(1, values["pods"])
    return f"{values['row']} {model}{values['technique']} x{values['pods']}{f'x{slots}' if slots > 1 else ''}"


def _line(group: Group, label: str, scaling: Scaling) -> Values:
    values = {**group.values, **scaling.to_json()}
    pods, machines, base = values["pods"], values["machines"], values["base"]
    if values["planned_bytes"] is None and values["measured_bytes"] is None:
        values["planned_kind"] = None
    return {
        **values,
        "label": label,
        "hardware": hardware_text(group.first.config),
        "speed_text": _speed_text(values),
        "processes": values["world_size"] if values["samples_per_second"] is not None else None,
        "sharing": f"{pods} on {machines}" if machines is not None and machines < pods else None,
        "inference_text": _inference_text(values),
        **_plan_texts(values, "plan_peak", "bytes", _mib),
        **_plan_texts(values, "plan_step", "seconds", "{:.3g}".format),
        "base": "baseline" if base == values["row"] else f"{base}{MARK}" if values["differs_in"] else base,
        "base_row": base,
    }


def hardware_text(config: RunConfig | None) -> str:
    """What a run ran on, in a few words; an empty text where nothing is known."""
    hardware = config.hardware if config else {}
    if hardware.get("gpus"):
        return " and ".join(sorted(set(hardware["gpus"])))
    return f"{hardware['cores']} cores of {hardware['cpu']}" if {"cores", "cpu"} <= hardware.keys() else ""


def _speed_text(values: Values) -> str | None:
    """Speed-up over the base row, which is named."""
    if values["speed_up"] is None:
        return None
    mark = MARK if values["differs_in"] else ""
    shown = Column("speed_up", "", "", _TWO).show(values)
    return "1.00, baseline" if values["base"] == values["row"] else f"{shown} over {values['base']}{mark}"


def _plan_texts(values: Values, name: str, unit: str, form: Callable[[float], str]) -> Values:
    """What was planned with its interval, and what was measured, marked where it fell outside."""
    planned, low, high, measured = (values[f"{name}_{what}_{unit}"] for what in WHAT)
    if planned is None:
        return {}
    known = low is not None and high is not None
    outside = OUTSIDE if known and not low <= measured <= high else ""
    interval = f" [{form(low)}, {form(high)}]" if known else ""
    return {f"{name}_text": form(planned) + interval, f"{name}_measured_text": form(measured) + outside}


def _inference_text(values: Values) -> str | None:
    kind, result = values["inference_kind"], values["inference_result"]
    if result is None:
        return None
    column = Column("inference_result", "", "", _TWO if kind == "perplexity" else _THREE)
    return f"{kind} {column.show(values)} ({values['split']})"


def _accuracy_table(groups: Sequence[Group], labels: Mapping[str, str]) -> Table:
    """Every row, with the columns of the tasks that were trained for or scored."""
    lines = list(_accuracy_lines(groups, labels))
    scores = [run.entry.score for group in groups for run in group.measured]
    tasks = {group.task for group in groups if group.first.config} | {score.task for score in scores if score}
    known = [task for task in ACCURACY if task in (tasks or {TEXT2SQL})]
    return table("Accuracy", accuracy_columns(known, lines), lines, whole=True)


def _accuracy_lines(groups: Sequence[Group], labels: Mapping[str, str]) -> Iterator[Values]:
    """Lines of the rows that were scored, then one for all that were not; a row that ended badly has none."""
    unscored = []
    for number, group in enumerate(groups):
        if group.measured and group.values["split"] is None:
            unscored.append(number)
        elif group.measured:
            for line in accuracy_lines([run.entry for run in group.measured]):
                yield {**line, "label": labels[group.letter]}
    if unscored:
        only = labels[groups[unscored[0]].letter]
        yield {"label": row_letters(unscored, groups) if len(unscored) > 1 else only}


# The columns: how each figure is called and written for people.


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.2g}"


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def _pods(sizes: Sequence[float], form: Callable[[float], str] = _gib) -> str:
    return "-".join(dict.fromkeys((form(min(sizes)), form(max(sizes)))))


def _giga(rate: float) -> str:
    return f"{rate / GIGA:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


_COUNT, _ONE, _TWO = "{:,.0f}".format, "{:,.1f}".format, "{:,.2f}".format
_THREE, _FOUR = "{:.3f}".format, "{:.4f}".format
LABEL = Column("label", "row")
RESULTS = (
    Column("model_id", "model"),
    Column("technique_text", "technique"),
    Column("pods", "pods"),
    Column("samples_per_second", "throughput", "samples/s", _ONE),
    Column("speed_text", "speed-up"),
    Column("pod_state_bytes", "states of each pod", "MiB", lambda sizes: _pods(sizes, _mib)),
    Column("inference_text", "inference result"),
    Column("duration_seconds", "duration", "s", _ONE),
    Column("pod_activation_bytes", "activations, planned", "MiB", _mib),
    Column("pod_memory_bytes", "memory of each pod", "GiB", _pods),
    Column("status", "status"),
)
SETTINGS = (
    Column("name", "run"),
    Column("task", "task"),
    Column("init", "weights"),
    Column("prompt", "prompt"),
    Column("precision", "precision"),
    Column("effective_batch_size", "batch", "samples", _COUNT),
    Column("gradient_checkpointing", "checkpointing", "", lambda on: "on" if on else "off"),
    Column("repeats", "repeats"),
)
SPEED = (
    Column("steps", "steps", "", _COUNT),
    Column("train_seconds", "training", "s", _ONE),
    Column("tokens_per_second", "real tokens/s", "", _COUNT),
    Column("padding_share", "padding", "%", _percent),
    Column("evaluation_samples_per_second", "evaluation", "samples/s", _ONE),
    Column("plan_step_text", "step planned", "s"),
    Column("plan_step_measured_text", "step measured", "s"),
    Column("start_seconds", "start", "s", _ONE),
    Column("save_seconds", "saving", "s", _TWO),
    Column("goodput", "goodput", "%", _percent),
    Column("lost_steps", "steps done again", "", _COUNT),
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
    Column("peak_flops_run", "peak measured by"),
    Column("model_flops_utilization", "MFU", "%", _percent),
)
MEMORY = (
    Column("memory_kind", "kind of pod memory"),
    Column("phase_kind", "kind of peaks"),
    *(Column(f"peak_{phase}_bytes", phase.replace("_", " "), "GiB", _gib) for phase in PHASES),
    Column("planned_kind", "kind of plan"),
    Column("planned_bytes", "planned", "MiB", _mib),
    Column("measured_bytes", "measured", "MiB", _mib),
    Column("measured_to_planned", "measured/planned", "", _TWO),
    Column("plan_peak_text", "peak planned", "MiB"),
    Column("plan_peak_measured_text", "peak measured", "MiB"),
)
USE = tuple(
    Column(f"{column}_{statistic}", f"{title}, {words}", unit, _ONE)
    for column, title, unit in (
        ("utilization_percent", "GPU", "%"),
        ("memory_utilization_percent", "GPU memory", "%"),
        ("power_watts", "power", "W"),
        ("cpu_percent", "share of the cores", "%"),
        ("io_wait_percent", "I/O wait", "%"),
    )
    for statistic, words in (("mean", "mean"), ("p95", "95th percentile"))
)
LOSSES = (
    Column("train_loss", "final training loss", "nats/token", _FOUR),
    Column("eval_loss", "final eval loss", "nats/token", _FOUR),
)
COST = (
    Column("energy_joules", "energy", "J", _COUNT),
    Column("energy_kwh", "energy", "kWh", "{:.3g}".format),
    Column("cost", "cost", "at the price given", "{:,.4g}".format),
)
SECTIONS = {
    "Speed": SPEED,
    "Scaling and arithmetic": SCALING,
    "Memory": MEMORY,
    "Use and power": USE,
    "Losses": LOSSES,
    "Energy and cost": COST,
}
_SPLIT, _EXAMPLES = Column("split", "split"), Column("examples", "examples", "", _COUNT)
_EXACT = Column("exact_match", "exact match", "", _THREE)
ACCURACY: dict[str, tuple[Column, ...]] = {
    TEXT2SQL: (
        _SPLIT,
        Column("tables", "tables"),
        _EXAMPLES,
        _EXACT,
        Column("logical_form_accuracy", "logical form", "", _THREE),
        Column("execution_accuracy", "execution", "", _THREE),
        Column("executable", "executable", "", _COUNT),
    ),
    SQUAD: (_SPLIT, _EXAMPLES, _EXACT, Column("f1", "F1", "", _THREE)),
    LM: (
        _SPLIT,
        Column("text_tokens", "tokens", "", _COUNT),
        Column("text_loss", "loss of the text", "nats/token", _FOUR),
        Column("perplexity", "perplexity", "", _TWO),
    ),
}
"""Columns of each task."""
