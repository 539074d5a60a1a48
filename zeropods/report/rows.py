"""The rows of a summary as lines of its tables, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeropods.evaluate.score_file import TEXT2SQL
from zeropods.report import columns
from zeropods.report.accuracy import accuracy_lines, task_of
from zeropods.report.columns import Column, Values, table
from zeropods.report.differences import row_letters
from zeropods.report.groups import Group
from zeropods.report.scaling import NOT_SCALED, Scaling
from zeropods.report.table import Table

MARK = "*"
"""Behind the letter of a base that differs in more than technique and pods."""
RESULT = Column("inference_result", "inference result", "", "{:.3f}".format)
PERPLEXITY = Column("inference_result", "inference result", "", "{:,.2f}".format)
SECTIONS = (
    ("Speed", columns.SPEED),
    ("Scaling and arithmetic", columns.SCALING),
    ("Memory", columns.MEMORY),
    ("Losses", columns.LOSSES),
    ("Energy and cost", columns.COST),
)
"""Tables that leave out what no row has; those before them show every row."""


def tables(groups: Sequence[Group], scaled: Mapping[str, Scaling]) -> list[Table]:
    """All tables of a summary: the original's columns first, then ours by what they are about."""
    labels = row_labels(groups)
    lines = [line(group, labels[group.letter], scaled.get(group.letter)) for group in groups]
    return [
        table("Results", columns.RESULTS, lines, whole=True),
        table("Runs", columns.RUNS, lines, whole=True),
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
    tasks = {*(group.task for group in groups if group.first.facts), *scored} or {TEXT2SQL}
    known = [task for task in columns.ACCURACY_OF if task in tasks]
    return table("Accuracy", columns.accuracy_columns(known, lines), lines, whole=True)


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
