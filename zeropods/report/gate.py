"""A regression gate: which rows of a summary are worse than in an earlier one, by more than chance allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.files import read_object
from zeropods.report.formulas import Values, is_done
from zeropods.report.settings import MEASURED, PREFIX, as_key, unequal
from zeropods.tables import Table, counted

SCHEMA_VERSION = 2
"""Schema version of `summary.json`."""
RATE_TOLERANCE = 0.05
"""Share of the old samples/s that may be lost unless both rows have an interval."""
MEMORY_TOLERANCE = 0.05
LOSS_TOLERANCE = 0.01
"""Share by which a loss in nats may rise; a perplexity is a power of it, so the share applies to its exponent."""
ACCURACY_TOLERANCE = 0.05
"""Share of the old accuracy that may be lost where it has no interval."""
SHARES = ("execution_accuracy", "f1")
HIGH_IS_GOOD = ("samples_per_second", *SHARES)
NEEDED = {"name", "status", "settings", "arrangement", "memory_kind", "samples_per_second_interval"}
"""Keys that every row of a summary has."""
JUDGED = ("samples_per_second", "peak_memory_bytes", "execution_accuracy", "eval_loss", "f1", "perplexity")


@dataclass(frozen=True)
class Worse:
    """A figure of a row that got worse than is allowed."""

    row: str
    """Name of the row in the old summary."""
    figure: str
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
    """Number of rows that were compared."""

    def __str__(self) -> str:
        """The verdict as text for people."""
        lines = [f"{counted(len(self.worse), 'figure')} got worse in {counted(self.judged, 'compared row')}"]
        if self.worse:
            shown = [{key: _shown(value) for key, value in vars(one).items()} for one in self.worse]
            lines += ["", str(Table.of(shown))]
        return "\n".join([*lines, *(f"not compared: {line}" for line in self.not_comparable)])


def read_rows(path: Path) -> list[Values]:
    """The rows of a `summary.json`; `UserError` where the file is none, or is of another version."""
    document = read_object(path, "expected a summary.json written by `zeropods summary`")
    rows: list[Values] = document.get("groups") or []
    whole = all(isinstance(row, dict) and row.keys() >= NEEDED for row in rows)
    if document.get("schema_version") != SCHEMA_VERSION or not rows or not whole:
        raise UserError(
            f"{path}: not a summary.json of version {SCHEMA_VERSION}; run zeropods summary on the old runs again"
        )
    return rows


def compare(old: Sequence[Values], new: Sequence[Values]) -> GateVerdict:
    """Judge every row of an old summary that ended well; `old` and `new` are the `groups` of their documents.

    Rows are matched by all settings except versions and seed, and by technique and pods. A row that was measured on
    other hardware, or ran in another precision, is not judged. A row that ended well and is now missing, or now ends
    otherwise, is worse. A summary from before there were causal runs has no `f1` and no `perplexity`.
    """
    candidates: dict[str, list[Values]] = {}
    for row in new:
        candidates.setdefault(_key(row), []).append(row)
    worse, unjudged, judged = list[Worse](), list[str](), 0
    for before in (row for row in old if is_done(row["status"])):
        name, found = before["name"], candidates.get(_key(before), [])
        same = [row for row in found if not unequal(_hardware(row), _hardware(before))]
        if found and not same:
            unjudged.append(f"{name}: was measured on other hardware")
            continue
        alike = [row for row in same if not unequal(_measured(row), _measured(before))]
        if same and not alike:
            name_of = unequal(_measured(same[0]), _measured(before))[0]
            values = [row["settings"][name_of] for row in (before, same[0])]
            unjudged.append(f"{name}: {name_of} was {values[0]}, now {values[1]}")
            continue
        same = alike
        judged += 1
        now = next((row for row in same if is_done(row["status"])), None)
        if now is None:
            worse.append(Worse(name, "status", before["status"], same[0]["status"] if same else None, "ok"))
            continue
        for figure in (figure for figure in JUDGED if before.get(figure) is not None):
            has, what, limit = now.get(figure), figure, _limit(figure, before, now)
            if figure == "peak_memory_bytes" and now["memory_kind"] != before["memory_kind"]:
                has, what = None, f"{figure}, {before['memory_kind']} and {now['memory_kind']}"
            if has is None:
                unjudged.append(f"{name}: {what}: not measured in both")
            elif has < limit if figure in HIGH_IS_GOOD else has > limit:
                worse.append(Worse(name, figure, before[figure], has, limit))
    return GateVerdict(tuple(worse), tuple(unjudged), judged)


def _hardware(row: Values) -> Values:
    """The settings that say what a row ran on."""
    return {key: value for key, value in row["settings"].items() if key.startswith("hardware ")}


def _measured(row: Values) -> Values:
    """The number formats that a row was measured in; older summaries have none, and are compared without them."""
    return {key: value for key, value in row["settings"].items() if key.startswith(MEASURED)}


def _key(row: Values) -> str:
    """A key that is equal for rows that differ only in hardware, versions, measured precision and seed.

    DeepSpeed's keys are in the arrangement already, as a digest that older summaries have too.
    """
    beside = ("hardware ", "versions ", PREFIX, MEASURED)
    return as_key({k: v for k, v in row["settings"].items() if not k.startswith(beside)}, row["arrangement"])


def _limit(figure: str, before: Values, now: Values) -> float:
    old: float = before[figure]
    if figure == "samples_per_second":
        spans = [row["samples_per_second_interval"] for row in (before, now)]
        # Half of both intervals' widths together: if the rate falls by more, they do not overlap.
        return old - (sum(high - low for low, high in spans) / 2 if all(spans) else old * RATE_TOLERANCE)
    if figure in SHARES:
        interval = before.get(f"{figure}_interval")
        return float(interval[0]) if interval else old * (1 - ACCURACY_TOLERANCE)
    if figure == "perplexity":
        return float(max(old, 1.0) ** (1 + LOSS_TOLERANCE))
    return old + abs(old) * (LOSS_TOLERANCE if figure == "eval_loss" else MEMORY_TOLERANCE)


def _shown(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "gone"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"
