"""A regression gate: which rows of a summary are worse than in an earlier one, by more than chance
allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.files import read_object
from zeropods.report.row import is_done
from zeropods.report.settings import DEEPSPEED_PREFIX, PRECISION_PREFIX, as_key, unequal
from zeropods.tables import Table, counted
from zeropods.tasks import TEXT2SQL, LearningTask, Measure, task_or_unknown

Values = dict[str, Any]
"""A row of a `summary.json` as it was read: of an earlier version, maybe, which has other keys."""
SCHEMA_VERSION = 2
"""Schema version of `summary.json`."""
RATE_TOLERANCE = 0.05
"""Share of the old samples/s that may be lost unless both rows have an interval."""
MEMORY_TOLERANCE = 0.05
"""Share by which the peak of memory may grow."""
LOSS_TOLERANCE = 0.01
"""Share by which a loss in nats may rise; a perplexity is a power of it, so the share applies to
its exponent."""
ACCURACY_TOLERANCE = 0.05
"""Share by which an accuracy may get worse where it has no interval."""
RATE, MEMORY, LOSS = "samples_per_second", "peak_memory_bytes", "eval_loss"
NEEDED_KEYS = {
    "name",
    "status",
    "settings",
    "arrangement",
    "memory_kind",
    "samples_per_second_interval",
}
"""Keys that every row of a summary has."""


@dataclass(frozen=True)
class Worse:
    """A figure of a row that got worse than is allowed. The fields are the columns of the verdict's
    table."""

    row: str
    """Name of the row in the old summary."""
    figure: str
    """Key of the figure, or `status`."""
    old: float | str
    new: float | str | None
    allowed: float | str
    """The worst value that would have passed."""


@dataclass(frozen=True)
class GateVerdict:
    """The findings of a gate."""

    worse: tuple[Worse, ...]
    not_comparable: tuple[str, ...]
    """A line for each row or figure that could not be judged, with the reason."""
    judged: int
    """Number of rows that were compared, those that are missing now among them."""

    def __str__(self) -> str:
        """The verdict as text for people."""
        figures = counted(len(self.worse), "figure")
        rows = counted(self.judged, "compared row")
        lines = [f"{figures} got worse in {rows}"]
        if self.worse:
            table_rows = []
            for worse in self.worse:
                table_rows.append({key: _shown(value) for key, value in vars(worse).items()})
            lines += ["", str(Table.of(table_rows))]
        lines += [f"not compared: {line}" for line in self.not_comparable]
        return "\n".join(lines)


def read_rows(path: Path) -> list[Values]:
    """The rows of a `summary.json`; `UserError` where the file is none, is of another version, or
    has no row."""
    document = read_object(path, "expected a summary.json written by `zeropods summary`")
    rows: list[Values] = document.get("groups") or []
    are_rows = all(isinstance(row, dict) and row.keys() >= NEEDED_KEYS for row in rows)
    if document.get("schema_version") != SCHEMA_VERSION or not rows or not are_rows:
        raise UserError(
            f"{path}: not a summary.json of version {SCHEMA_VERSION}; "
            "run zeropods summary on the old runs again"
        )
    return rows


def compare(old: Sequence[Values], new: Sequence[Values]) -> GateVerdict:
    """Judge every row of an old summary that ended well; `old` and `new` are the `groups` of their
    documents.

    Rows are matched by all settings except versions and seed, and by technique and pods. A row that
    was measured on other hardware, or ran in another precision, is not judged. A row that ended
    well and is now missing, or now ends otherwise, is worse.
    """
    new_rows: dict[str, list[Values]] = {}
    for row in new:
        new_rows.setdefault(_key(row), []).append(row)

    worse: list[Worse] = []
    not_comparable: list[str] = []
    judged = 0
    for before in old:
        if not is_done(before["status"]):
            continue
        name = before["name"]
        matching = new_rows.get(_key(before), [])
        on_same_hardware = _with_equal(_hardware, before, matching)
        if matching and not on_same_hardware:
            not_comparable.append(f"{name}: was measured on other hardware")
            continue
        comparable = _with_equal(_measured_precision, before, on_same_hardware)
        if on_same_hardware and not comparable:
            change = _changed_precision(before, on_same_hardware[0])
            not_comparable.append(f"{name}: {change}")
            continue

        # A row that has no match at all comes here too: it is missing, which is worse.
        judged += 1
        now = next((row for row in comparable if is_done(row["status"])), None)
        if now is None:
            status = comparable[0]["status"] if comparable else None
            worse_status = Worse(
                row=name, figure="status", old=before["status"], new=status, allowed="ok"
            )
            worse.append(worse_status)
            continue
        worse_figures, unmeasured = _judge_figures(before, now)
        worse += worse_figures
        not_comparable += unmeasured
    return GateVerdict(tuple(worse), tuple(not_comparable), judged)


def _with_equal(
    part: Callable[[Values], Values], before: Values, rows: Sequence[Values]
) -> list[Values]:
    """The rows in which a part of the settings is as it was before.

    Args:
        part: function that takes this part from a row.
    """
    return [row for row in rows if not unequal(part(row), part(before))]


def _changed_precision(before: Values, now: Values) -> str:
    """The first number format in which two rows differ, with both values; for rows that differ in
    one."""
    setting = unequal(_measured_precision(now), _measured_precision(before))[0]
    return f"{setting} was {before['settings'][setting]}, now {now['settings'][setting]}"


def _judge_figures(before: Values, now: Values) -> tuple[list[Worse], list[str]]:
    """The figures of a row that got worse, and a line for each that is not measured any more, or
    not in the same way. A figure that was not measured before is passed over."""
    name = before["name"]
    measure = _measure(before)
    worse = []
    unmeasured = []
    for figure in _judged_figures(before):
        if before.get(figure) is None:
            continue
        value = now.get(figure)
        if figure == MEMORY and now["memory_kind"] != before["memory_kind"]:
            kinds = f"{before['memory_kind']} and {now['memory_kind']}"
            unmeasured.append(f"{name}: {figure}, {kinds}: not measured in both")
        elif value is None:
            unmeasured.append(f"{name}: {figure}: not measured in both")
        else:
            if measure is not None and figure == measure.key:
                allowed = _allowed_accuracy(measure, before)
                higher_is_better = measure.higher_is_better
            else:
                allowed = _allowed(figure, before, now)
                higher_is_better = figure == RATE
            if higher_is_better:
                is_worse = value < allowed
            else:
                is_worse = value > allowed
            if is_worse:
                worse_figure = Worse(
                    row=name, figure=figure, old=before[figure], new=value, allowed=allowed
                )
                worse.append(worse_figure)
    return worse, unmeasured


def _task(row: Values) -> LearningTask:
    """The task of a row; a summary from before there were causal runs does not say it."""
    return task_or_unknown(row.get("task") or TEXT2SQL)


def _measure(row: Values) -> Measure | None:
    """The measure that a gate judges: the first of those by which the task judges a run; None for a
    task without one."""
    return next(iter(_task(row).judged_by), None)


def _judged_figures(row: Values) -> list[str]:
    """Keys of the figures of a row that are judged, in the order in which a verdict names them."""
    measure = _measure(row)
    if measure is None:
        return [RATE, MEMORY, LOSS]
    if _task(row).name == TEXT2SQL:
        # Text-to-SQL, once the only task, keeps the order that its verdicts always had.
        return [RATE, MEMORY, measure.key, LOSS]
    return [RATE, MEMORY, LOSS, measure.key]


def _hardware(row: Values) -> Values:
    """The settings that say what a row ran on."""
    return {key: value for key, value in row["settings"].items() if key.startswith("hardware ")}


def _measured_precision(row: Values) -> Values:
    """The number formats that a row was measured in. Older summaries have none; `unequal` passes
    over formats that only one of two rows has."""
    return {
        key: value for key, value in row["settings"].items() if key.startswith(PRECISION_PREFIX)
    }


def _key(row: Values) -> str:
    """A key that is equal for rows that differ only in hardware, versions, measured precision and
    seed.

    DeepSpeed's keys are in the arrangement already, as a digest that older summaries have too.
    """
    left_out = ("hardware ", "versions ", DEEPSPEED_PREFIX, PRECISION_PREFIX)
    settings = {}
    for key, value in row["settings"].items():
        if not key.startswith(left_out):
            settings[key] = value
    return as_key(settings, row["arrangement"])


def _allowed(figure: str, before: Values, now: Values) -> float:
    """The worst value of a rate, a size or a loss that passes."""
    old: float = before[figure]
    if figure == RATE:
        return old - _allowed_loss_of_rate(before, now)
    tolerance = LOSS_TOLERANCE if figure == LOSS else MEMORY_TOLERANCE
    return old + abs(old) * tolerance


def _allowed_accuracy(measure: Measure, before: Values) -> float:
    """The worst value of a measure that passes: of a perplexity, what follows from the tolerance of
    its loss, whatever its interval; else the worse end of the old interval; without one, the old
    value with a tolerance."""
    old: float = before[measure.key]
    if measure.exponential_of is not None:
        # A perplexity is e to the power of the loss, which may grow by this share. Below 1, which
        # no perplexity is, a power would make it smaller.
        return float(max(old, 1.0) ** (1 + LOSS_TOLERANCE))
    interval = before.get(f"{measure.key}_interval")
    if interval:
        low, high = interval
        return float(low if measure.higher_is_better else high)
    if measure.higher_is_better:
        return old * (1 - ACCURACY_TOLERANCE)
    return old * (1 + ACCURACY_TOLERANCE)


def _allowed_loss_of_rate(before: Values, now: Values) -> float:
    """The samples/s that may be lost: half the widths of both intervals, or a share where a row has
    no interval."""
    old: float = before[RATE]
    intervals = [row["samples_per_second_interval"] for row in (before, now)]
    if not all(intervals):
        return old * RATE_TOLERANCE
    # If the rate falls by more, the two intervals do not overlap.
    return sum(high - low for low, high in intervals) / 2


def _shown(value: float | str | None) -> str:
    """A value of `Worse` as people read it; `gone` where the row has none any more."""
    if value is None:
        return "gone"
    if isinstance(value, str):
        return value or "gone"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"
