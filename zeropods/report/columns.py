"""The rows and columns of a summary: lines of its tables and plots, and how people read each
figure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from zeropods.measure.record import RunConfig
from zeropods.plan.machines import GIGA
from zeropods.report.entry import Entry, accuracy_lines
from zeropods.report.formulas import measured_precision
from zeropods.report.groups import Group, compared_rows, group_runs, row_names
from zeropods.report.row import CUSTOM_METRIC, Accuracy, Figures, Row, pods_and_slots
from zeropods.report.settings import is_profiled
from zeropods.tables import GIB, MIB, Table, digits
from zeropods.tasks import TASKS, TEXT2SQL, Measure, figures_of

Source = TypeVar("Source")
Value = TypeVar("Value")
NOT_MEASURED = "n/a"
RESULTS_TITLE = "Results"
OTHERS_TITLE = "Runs with other settings"
FAILED_TITLE = "Failed or unfinished runs"
SETTINGS_TITLE = "Settings"
"""Title of the first table that describes the rows and not their results."""
ACCURACY_TITLE = "Accuracy"


@dataclass(frozen=True)
class Column(Generic[Source]):
    """One column of a table: how people read one figure of a row, or of its accuracy."""

    title: str
    unit: str
    text: Callable[[Source], str]
    """Function that gives the text of a cell, `NOT_MEASURED` where there is no figure."""

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def shown(value: Value | None, form: Callable[[Value], str] = str) -> str:
    """A value as people read it; `NOT_MEASURED` for None."""
    return NOT_MEASURED if value is None else form(value)


def _with_interval(
    value: float | None, interval: Sequence[float] | None, form: Callable[[float], str]
) -> str:
    """A value as people read it, with its 95 % interval where it has one."""
    if value is not None and interval:
        ends = ", ".join(form(end) for end in interval)
        return f"{form(value)} [{ends}]"
    return shown(value, form)


# Tables of rows.


def tables(groups: Sequence[Group], rows: Sequence[Row]) -> list[Table]:
    """All tables of a summary: the results, the rows that are not compared with them, the runs
    without a result, the settings, the accuracy, then figures by topic.

    The settings are those of every row; tables by topic leave out rows and columns without a
    figure, and a table that would be empty is left out.

    Args:
        rows: what `labelled_rows` makes of these groups, in the same order.
    """
    all_tables = _result_tables(rows)
    all_tables.append(table(SETTINGS_TITLE, (LABEL_COLUMN, *SETTING_COLUMNS), rows, whole=True))
    all_tables.append(_accuracy_table(groups, rows))
    for title, columns in SECTIONS.items():
        section = table(title, (LABEL_COLUMN, *columns), rows)
        if section.rows:
            all_tables.append(section)
    return all_tables


def _result_tables(rows: Sequence[Row]) -> list[Table]:
    """What came of the runs: a table of the rows that are compared with each other, or of all that
    ended well where none are; of the other ones; and of the runs without a result."""
    done = [row for row in rows if row.is_done]
    compared = [row for row in done if row.is_compared]
    others = [row for row in done if not row.is_compared]
    failed = [row for row in rows if not row.is_done]
    columns = (LABEL_COLUMN, *RESULT_COLUMNS)
    result_tables = []
    if done:
        result_tables.append(table(RESULTS_TITLE, columns, compared or others, whole=True))
    if compared and others:
        result_tables.append(table(OTHERS_TITLE, columns, others, whole=True))
    if failed:
        result_tables.append(table(FAILED_TITLE, (LABEL_COLUMN, *FAILED_COLUMNS), failed))
    return result_tables


def table(
    title: str,
    columns: Sequence[Column[Source]],
    sources: Iterable[Source],
    *,
    whole: bool = False,
) -> Table:
    """A table with a line for each source; the first column tells the lines apart.

    Args:
        sources: what the columns take their texts from, such as rows.
        whole: keep lines and columns in which nothing was measured.
    """
    header = [column.heading for column in columns]
    rows = [[column.text(source) for column in columns] for source in sources]
    if not whole:
        rows = [row for row in rows if _has_figure(row[1:])]
        # The first column is no figure: it stays in any case.
        kept_columns = [0]
        for i in range(1, len(columns)):
            if _has_figure(row[i] for row in rows):
                kept_columns.append(i)
        header = [header[i] for i in kept_columns]
        rows = [[row[i] for i in kept_columns] for row in rows]
    return Table(tuple(header), tuple(tuple(row) for row in rows), title)


def _has_figure(cells: Iterable[str]) -> bool:
    """Whether something was measured in one of these cells."""
    return any(cell != NOT_MEASURED for cell in cells)


def run_table(entry: Entry, *, whole: bool) -> Table:
    """The figures of one run that were measured, one per line: all of them if `whole`, else those
    of `MAIN`."""
    (group,) = group_runs([entry])
    row = group.row
    columns: Sequence[Column[Row]] = MAIN
    if whole:
        # Which run it is comes first, its other settings after its results.
        run_column, *other_settings = SETTING_COLUMNS
        columns = [
            run_column,
            *RESULT_COLUMNS,
            *other_settings,
            *SECTIONS["Speed"],
            *SECTIONS["Scaling and arithmetic"],
            *SECTIONS["Memory"],
            *SECTIONS["Losses"],
        ]
    texts = {column.heading: column.text(row) for column in columns}
    if whole and entry.score is not None:
        for accuracy_column in accuracy_columns({entry.score.task}, [row.accuracy]):
            texts[accuracy_column.heading] = accuracy_column.text(row.accuracy)
    measured = {heading: text for heading, text in texts.items() if text != NOT_MEASURED}
    return Table.of_facts(measured)


def accuracy_columns(tasks: set[str], lines: Iterable[Accuracy]) -> list[Column[Accuracy]]:
    """The accuracy columns of the tasks, and one for each ROUGE measure and custom metric that a
    line has."""
    known_tasks = [task for name, task in TASKS.items() if name in tasks]
    figures = figures_of(known_tasks)
    columns: list[Column[Accuracy]] = []
    if figures:
        columns.append(SPLIT_COLUMN)
    if any(task.has_tables for task in known_tasks):
        columns.append(TABLES_COLUMN)
    columns += [_score_column(figure) for figure in figures]
    # One column for each measure, in the order in which the measures are first met.
    further_columns: dict[str, Column[Accuracy]] = {}
    for line in lines:
        for name in line.rouge:
            further_columns.setdefault(name, _rouge_column(name))
        for name in line.custom_metrics:
            # With a prefix, since a custom metric may have the name of a ROUGE measure.
            further_columns.setdefault(f"{CUSTOM_METRIC}{name}", _custom_column(name))
    return [*columns, *further_columns.values()]


def _score_column(figure: Measure) -> Column[Accuracy]:
    """The column of a figure of scores, which shows its interval too."""

    def text(accuracy: Accuracy) -> str:
        value = accuracy.values.get(figure.key)
        return _with_interval(value, accuracy.intervals.get(figure.key), figure.text)

    return Column(figure.name, figure.unit, text)


def _rouge_column(name: str) -> Column[Accuracy]:
    """The column of a ROUGE measure, which has no interval."""
    return _of_accuracy(name, lambda accuracy: accuracy.rouge.get(name), THREE)


def _custom_column(name: str) -> Column[Accuracy]:
    """The column of a custom metric, which shows its interval too."""

    def text(accuracy: Accuracy) -> str:
        value = accuracy.custom_metrics.get(name)
        return _with_interval(value, accuracy.custom_intervals.get(name), THREE)

    return Column(name, "", text)


def _accuracy_table(groups: Sequence[Group], rows: Sequence[Row]) -> Table:
    """A table of every row that was scored, then one line for all that were not, with the columns
    of the tasks that runs were trained for or scored on.

    A row has a line over all tables and one for each group of tables. Rows whose lines read alike
    share them. A row without a record has no line.

    Args:
        rows: those of the groups, with their labels.
    """
    tasks = {row.config.task for row in rows if row.config is not None}
    scored: list[tuple[Group, list[Accuracy]]] = []
    unscored: list[tuple[Group, list[Accuracy]]] = []
    all_lines: list[Accuracy] = []
    for group in groups:
        if not group.measured:
            continue
        tasks |= {run.score.task for run in group.measured if run.score}
        lines = list(accuracy_lines(group.measured))
        if group.row.accuracy.split is None:
            unscored.append((group, lines))
        else:
            scored.append((group, lines))
            all_lines += lines

    # Where no run has left a configuration, the table has the columns of the default task.
    columns = accuracy_columns(tasks or {TEXT2SQL}, all_lines)
    # By the texts of a group's lines: all groups with these lines.
    groups_by_texts: dict[tuple[tuple[str, ...], ...], list[Group]] = {}
    for group, lines in (*scored, *unscored):
        texts = table("", columns, lines, whole=True).rows
        groups_by_texts.setdefault(texts, []).append(group)

    labelled_lines = []
    for texts, groups_alike in groups_by_texts.items():
        if len(groups_alike) == 1:
            label = rows[groups_alike[0].number].label
        else:
            label = row_names(groups_alike)
        labelled_lines += [(label, *texts_of_line) for texts_of_line in texts]
    header = (LABEL_COLUMN.heading, *(column.heading for column in columns))
    return Table(header, tuple(labelled_lines), ACCURACY_TITLE)


# Rows as lines of tables and plots.


def labelled_rows(groups: Sequence[Group]) -> list[Row]:
    """The rows of the groups, in their order, with their labels, their hardware, and whether they
    are among the rows that a summary is about.

    A label has the letter, the technique with its pods and slots, and the model where there are
    several models. Where rows have the same technique and pods, it also says what tells a row apart
    from the one that is compared with others.
    """
    compared = compared_rows(groups)
    models = {group.row.config.model_id for group in groups if group.row.config is not None}
    marks = _marks([group.row for group in groups], compared)
    plain_labels = {group.letter: group.row.plain_label for group in groups}
    rows = []
    for group in groups:
        row = group.row
        mark = marks[group.letter]
        base = row.comparison.base
        rows.append(
            replace(
                row,
                label=_label(row, mark, with_model=len(models) > 1),
                short_label=_label(row, mark, with_model=False),
                base_label="" if base is None else plain_labels[base],
                hardware=hardware_text(row.config),
                is_compared=group.letter in compared,
            )
        )
    return rows


def _label(row: Row, mark: str, *, with_model: bool) -> str:
    """The letter of a row, its model if wanted, its technique with pods, and its mark.

    Args:
        mark: what tells it apart from its namesakes; empty where nothing needs to.
    """
    words = [row.letter]
    if with_model and row.config is not None:
        words.append(_model_name(row.config))
    words.append(row.technique_and_pods)
    if mark:
        words.append(mark)
    return " ".join(words)


def _model_name(config: RunConfig) -> str:
    """The name of a model, without the folder or the organization that it is from."""
    return config.model_id.rsplit("/", 1)[-1]


def _marks(rows: Sequence[Row], compared: set[str]) -> dict[str, str]:
    """What tells each row apart from its namesakes, the rows of the same model, technique and pods,
    by the letter of the row.

    The mark is empty for a row without namesakes, for the first of them that is compared with other
    rows, and for a row without a configuration.

    Args:
        compared: letters of the rows that are compared with each other.
    """
    marks = dict.fromkeys([row.letter for row in rows], "")
    rows_by_name: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.config is not None:
            name = (_model_name(row.config), row.technique_and_pods)
            rows_by_name.setdefault(name, []).append(row)
    for namesakes in rows_by_name.values():
        if len(namesakes) > 1:
            marks.update(_marks_of(namesakes))
        compared_namesakes = [row for row in namesakes if row.letter in compared]
        if compared_namesakes:
            marks[compared_namesakes[0].letter] = ""
    return marks


def _marks_of(namesakes: Sequence[Row]) -> dict[str, str]:
    """What tells each of these rows apart from the others, by the letter of the row: the first word
    of its `_telling_words` that no other row has; else the first two words that no other row has
    together; else the row's name."""
    words_by_letter = {row.letter: _telling_words(row) for row in namesakes}
    # Every row has as many words, and the same setting at the same index.
    number_of_words = len(words_by_letter[namesakes[0].letter])
    single_indices = itertools.combinations(range(number_of_words), 1)
    pairs_of_indices = itertools.combinations(range(number_of_words), 2)
    marks: dict[str, str] = {}
    for indices in (*single_indices, *pairs_of_indices):
        texts = {}
        for letter, words in words_by_letter.items():
            texts[letter] = " ".join(words[index] for index in indices)
        number_of_rows = Counter(texts.values())
        for letter, text in texts.items():
            if number_of_rows[text] == 1:
                # `setdefault`: a mark from fewer or earlier words stays.
                marks.setdefault(letter, text)
    for row in namesakes:
        marks.setdefault(row.letter, row.name)
    return marks


def _telling_words(row: Row) -> tuple[str, ...]:
    """Words for the settings in which rows of the same technique and pods differ most often, always
    in the same order."""
    config = row.known_config
    checkpointing = _on_or_off(config.gradient_checkpointing)
    return (
        config.precision,
        f"batch {config.effective_batch_size}",
        f"prompt {config.prompt}",
        f"checkpointing {checkpointing}",
        "profiled" if is_profiled(config) else "not profiled",
        f"from {config.init}",
    )


def hardware_text(config: RunConfig | None) -> str:
    """The hardware of a run in a few words; an empty string where it is not known."""
    hardware = config.hardware if config else {}
    if hardware.get("gpus"):
        return " and ".join(sorted(set(hardware["gpus"])))
    if "cores" in hardware and "cpu" in hardware:
        return f"{hardware['cores']} cores of {hardware['cpu']}"
    return ""


def _base_text(row: Row) -> str:
    """The label of the base row, with a `*` where the two rows differ in more than technique and
    pods; `baseline` for the base row itself."""
    comparison = row.comparison
    if comparison.base is None:
        return NOT_MEASURED
    if comparison.base == row.letter:
        return "baseline"
    mark = "*" if comparison.differs_in else ""
    return f"{row.base_label}{mark}"


def _rate_text(row: Row) -> str:
    """Samples/s with their 95 % interval; with too few repeats for that, the value of each."""
    rate = row.figures.samples_per_second
    repeats = row.samples_per_second_values
    if rate is not None and not row.samples_per_second_interval and len(repeats) > 1:
        return ", ".join(ONE(repeat) for repeat in repeats)
    return _with_interval(rate, row.samples_per_second_interval, ONE)


def _speed_up_text(row: Row) -> str:
    """Speed-up over the base row, with its 95 % interval."""
    return _with_interval(row.comparison.speed_up, row.comparison.speed_up_interval, TWO)


def _speed_text(row: Row) -> str:
    """Speed-up with its 95 % interval, and the label of the base row."""
    if row.comparison.speed_up is None:
        return NOT_MEASURED
    if row.comparison.base == row.letter:
        return "1.00, baseline"
    return f"{_speed_up_text(row)} over {_base_text(row)}"


def inference_text(accuracy: Accuracy) -> str:
    """The figure that a model is judged by, with its name, its interval and its split."""
    measure = accuracy.judged_by
    result = accuracy.inference_result
    if measure is None or result is None:
        return NOT_MEASURED
    figure = _with_interval(result, accuracy.inference_result_interval, measure.text)
    return f"{measure.name} {figure} ({accuracy.split})"


# The columns: what each figure is called and how it is written for people.


def _gib(size: float) -> str:
    """A number of bytes in GiB, as text."""
    gib = size / GIB
    if size < GIB / 10:
        # Two decimals would leave one digit, or none.
        return f"{gib:.2g}"
    return f"{gib:.2f}"


def mib(size: float) -> str:
    """A number of bytes in MiB, as text."""
    return f"{size / MIB:,.1f}"


def _pods_in_gib(sizes: Sequence[float]) -> str:
    return _least_to_most(sizes, _gib)


def _pods_in_mib(sizes: Sequence[float]) -> str:
    return _least_to_most(sizes, mib)


def _least_to_most(sizes: Sequence[float], form: Callable[[float], str]) -> str:
    """The smallest and the largest size, `1.20-1.35`; one of them where both read alike."""
    smallest = form(min(sizes))
    largest = form(max(sizes))
    return smallest if smallest == largest else f"{smallest}-{largest}"


def _giga(rate: float) -> str:
    """FLOP/s in GFLOP/s, as text."""
    return f"{rate / GIGA:,.1f}"


def _percent(share: float) -> str:
    """A share of 1 in percent, as text."""
    return f"{100 * share:.1f}"


def _technique_and_pods(config: RunConfig) -> str:
    return f"{config.technique_text} {pods_and_slots(config)}"


def _on_or_off(is_on: bool) -> str:
    return "on" if is_on else "off"


def _processes(row: Row) -> str:
    """The number of processes of a row that was timed; a row without a speed has nothing to
    scale."""
    if row.figures.samples_per_second is None:
        return NOT_MEASURED
    return str(row.known_config.world_size)


def _sharing(row: Row) -> str:
    """On how many machines the pods are, where some share one: `4 on 2`."""
    machines = row.figures.machines
    if machines is None or row.config is None:
        return NOT_MEASURED
    pods = row.config.pods
    share_machines = machines < pods
    return f"{pods} on {machines}" if share_machines else NOT_MEASURED


def _precision_text(row: Row) -> str:
    """The number formats of the first step, as far as all repeats agree on them."""
    if row.figures.precision_weights is None:
        return NOT_MEASURED
    return measured_precision(row.figures).text


def _plan_kind(row: Row) -> str:
    """The kind of a plan, where a size was planned or measured."""
    if row.figures.planned_bytes is None and row.figures.measured_bytes is None:
        return NOT_MEASURED
    return shown(row.figures.planned_kind)


# What is planned, with its interval, and what was measured, marked where it lies outside.


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A figure of a plan, and what was measured of it."""

    planned: float | None
    low: float | None
    """Lower end of the plan's interval; None where it has none, as with `high`."""
    high: float | None
    measured: float | None
    form: Callable[[float], str]
    """Function that writes a value for people."""

    def planned_text(self) -> str:
        """What is planned, with its interval where it has one."""
        if self.planned is None or self.low is None or self.high is None:
            return shown(self.planned, self.form)
        return f"{self.form(self.planned)} [{self.form(self.low)}, {self.form(self.high)}]"

    def measured_text(self) -> str:
        """What was measured, marked where it lies outside of the plan's interval."""
        if self.measured is None or self.low is None or self.high is None:
            return shown(self.measured, self.form)
        is_inside = self.low <= self.measured <= self.high
        text = self.form(self.measured)
        return text if is_inside else f"{text} (outside)"


def _planned_step(row: Row) -> _Planned:
    """Seconds of a step."""
    figures = row.figures
    return _Planned(
        planned=figures.plan_step_planned_seconds,
        low=figures.plan_step_low_seconds,
        high=figures.plan_step_high_seconds,
        measured=figures.plan_step_measured_seconds,
        form=digits,
    )


def _planned_peak(row: Row) -> _Planned:
    """Peak memory of a process."""
    figures = row.figures
    return _Planned(
        planned=figures.plan_peak_planned_bytes,
        low=figures.plan_peak_low_bytes,
        high=figures.plan_peak_high_bytes,
        measured=figures.plan_peak_measured_bytes,
        form=mib,
    )


# Columns of one value each: of the figures, of what was asked for, of the accuracy.


def _figure(
    title: str,
    unit: str,
    value: Callable[[Figures], Value | None],
    form: Callable[[Value], str] = str,
) -> Column[Row]:
    """A column of one figure."""
    return Column(title, unit, lambda row: shown(value(row.figures), form))


def _setting(
    title: str,
    unit: str,
    value: Callable[[RunConfig], Value | None],
    form: Callable[[Value], str] = str,
) -> Column[Row]:
    """A column of a value from the configuration of a row's first run."""

    def text(row: Row) -> str:
        if row.config is None:
            return NOT_MEASURED
        return shown(value(row.config), form)

    return Column(title, unit, text)


def _of_accuracy(
    title: str, value: Callable[[Accuracy], Value | None], form: Callable[[Value], str] = str
) -> Column[Accuracy]:
    """A column of a value of the accuracy that has neither a unit nor an interval."""
    return Column(title, "", lambda accuracy: shown(value(accuracy), form))


COUNT, ONE, TWO = "{:,.0f}".format, "{:,.1f}".format, "{:,.2f}".format
THREE, FOUR = "{:.3f}".format, "{:.4f}".format
"""Functions that write a number for people: whole, or with as many decimals as the name says."""
LABEL_COLUMN = Column[Row]("row", "", lambda row: row.label)
THROUGHPUT_COLUMN = Column[Row]("throughput", "samples/s", _rate_text)
DURATION_COLUMN = _figure("duration", "s", lambda figures: figures.duration_seconds, ONE)
POD_MEMORY_COLUMN = _figure(
    "memory of each pod", "GiB", lambda figures: figures.pod_memory_bytes, _pods_in_gib
)
INFERENCE_COLUMN = Column[Row]("inference result", "", lambda row: inference_text(row.accuracy))
STATUS_COLUMN = Column[Row]("status", "", lambda row: row.status)
TECHNIQUE_COLUMN = _setting("technique", "", lambda config: config.technique_text)
PODS_COLUMN = _setting("pods", "", lambda config: config.pods)
RESULT_COLUMNS = (
    THROUGHPUT_COLUMN,
    Column[Row]("speed-up", "", _speed_text),
    _figure("states of each pod", "MiB", lambda figures: figures.pod_state_bytes, _pods_in_mib),
    INFERENCE_COLUMN,
    DURATION_COLUMN,
    POD_MEMORY_COLUMN,
    STATUS_COLUMN,
    _figure("activations, planned", "MiB", lambda figures: figures.pod_activation_bytes, mib),
    _setting("model", "", lambda config: config.model_id),
    TECHNIQUE_COLUMN,
    PODS_COLUMN,
)
"""What a technique costs and yields comes first; what the label also says comes last, where narrow
terminals wrap."""
PRECISION_COLUMN = Column[Row]("measured precision", "", _precision_text)
BATCH_COLUMN = _setting("batch", "samples", lambda config: config.effective_batch_size, COUNT)
RUN_COLUMN = Column[Row]("run", "", lambda row: row.name)
SETTING_COLUMNS = (
    RUN_COLUMN,
    _setting("task", "", lambda config: config.task),
    _setting("weights", "", lambda config: config.init),
    _setting("prompt", "", lambda config: config.prompt),
    _setting("precision", "", lambda config: config.precision),
    PRECISION_COLUMN,
    BATCH_COLUMN,
    _setting("checkpointing", "", lambda config: config.gradient_checkpointing, _on_or_off),
    Column[Row]("repeats", "", lambda row: str(row.repeats)),
)
STEPS_COLUMN = _figure("steps", "", lambda figures: figures.steps, COUNT)
TRAINING_COLUMN = _figure("training", "s", lambda figures: figures.train_seconds, ONE)
FAILED_COLUMNS = (
    STATUS_COLUMN,
    Column[Row]("reason", "", lambda row: "; ".join(row.reasons) or NOT_MEASURED),
    RUN_COLUMN,
    STEPS_COLUMN,
    TRAINING_COLUMN,
    POD_MEMORY_COLUMN,
)
"""What is known of runs that did not end well, or have not ended yet."""
SPEED_SECTION = (
    STEPS_COLUMN,
    TRAINING_COLUMN,
    _figure("real tokens/s", "", lambda figures: figures.tokens_per_second, COUNT),
    _figure("padding", "%", lambda figures: figures.padding_share, _percent),
    _figure("evaluation", "samples/s", lambda figures: figures.evaluation_samples_per_second, ONE),
    Column[Row]("step planned", "s", lambda row: _planned_step(row).planned_text()),
    Column[Row]("step measured", "s", lambda row: _planned_step(row).measured_text()),
    _figure("start", "s", lambda figures: figures.start_seconds, ONE),
    _figure("saving", "s", lambda figures: figures.save_seconds, TWO),
    _figure("goodput", "%", lambda figures: figures.goodput, _percent),
    _figure("steps done again", "", lambda figures: figures.lost_steps, COUNT),
)
SCALING_SECTION = (
    Column[Row]("processes", "", _processes),
    Column[Row]("speed-up", "", _speed_up_text),
    Column[Row](
        "scaling efficiency", "", lambda row: shown(row.comparison.scaling_efficiency, TWO)
    ),
    Column[Row]("against row", "", _base_text),
    Column[Row]("pods on machines", "", _sharing),
    _figure("model", "GFLOP/s", lambda figures: figures.model_flops_per_second, _giga),
    _figure("peak", "GFLOP/s", lambda figures: figures.peak_flops_per_second, _giga),
    _figure("kind of peak", "", lambda figures: figures.peak_flops_kind),
    _figure("peak measured by", "", lambda figures: figures.peak_flops_run),
    _figure("MFU", "%", lambda figures: figures.model_flops_utilization, _percent),
)
MEMORY_SECTION = (
    _figure("kind of pod memory", "", lambda figures: figures.memory_kind),
    _figure("process: peak", "MiB", lambda figures: figures.process_peak_bytes, mib),
    _figure("process: mean", "MiB", lambda figures: figures.process_mean_bytes, mib),
    _figure("process: minimum", "MiB", lambda figures: figures.process_minimum_bytes, mib),
    _figure("kind of peaks", "", lambda figures: figures.phase_kind),
    _figure("load", "GiB", lambda figures: figures.peak_load_bytes, _gib),
    _figure("first step", "GiB", lambda figures: figures.peak_first_step_bytes, _gib),
    _figure("steady", "GiB", lambda figures: figures.peak_steady_bytes, _gib),
    _figure("evaluate", "GiB", lambda figures: figures.peak_evaluate_bytes, _gib),
    _figure("save", "GiB", lambda figures: figures.peak_save_bytes, _gib),
    Column[Row]("kind of plan", "", _plan_kind),
    _figure("planned", "MiB", lambda figures: figures.planned_bytes, mib),
    _figure("measured", "MiB", lambda figures: figures.measured_bytes, mib),
    _figure("measured/planned", "", lambda figures: figures.measured_to_planned, TWO),
    Column[Row]("peak planned", "MiB", lambda row: _planned_peak(row).planned_text()),
    Column[Row]("peak measured", "MiB", lambda row: _planned_peak(row).measured_text()),
)
USE_SECTION = (
    _figure("GPU, mean", "%", lambda figures: figures.utilization_percent_mean, ONE),
    _figure("GPU, 95th percentile", "%", lambda figures: figures.utilization_percent_p95, ONE),
    _figure("GPU memory, mean", "%", lambda figures: figures.memory_utilization_percent_mean, ONE),
    _figure(
        "GPU memory, 95th percentile",
        "%",
        lambda figures: figures.memory_utilization_percent_p95,
        ONE,
    ),
    _figure("power, mean", "W", lambda figures: figures.power_watts_mean, ONE),
    _figure("power, 95th percentile", "W", lambda figures: figures.power_watts_p95, ONE),
    _figure("share of the cores, mean", "%", lambda figures: figures.cpu_percent_mean, ONE),
    _figure(
        "share of the cores, 95th percentile", "%", lambda figures: figures.cpu_percent_p95, ONE
    ),
    _figure("I/O wait, mean", "%", lambda figures: figures.io_wait_percent_mean, ONE),
    _figure("I/O wait, 95th percentile", "%", lambda figures: figures.io_wait_percent_p95, ONE),
)
TRAIN_LOSS_COLUMN = _figure(
    "final training loss", "nats/token", lambda figures: figures.train_loss, FOUR
)
EVAL_LOSS_COLUMN = _figure("final eval loss", "nats/token", lambda figures: figures.eval_loss, FOUR)
COST_SECTION = (
    _figure("energy", "J", lambda figures: figures.energy_joules, COUNT),
    _figure("energy", "kWh", lambda figures: figures.energy_kwh, digits),
    _figure("cost", "at the price given", lambda figures: figures.cost, digits),
)
SECTIONS: dict[str, tuple[Column[Row], ...]] = {
    "Speed": SPEED_SECTION,
    "Scaling and arithmetic": SCALING_SECTION,
    "Memory": MEMORY_SECTION,
    "Use and power": USE_SECTION,
    "Losses": (TRAIN_LOSS_COLUMN, EVAL_LOSS_COLUMN),
    "Energy and cost": COST_SECTION,
}
"""Columns of the tables by topic, by the tables' titles."""
MAIN = (
    _setting("technique, pods", "", _technique_and_pods),
    PRECISION_COLUMN,
    BATCH_COLUMN,
    STATUS_COLUMN,
    STEPS_COLUMN,
    TRAINING_COLUMN,
    DURATION_COLUMN,
    THROUGHPUT_COLUMN,
    POD_MEMORY_COLUMN,
    TRAIN_LOSS_COLUMN,
    EVAL_LOSS_COLUMN,
    INFERENCE_COLUMN,
)
"""The dozen figures of a run that matter first, in their order."""
SPLIT_COLUMN = _of_accuracy("split", lambda accuracy: accuracy.split)
TABLES_COLUMN = _of_accuracy("tables", lambda accuracy: accuracy.tables)
