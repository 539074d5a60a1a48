"""The rows and columns of a summary: lines of its tables and plots, and how people read each figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zeropods.evaluate.score_json import LM, SQUAD, TEXT2SQL
from zeropods.measure.calibration import WHAT
from zeropods.measure.record import PHASES, PRECISION_PARTS, MeasuredPrecision, RunConfig
from zeropods.plan.machines import GIGA
from zeropods.report.entry import OWN, ROUGE, Entry, accuracy_lines
from zeropods.report.formulas import Values
from zeropods.report.groups import Group, compared_rows, group_runs, row_letters
from zeropods.tables import GIB, MIB, Table, digits

NOT_MEASURED = "n/a"
SETTINGS_TITLE = "Settings"
"""Title of the first table that describes the rows and not their results."""


@dataclass(frozen=True)
class Column:
    """One column of a table: how people read one figure."""

    key: str
    title: str
    unit: str = ""
    form: Callable[[Any], str] = str
    text: Callable[[Values], str | None] | None = None
    """Function that gives the text to show in place of the figure, where that text is made of several values."""

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def show(self, values: Values) -> str:
        """The value as people read it, with its 95 % interval; with too few repeats for that, the value of each."""
        value = values.get(self.key)
        if value is None:
            return NOT_MEASURED
        if self.text is not None:
            return self.text(values) or NOT_MEASURED
        interval, repeats = values.get(f"{self.key}_interval"), values.get(f"{self.key}_values") or ()
        if not interval and len(repeats) > 1:
            return ", ".join(map(self.form, repeats))
        span = f" [{', '.join(map(self.form, interval))}]" if interval else ""
        return self.form(value) + span


def shown(value: Any, form: Callable[[Any], str] = str) -> str:
    """A value as people read it."""
    return NOT_MEASURED if value is None else form(value)


# Tables of rows.


def tables(groups: Sequence[Group], lines: Sequence[Values]) -> list[Table]:
    """All tables of a summary: the results, the rows that are not compared, the settings, then figures by topic.

    The first shows the rows that are compared with each other, the second those that are not; where none are, the first
    shows all. The settings are those of every row; tables by topic leave out rows and columns without a figure.

    Args:
        lines: the groups as returned by `row_lines`.
    """
    about = [line for line in lines if line["is_compared"]]
    alone = [line for line in lines if not line["is_compared"]] if about else []
    more = (table(title, (LABEL, *columns), lines) for title, columns in SECTIONS.items())
    return [
        table("Results", (LABEL, *RESULTS), about or lines, whole=True),
        *([table("Other runs", (LABEL, *RESULTS), alone, whole=True)] if alone else []),
        table(SETTINGS_TITLE, (LABEL, *SETTINGS), lines, whole=True),
        _accuracy_table(groups, lines),
        *(one for one in more if one.rows),
    ]


def table(title: str, columns: Sequence[Column], lines: Iterable[Values], *, whole: bool = False) -> Table:
    """A table of lines under their headings; the first column tells the lines apart.

    Args:
        whole: keep lines and columns in which nothing was measured.
    """
    found = [[column.show(line) for column in columns] for line in lines]
    kept = [cells for cells in found if whole or set(cells[1:]) - {NOT_MEASURED}]
    used = [n for n in range(len(columns)) if whole or not n or any(cells[n] != NOT_MEASURED for cells in kept)]
    rows = tuple(tuple(cells[n] for n in used) for cells in kept)
    return Table(tuple(columns[n].heading for n in used), rows, title)


MAIN = (
    "technique_text", "pods", "precision_weights", "effective_batch_size", "status", "steps", "train_seconds",
    "duration_seconds", "samples_per_second", "pod_memory_bytes", "train_loss", "eval_loss", "inference_result",
)  # fmt: skip
"""Figures of a run that matter first, in their order."""


def run_table(entry: Entry, *, whole: bool) -> Table:
    """The figures of one run, one per line: all that were measured if `whole`, else those of `MAIN`."""
    values = group_runs([entry])[0].values
    accuracy = accuracy_columns({entry.score.task} if entry.score else set(), [values])
    sections = (SECTIONS[title] for title in ("Speed", "Scaling and arithmetic", "Memory", "Losses"))
    columns = [*SETTINGS[:1], *RESULTS, *SETTINGS[1:], *itertools.chain(*sections), *accuracy]
    if not whole:
        by_key = {column.key: column for column in reversed(columns)}
        columns = [by_key[key] for key in MAIN]
    shown = {column.heading: column.show(values) for column in columns}
    return Table.of_facts({heading: text for heading, text in shown.items() if text != NOT_MEASURED})


def accuracy_columns(tasks: set[str], lines: Iterable[Values]) -> list[Column]:
    """The accuracy columns of the tasks, and one for each ROUGE measure and custom metric that a line has."""
    keys = dict.fromkeys(key for line in lines for key in line if not key.endswith("_interval"))
    own = (Column(key, key.removeprefix(OWN), "", THREE) for key in keys if key in ROUGE or key.startswith(OWN))
    return [*(column for column, of in ACCURACY if tasks & of), *own]


def _accuracy_table(groups: Sequence[Group], lines: Sequence[Values]) -> Table:
    """A table of every row that was scored, then one line for all that were not, with the columns of the tasks that
    runs were trained for or scored on; a row without a record has no line."""
    labels, unscored, found = [line["label"] for line in lines], [], list[Values]()
    tasks = {group.values["task"] for group in groups if group.first.config}
    for group in (group for group in groups if group.measured):
        tasks |= {run.score.task for run in group.measured if run.score}
        if group.values["split"] is None:
            unscored.append(group)
        else:
            found += [{**line, "label": labels[group.number]} for line in accuracy_lines(group.measured)]
    if unscored:
        found.append({"label": row_letters(unscored) if len(unscored) > 1 else labels[unscored[0].number]})
    return table("Accuracy", (LABEL, *accuracy_columns(tasks or {TEXT2SQL}, found)), found, whole=True)


# Rows as lines of tables and plots.


def row_lines(groups: Sequence[Group]) -> list[Values]:
    """The values of each row, with its labels, its hardware, and whether it is compared with others.

    A label has the letter, the technique with its pods and slots, and the model where there are several models.
    """
    compared, lines = compared_rows(groups), []
    several = len({group.values["model_id"] for group in groups if group.values["technique"]}) > 1
    for group in groups:
        values = group.values
        label = short = f"{values['row']} {values['status']}"
        if values["technique"] is not None:
            slots = values["world_size"] // max(1, values["pods"])
            name = f"{values['technique']} x{values['pods']}{f'x{slots}' if slots > 1 else ''}"
            label = short = f"{values['row']} {name}"
            if several:
                label = f"{values['row']} {values['model_id'].rsplit('/', 1)[-1]} {name}"
        hardware, is_compared = hardware_text(group.first.config), values["row"] in compared
        lines.append({**values, "label": label, "short_label": short, "hardware": hardware, "is_compared": is_compared})
    return lines


def hardware_text(config: RunConfig | None) -> str:
    """The hardware of a run in a few words; an empty string where it is not known."""
    hardware = config.hardware if config else {}
    if hardware.get("gpus"):
        return " and ".join(sorted(set(hardware["gpus"])))
    return f"{hardware['cores']} cores of {hardware['cpu']}" if {"cores", "cpu"} <= hardware.keys() else ""


def _base_text(values: Values) -> str:
    """The letter of the base row, with a `*` where the two rows differ in more than technique and pods."""
    return "baseline" if values["base"] == values["row"] else values["base"] + ("*" if values["differs_in"] else "")


def _speed_text(values: Values) -> str:
    """Speed-up over the base row, with the letter of that row."""
    if values["base"] == values["row"]:
        return "1.00, baseline"
    return f"{Column('speed_up', '', '', TWO).show(values)} over {_base_text(values)}"


def inference_text(values: Values) -> str:
    """The figure that a model is judged by, with its name and its split."""
    column = Column("inference_result", "", "", TWO if values["inference_kind"] == "perplexity" else THREE)
    return f"{values['inference_kind']} {column.show(values)} ({values['split']})"


# The columns: what each figure is called and how it is written for people.


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.2g}"


def mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def _pods(sizes: Sequence[float], form: Callable[[float], str] = _gib) -> str:
    return "-".join(dict.fromkeys((form(min(sizes)), form(max(sizes)))))


def _giga(rate: float) -> str:
    return f"{rate / GIGA:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _sharing(values: Values) -> str | None:
    return f"{values['pods']} on {values['machines']}" if values["machines"] < values["pods"] else None


def _measured_precision(values: Values) -> str:
    """The number formats of the first step, as far as all repeats agree on them."""
    return MeasuredPrecision(**{part: values[f"precision_{part}"] for part in PRECISION_PARTS}).text


def _plan_kind(values: Values) -> str | None:
    return None if values["planned_bytes"] is None is values["measured_bytes"] else str(values["planned_kind"])


def _plan_columns(what: str, raw: str, unit: str, form: Callable[[float], str]) -> Iterator[Column]:
    """Columns for a planned figure, with its interval, and for the measured one, marked where it lies outside."""

    def text(values: Values, which: str) -> str:
        planned, low, high, measured = (values[f"plan_{what}_{each}_{raw}"] for each in WHAT)
        has_interval = low is not None and high is not None
        if which == "planned":
            return form(planned) + (f" [{form(low)}, {form(high)}]" if has_interval else "")
        return form(measured) + (" (outside)" if has_interval and not low <= measured <= high else "")

    for which in ("planned", "measured"):
        yield Column(f"plan_{what}_planned_{raw}", f"{what} {which}", unit, text=partial(text, which=which))


COUNT, ONE, TWO = "{:,.0f}".format, "{:,.1f}".format, "{:,.2f}".format
THREE, FOUR = "{:.3f}".format, "{:.4f}".format
LABEL = Column("label", "row")
RESULTS = (
    Column("samples_per_second", "throughput", "samples/s", ONE),
    Column("speed_up", "speed-up", text=_speed_text),
    Column("pod_state_bytes", "states of each pod", "MiB", lambda sizes: _pods(sizes, mib)),
    Column("inference_result", "inference result", text=inference_text),
    Column("duration_seconds", "duration", "s", ONE),
    Column("pod_memory_bytes", "memory of each pod", "GiB", _pods),
    Column("status", "status"),
    Column("pod_activation_bytes", "activations, planned", "MiB", mib),
    Column("model_id", "model"),
    Column("technique_text", "technique"),
    Column("pods", "pods"),
)
"""What a technique costs and yields comes first; what the label also says comes last, where narrow terminals wrap."""
SETTINGS = (
    Column("name", "run"),
    Column("task", "task"),
    Column("init", "weights"),
    Column("prompt", "prompt"),
    Column("precision", "precision"),
    Column("precision_weights", "measured precision", text=_measured_precision),
    Column("effective_batch_size", "batch", "samples", COUNT),
    Column("gradient_checkpointing", "checkpointing", "", lambda on: "on" if on else "off"),
    Column("repeats", "repeats"),
)
SECTIONS: dict[str, tuple[Column, ...]] = {
    "Speed": (
        Column("steps", "steps", "", COUNT),
        Column("train_seconds", "training", "s", ONE),
        Column("tokens_per_second", "real tokens/s", "", COUNT),
        Column("padding_share", "padding", "%", _percent),
        Column("evaluation_samples_per_second", "evaluation", "samples/s", ONE),
        *_plan_columns("step", "seconds", "s", digits),
        Column("start_seconds", "start", "s", ONE),
        Column("save_seconds", "saving", "s", TWO),
        Column("goodput", "goodput", "%", _percent),
        Column("lost_steps", "steps done again", "", COUNT),
    ),
    "Scaling and arithmetic": (
        Column("samples_per_second", "processes", text=lambda values: str(values["world_size"])),
        Column("speed_up", "speed-up", "", TWO),
        Column("scaling_efficiency", "scaling efficiency", "", TWO),
        Column("base", "against row", text=_base_text),
        Column("machines", "pods on machines", text=_sharing),
        Column("model_flops_per_second", "model", "GFLOP/s", _giga),
        Column("peak_flops_per_second", "peak", "GFLOP/s", _giga),
        Column("peak_flops_kind", "kind of peak"),
        Column("peak_flops_run", "peak measured by"),
        Column("model_flops_utilization", "MFU", "%", _percent),
    ),
    "Memory": (
        Column("memory_kind", "kind of pod memory"),
        Column("process_peak_bytes", "process: peak", "MiB", mib),
        Column("process_mean_bytes", "process: mean", "MiB", mib),
        Column("process_minimum_bytes", "process: minimum", "MiB", mib),
        Column("phase_kind", "kind of peaks"),
        *(Column(f"peak_{phase}_bytes", phase.replace("_", " "), "GiB", _gib) for phase in PHASES),
        Column("planned_kind", "kind of plan", text=_plan_kind),
        Column("planned_bytes", "planned", "MiB", mib),
        Column("measured_bytes", "measured", "MiB", mib),
        Column("measured_to_planned", "measured/planned", "", TWO),
        *_plan_columns("peak", "bytes", "MiB", mib),
    ),
    "Use and power": tuple(
        Column(f"{column}_{statistic}", f"{title}, {words}", unit, ONE)
        for column, title, unit in (
            ("utilization_percent", "GPU", "%"),
            ("memory_utilization_percent", "GPU memory", "%"),
            ("power_watts", "power", "W"),
            ("cpu_percent", "share of the cores", "%"),
            ("io_wait_percent", "I/O wait", "%"),
        )
        for statistic, words in (("mean", "mean"), ("p95", "95th percentile"))
    ),
    "Losses": (
        Column("train_loss", "final training loss", "nats/token", FOUR),
        Column("eval_loss", "final eval loss", "nats/token", FOUR),
    ),
    "Energy and cost": (
        Column("energy_joules", "energy", "J", COUNT),
        Column("energy_kwh", "energy", "kWh", digits),
        Column("cost", "cost", "at the price given", digits),
    ),
}
QUERIES, QUESTIONS, TEXT = {TEXT2SQL}, {TEXT2SQL, SQUAD}, {LM}
ACCURACY: tuple[tuple[Column, set[str]], ...] = (
    (Column("split", "split"), QUESTIONS | TEXT),
    (Column("tables", "tables"), QUERIES),
    (Column("examples", "examples", "", COUNT), QUESTIONS),
    (Column("exact_match", "exact match", "", THREE), QUESTIONS),
    (Column("logical_form_accuracy", "logical form", "", THREE), QUERIES),
    (Column("execution_accuracy", "execution", "", THREE), QUERIES),
    (Column("executable", "executable", "", COUNT), QUERIES),
    (Column("f1", "F1", "", THREE), {SQUAD}),
    (Column("text_tokens", "tokens", "", COUNT), TEXT),
    (Column("text_loss", "loss of the text", "nats/token", FOUR), TEXT),
    (Column("perplexity", "perplexity", "", TWO), TEXT),
)
"""Columns of accuracy, each with the tasks that have it."""
