"""The rows and columns of a summary: lines of its tables and plots, and how people read each
figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zeropods.measure.calibration import WHAT, Judged
from zeropods.measure.record import PHASES, PRECISION_PARTS, MeasuredPrecision, RunConfig
from zeropods.plan.machines import GIGA
from zeropods.report.entry import CUSTOM_METRIC, ROUGE, Entry, accuracy_lines
from zeropods.report.formulas import Values
from zeropods.report.groups import Group, compared_rows, group_runs, row_letters
from zeropods.tables import GIB, MIB, Table, digits
from zeropods.tasks import TEXT2SQL, task_or_unknown

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
    """Function that gives the text to show in place of the figure, where that text is made of
    several values."""

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def show(self, values: Values) -> str:
        """The value as people read it, with its 95 % interval; with too few repeats for that, the
        value of each."""
        value = values.get(self.key)
        if value is None:
            return NOT_MEASURED
        if self.text is not None:
            return self.text(values) or NOT_MEASURED
        interval = values.get(f"{self.key}_interval")
        if interval:
            ends = ", ".join(self.form(end) for end in interval)
            return f"{self.form(value)} [{ends}]"
        repeats = values.get(f"{self.key}_values") or ()
        if len(repeats) > 1:
            return ", ".join(self.form(repeat) for repeat in repeats)
        return self.form(value)


def shown(value: Any, form: Callable[[Any], str] = str) -> str:
    """A value as people read it."""
    return NOT_MEASURED if value is None else form(value)


# Tables of rows.


def tables(groups: Sequence[Group], lines: Sequence[Values]) -> list[Table]:
    """All tables of a summary: the results, the rows that are not compared, the settings, then
    figures by topic.

    The first shows the rows that are compared with each other, the second those that are not; where
    none are, the first shows all. The settings are those of every row; tables by topic leave out
    rows and columns without a figure.

    Args:
        lines: the groups as returned by `row_lines`.
    """
    compared = [line for line in lines if line["is_compared"]]
    others = [line for line in lines if not line["is_compared"]]
    all_tables = [table("Results", (LABEL_COLUMN, *RESULT_COLUMNS), compared or lines, whole=True)]
    if compared and others:
        all_tables.append(table("Other runs", (LABEL_COLUMN, *RESULT_COLUMNS), others, whole=True))
    all_tables.append(table(SETTINGS_TITLE, (LABEL_COLUMN, *SETTING_COLUMNS), lines, whole=True))
    all_tables.append(_accuracy_table(groups, lines))
    for title, columns in SECTIONS.items():
        section = table(title, (LABEL_COLUMN, *columns), lines)
        if section.rows:
            all_tables.append(section)
    return all_tables


def table(
    title: str, columns: Sequence[Column], lines: Iterable[Values], *, whole: bool = False
) -> Table:
    """A table of lines under their headings; the first column tells the lines apart.

    Args:
        whole: keep lines and columns in which nothing was measured.
    """
    header = [column.heading for column in columns]
    rows = [[column.show(line) for column in columns] for line in lines]
    if not whole:
        rows = [row for row in rows if _has_figure(row[1:])]
        used = [i for i in range(len(columns)) if i == 0 or _has_figure(row[i] for row in rows)]
        header = [header[i] for i in used]
        rows = [[row[i] for i in used] for row in rows]
    return Table(tuple(header), tuple(tuple(row) for row in rows), title)


def _has_figure(cells: Iterable[str]) -> bool:
    return any(cell != NOT_MEASURED for cell in cells)


MAIN = (
    "technique_text",
    "pods",
    "precision_weights",
    "effective_batch_size",
    "status",
    "steps",
    "train_seconds",
    "duration_seconds",
    "samples_per_second",
    "pod_memory_bytes",
    "train_loss",
    "eval_loss",
    "inference_result",
)
"""Figures of a run that matter first, in their order."""


def run_table(entry: Entry, *, whole: bool) -> Table:
    """The figures of one run, one per line: all that were measured if `whole`, else those of
    `MAIN`."""
    values = group_runs([entry])[0].values
    tasks: set[str] = {entry.score.task} if entry.score else set()
    columns = [
        *SETTING_COLUMNS[:1],
        *RESULT_COLUMNS,
        *SETTING_COLUMNS[1:],
        *SECTIONS["Speed"],
        *SECTIONS["Scaling and arithmetic"],
        *SECTIONS["Memory"],
        *SECTIONS["Losses"],
        *accuracy_columns(tasks, [values]),
    ]
    if not whole:
        # Of several columns with the same key, the first one counts.
        by_key = {column.key: column for column in reversed(columns)}
        columns = [by_key[key] for key in MAIN]
    texts = {column.heading: column.show(values) for column in columns}
    measured = {heading: text for heading, text in texts.items() if text != NOT_MEASURED}
    return Table.of_facts(measured)


def accuracy_columns(tasks: set[str], lines: Iterable[Values]) -> list[Column]:
    """The accuracy columns of the tasks, and one for each ROUGE measure and custom metric that a
    line has."""
    figures: set[str] = set()
    for task in tasks:
        figures.update(task_or_unknown(task).figures)
    columns = [column for column in ACCURACY if column.key in figures]
    keys = dict.fromkeys(itertools.chain.from_iterable(lines))
    for key in keys:
        is_custom = key.startswith(CUSTOM_METRIC) and not key.endswith("_interval")
        if key in ROUGE or is_custom:
            columns.append(Column(key, key.removeprefix(CUSTOM_METRIC), "", THREE))
    return columns


def _accuracy_table(groups: Sequence[Group], lines: Sequence[Values]) -> Table:
    """A table of every row that was scored, then one line for all that were not, with the columns
    of the tasks that runs were trained for or scored on; a row without a record has no line."""
    tasks = {group.values["task"] for group in groups if group.first.config}
    scored: list[Values] = []
    unscored = []
    for group in groups:
        if not group.measured:
            continue
        tasks |= {run.score.task for run in group.measured if run.score}
        if group.values["split"] is None:
            unscored.append(group)
            continue
        label = lines[group.number]["label"]
        for line in accuracy_lines(group.measured):
            scored.append({**line, "label": label})
    if len(unscored) == 1:
        scored.append({"label": lines[unscored[0].number]["label"]})
    elif unscored:
        scored.append({"label": row_letters(unscored)})
    columns = accuracy_columns(tasks or {TEXT2SQL}, scored)
    return table("Accuracy", (LABEL_COLUMN, *columns), scored, whole=True)


# Rows as lines of tables and plots.


def row_lines(groups: Sequence[Group]) -> list[Values]:
    """The values of each row, with its labels, its hardware, and whether it is compared with
    others.

    A label has the letter, the technique with its pods and slots, and the model where there are
    several models.
    """
    compared = compared_rows(groups)
    models = {group.values["model_id"] for group in groups if group.values["technique"]}
    lines = []
    for group in groups:
        values = group.values
        lines.append(
            {
                **values,
                "label": _label(values, with_model=len(models) > 1),
                "short_label": _label(values, with_model=False),
                "hardware": hardware_text(group.first.config),
                "is_compared": group.letter in compared,
            }
        )
    return lines


def _label(values: Values, *, with_model: bool) -> str:
    """The letter of a row, and its technique with pods and slots; without a record its status."""
    if values["technique"] is None:
        return f"{values['row']} {values['status']}"
    words = [values["row"]]
    if with_model:
        words.append(values["model_id"].rsplit("/", 1)[-1])
    words.append(values["technique"])
    slots = values["world_size"] // max(1, values["pods"])
    words.append(f"x{values['pods']}x{slots}" if slots > 1 else f"x{values['pods']}")
    return " ".join(words)


def hardware_text(config: RunConfig | None) -> str:
    """The hardware of a run in a few words; an empty string where it is not known."""
    hardware = config.hardware if config else {}
    if hardware.get("gpus"):
        return " and ".join(sorted(set(hardware["gpus"])))
    if "cores" in hardware and "cpu" in hardware:
        return f"{hardware['cores']} cores of {hardware['cpu']}"
    return ""


def _base_text(values: Values) -> str:
    """The letter of the base row, with a `*` where the two rows differ in more than technique and
    pods."""
    if values["base"] == values["row"]:
        return "baseline"
    mark = "*" if values["differs_in"] else ""
    return f"{values['base']}{mark}"


def _speed_text(values: Values) -> str:
    """Speed-up over the base row, with the letter of that row."""
    if values["base"] == values["row"]:
        return "1.00, baseline"
    return f"{Column('speed_up', '', '', TWO).show(values)} over {_base_text(values)}"


def inference_text(values: Values) -> str:
    """The figure that a model is judged by, with its name and its split."""
    form = TWO if values["inference_kind"] == "perplexity" else THREE
    figure = Column("inference_result", "", "", form).show(values)
    return f"{values['inference_kind']} {figure} ({values['split']})"


# The columns: what each figure is called and how it is written for people.


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.2f}" if size >= GIB / 10 else f"{gib:.2g}"


def mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def _pods_in_gib(sizes: Sequence[float]) -> str:
    return _least_to_most(sizes, _gib)


def _pods_in_mib(sizes: Sequence[float]) -> str:
    return _least_to_most(sizes, mib)


def _least_to_most(sizes: Sequence[float], form: Callable[[float], str]) -> str:
    """The smallest and the largest size, once where both read alike."""
    least = form(min(sizes))
    most = form(max(sizes))
    return least if least == most else f"{least}-{most}"


def _giga(rate: float) -> str:
    return f"{rate / GIGA:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _on_or_off(is_on: bool) -> str:
    return "on" if is_on else "off"


def _processes(values: Values) -> str:
    return str(values["world_size"])


def _sharing(values: Values) -> str | None:
    """On how many machines the pods are, where some share one."""
    if values["machines"] >= values["pods"]:
        return None
    return f"{values['pods']} on {values['machines']}"


def _measured_precision(values: Values) -> str:
    """The number formats of the first step, as far as all repeats agree on them."""
    formats = {part: values[f"precision_{part}"] for part in PRECISION_PARTS}
    return MeasuredPrecision(**formats).text


def _plan_kind(values: Values) -> str | None:
    """The kind of a plan, where a size was planned or measured."""
    if values["planned_bytes"] is None and values["measured_bytes"] is None:
        return None
    return str(values["planned_kind"])


def _plan_columns(
    what: str, raw_unit: str, unit: str, form: Callable[[float], str]
) -> Iterator[Column]:
    """Columns for a planned figure, with its interval, and for the measured one, marked where it
    lies outside."""

    def judged(values: Values) -> Judged:
        return Judged(**{part: values[f"plan_{what}_{part}_{raw_unit}"] for part in WHAT})

    def planned_text(values: Values) -> str:
        planned, low, high, _ = judged(values)
        if low is None or high is None:
            return form(planned)
        return f"{form(planned)} [{form(low)}, {form(high)}]"

    def measured_text(values: Values) -> str:
        _, low, high, measured = judged(values)
        if low is None or high is None or low <= measured <= high:
            return form(measured)
        return f"{form(measured)} (outside)"

    # Both are shown where there is a plan.
    key = f"plan_{what}_planned_{raw_unit}"
    yield Column(key, f"{what} planned", unit, text=planned_text)
    yield Column(key, f"{what} measured", unit, text=measured_text)


def _use_columns(column: str, title: str, unit: str) -> Iterator[Column]:
    """Columns for the mean and the 95th percentile of a column of samples."""
    yield Column(f"{column}_mean", f"{title}, mean", unit, ONE)
    yield Column(f"{column}_p95", f"{title}, 95th percentile", unit, ONE)


COUNT, ONE, TWO = "{:,.0f}".format, "{:,.1f}".format, "{:,.2f}".format
THREE, FOUR = "{:.3f}".format, "{:.4f}".format
LABEL_COLUMN = Column("label", "row")
RESULT_COLUMNS = (
    Column("samples_per_second", "throughput", "samples/s", ONE),
    Column("speed_up", "speed-up", text=_speed_text),
    Column("pod_state_bytes", "states of each pod", "MiB", _pods_in_mib),
    Column("inference_result", "inference result", text=inference_text),
    Column("duration_seconds", "duration", "s", ONE),
    Column("pod_memory_bytes", "memory of each pod", "GiB", _pods_in_gib),
    Column("status", "status"),
    Column("pod_activation_bytes", "activations, planned", "MiB", mib),
    Column("model_id", "model"),
    Column("technique_text", "technique"),
    Column("pods", "pods"),
)
"""What a technique costs and yields comes first; what the label also says comes last, where narrow
terminals wrap."""
SETTING_COLUMNS = (
    Column("name", "run"),
    Column("task", "task"),
    Column("init", "weights"),
    Column("prompt", "prompt"),
    Column("precision", "precision"),
    Column("precision_weights", "measured precision", text=_measured_precision),
    Column("effective_batch_size", "batch", "samples", COUNT),
    Column("gradient_checkpointing", "checkpointing", "", _on_or_off),
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
        Column("samples_per_second", "processes", text=_processes),
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
    "Use and power": (
        *_use_columns("utilization_percent", "GPU", "%"),
        *_use_columns("memory_utilization_percent", "GPU memory", "%"),
        *_use_columns("power_watts", "power", "W"),
        *_use_columns("cpu_percent", "share of the cores", "%"),
        *_use_columns("io_wait_percent", "I/O wait", "%"),
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
ACCURACY = (
    Column("split", "split"),
    Column("tables", "tables"),
    Column("examples", "examples", "", COUNT),
    Column("exact_match", "exact match", "", THREE),
    Column("logical_form_accuracy", "logical form", "", THREE),
    Column("execution_accuracy", "execution", "", THREE),
    Column("executable", "executable", "", COUNT),
    Column("f1", "F1", "", THREE),
    Column("text_tokens", "tokens", "", COUNT),
    Column("text_loss", "loss of the text", "nats/token", FOUR),
    Column("perplexity", "perplexity", "", TWO),
)
"""Columns of accuracy; each task has some of them."""
