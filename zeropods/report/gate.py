"""A regression gate: which rows of a summary are worse than in an earlier one, by more than chance allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zeropods.errors import UserError
from zeropods.files import validated
from zeropods.measure.record import STRICT
from zeropods.report.settings import PREFIX, as_key, unequal
from zeropods.tables import Table, counted

SCHEMA_VERSION = 2
"""Of `summary.json`."""
RATE_TOLERANCE = 0.05
"""Share of the old samples/s that may be lost where not both have an interval."""
MEMORY_TOLERANCE = 0.05
LOSS_TOLERANCE = 0.01
"""Share of a loss in nats; of a perplexity, which is a power of it, in the exponent."""
ACCURACY_TOLERANCE = 0.05
"""Share of the old accuracy that may be lost where it has no interval."""
LENIENT = {**STRICT, "extra": "ignore"}
SHARES = ("execution_accuracy", "f1")
HIGH_IS_GOOD = ("samples_per_second", *SHARES)
JUDGED = ("samples_per_second", "peak_memory_bytes", "execution_accuracy", "eval_loss", "f1", "perplexity")


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """What a gate needs of a row of `summary.json`; its other keys are left alone."""

    __pydantic_config__ = LENIENT

    name: str
    status: str
    settings: dict[str, Any]
    arrangement: dict[str, Any]
    samples_per_second: float | None
    samples_per_second_interval: tuple[float, float] | None
    peak_memory_bytes: float | None
    memory_kind: str | None
    eval_loss: float | None
    execution_accuracy: float | None
    execution_accuracy_interval: tuple[float, float] | None = None
    f1: float | None = None
    """A summary from before there were causal runs has none, and no `perplexity`."""
    f1_interval: tuple[float, float] | None = None
    perplexity: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether its figures are of runs that ended well: `ok`, or `2 ok, 1 oom`."""
        return "ok" in self.status.replace(",", " ").split()

    @property
    def hardware(self) -> dict[str, Any]:
        """The settings that say what it ran on."""
        return {key: value for key, value in self.settings.items() if key.startswith("hardware ")}

    @property
    def key(self) -> str:
        """Equal for rows that are the same but for hardware, versions and seed.

        DeepSpeed's keys are in the arrangement already, as a digest that older summaries have too.
        """
        beside = ("hardware ", "versions ", PREFIX)
        return as_key({k: v for k, v in self.settings.items() if not k.startswith(beside)}, self.arrangement)


@dataclass(frozen=True, kw_only=True)
class GateRows:
    """The part of `summary.json` that a gate reads."""

    __pydantic_config__ = LENIENT

    schema_version: Literal[2]
    groups: list[GateRow]


@dataclass(frozen=True, kw_only=True)
class Worse:
    """A figure of a row that got worse than is allowed."""

    row: str
    """What the old summary calls it."""
    figure: str
    old: float | str
    new: float | str | None
    allowed: float | str
    """The worst value that would have passed."""


@dataclass(frozen=True)
class GateVerdict:
    """What a gate has found."""

    worse: tuple[Worse, ...]
    not_comparable: tuple[str, ...]
    """A line for each row or figure that could not be judged, with the reason."""
    judged: int
    """Number of rows that were compared."""


def read_rows(path: Path) -> list[GateRow]:
    """The rows of a `summary.json`; `UserError` where it is none, of another version, or holds what is no figure."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a summary.json that `zeropods summary` wrote")
    return validated(GateRows, path, path.read_bytes(), "summarize the old runs again").groups


def compare(old: Sequence[GateRow], new: Sequence[GateRow]) -> GateVerdict:
    """Judge every row of an old summary that had ended well.

    Rows are matched by all settings but versions and seed, by technique and pods. A row that was measured on other
    hardware is not judged. A row that ended well and is gone, or ends otherwise now, is worse.
    """
    candidates: dict[str, list[GateRow]] = {}
    for row in new:
        candidates.setdefault(row.key, []).append(row)
    worse, unjudged, judged = list[Worse](), list[str](), 0
    for before in (row for row in old if row.is_ok):
        found = candidates.get(before.key, [])
        same = [row for row in found if not unequal(row.hardware, before.hardware)]
        if found and not same:
            unjudged.append(f"{before.name}: was measured on other hardware")
            continue
        judged += 1
        now = next((row for row in same if row.is_ok), None)
        if now is None:
            gone = same[0].status if same else None
            worse.append(Worse(row=before.name, figure="status", old=before.status, new=gone, allowed="ok"))
            continue
        for figure in JUDGED:
            had, has, what = getattr(before, figure), getattr(now, figure), figure
            is_other = figure == "peak_memory_bytes" and now.memory_kind != before.memory_kind
            if is_other:
                what = f"{figure}, {before.memory_kind} and {now.memory_kind}"
            if had is not None and (has is None or is_other):
                unjudged.append(f"{before.name}: {what}: not measured in both")
            elif had is not None:
                limit = _limit(figure, before, now)
                if has < limit if figure in HIGH_IS_GOOD else has > limit:
                    worse.append(Worse(row=before.name, figure=figure, old=had, new=has, allowed=limit))
    return GateVerdict(tuple(worse), tuple(unjudged), judged)


def gate_text(verdict: GateVerdict) -> str:
    """What people read of a verdict."""
    lines = [f"{counted(len(verdict.worse), 'figure')} got worse, of {counted(verdict.judged, 'row')} compared"]
    if verdict.worse:
        shown = [{key: _shown(value) for key, value in asdict(one).items()} for one in verdict.worse]
        lines += ["", str(Table.of(shown))]
    return "\n".join([*lines, *(f"not compared: {line}" for line in verdict.not_comparable)])


def _limit(figure: str, before: GateRow, now: GateRow) -> float:
    old: float = getattr(before, figure)
    if figure == "samples_per_second":
        spans = [span for row in (before, now) if (span := row.samples_per_second_interval) is not None]
        # Half of both intervals together: their ends then do not meet.
        return old - (sum(high - low for low, high in spans) / 2 if len(spans) == 2 else old * RATE_TOLERANCE)
    if figure in SHARES:
        interval = getattr(before, f"{figure}_interval")
        return float(interval[0]) if interval else old * (1 - ACCURACY_TOLERANCE)
    if figure == "perplexity":
        return float(max(old, 1.0) ** (1 + LOSS_TOLERANCE))
    return old + abs(old) * (LOSS_TOLERANCE if figure == "eval_loss" else MEMORY_TOLERANCE)


def _shown(value: float | str | None) -> str:
    if value is None:
        return "gone"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"
