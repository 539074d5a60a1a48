"""A regression gate: which rows of a summary are worse than in an earlier one, by more than chance allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.record import read_json
from zeropods.report.groups import as_key
from zeropods.tables import Table

SCHEMA_VERSION = 2
"""Of `summary.json`."""
RATE_TOLERANCE = 0.05
"""Share of the old samples/s that may be lost where not both have an interval."""
MEMORY_TOLERANCE = 0.05
LOSS_TOLERANCE = 0.01
"""Of a loss in nats; of a perplexity, which is a power of it, in the exponent."""
ACCURACY_TOLERANCE = 0.05
"""Share of the old accuracy that may be lost where it has no interval."""
Row = dict[str, Any]


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
class Verdict:
    """What a gate has found."""

    worse: tuple[Worse, ...]
    not_comparable: tuple[str, ...]
    """A line for each row or figure that could not be judged, with the reason."""
    judged: int
    """Rows that were compared."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "worse": [asdict(one) for one in self.worse],
            "not_comparable": list(self.not_comparable),
            "judged": self.judged,
        }


def read_old(path: Path) -> dict[str, Any]:
    """An earlier `summary.json`; `UserError` where it is none, or of another version."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a summary.json that `zeropods summary` wrote")
    try:
        document = read_json(path)
    except (UserError, RecursionError):
        raise UserError(
            f"{path}: no JSON object; expected a summary.json, whole: summarize the old runs again"
        ) from None
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version {version!r}; this version reads {SCHEMA_VERSION}: summarize again")
    groups = document.get("groups")
    if not isinstance(groups, list) or not all(isinstance(row, dict) and row.keys() >= NEEDED for row in groups):
        raise UserError(f"{path}: its groups are not those of a summary; summarize the old runs again")
    for number, row in enumerate(groups):
        fault = next((key for key, is_sound in SOUND.items() if key in row and not is_sound(row[key])), None)
        if fault is not None:
            raise UserError(f"{path}: groups.{number}.{fault} is {row[fault]!r:.60}; summarize the old runs again")
    return document


def compare(old: dict[str, Any], new: dict[str, Any]) -> Verdict:
    """Judge every row of an old summary that had ended well.

    Rows are matched by all settings but versions and seed, by technique and pods. A row that was measured on other
    hardware is not judged. A row that ended well and is gone, or ends otherwise now, is worse.
    """
    candidates: dict[str, list[Row]] = {}
    for row in new["groups"]:
        candidates.setdefault(_key(row), []).append(row)
    worse: list[Worse] = []
    unjudged: list[str] = []
    judged = 0
    for before in (row for row in old["groups"] if _is_ok(row)):
        found = candidates.get(_key(before), [])
        same = [row for row in found if _hardware(row) == _hardware(before)]
        if found and not same:
            unjudged.append(f"{before['name']}: was measured on other hardware")
            continue
        judged += 1
        now = next((row for row in same if _is_ok(row)), same[0] if same else None)
        worse += _judge(before, now)
        unjudged += [] if now is None else _unmeasured(before, now)
    return Verdict(tuple(worse), tuple(unjudged), judged)


def gate_text(verdict: dict[str, Any]) -> str:
    """What people read of a verdict."""
    lines = [f"{len(verdict['worse'])} figures got worse, of {verdict['judged']} rows compared"]
    if verdict["worse"]:
        shown = [{key: _shown(value) for key, value in one.items()} for one in verdict["worse"]]
        lines += ["", Table.of(shown).to_markdown()]
    return "\n".join([*lines, *(f"not compared: {line}" for line in verdict["not_comparable"])])


def _judge(before: Row, now: Row | None) -> Iterator[Worse]:
    if now is None or not _is_ok(now):
        gone = None if now is None else now["status"]
        yield Worse(row=before["name"], figure="status", old=before["status"], new=gone, allowed="ok")
        return
    for figure, limit, is_worse in _limits(before, now):
        if is_worse:
            value = now[figure]
            yield Worse(row=before["name"], figure=figure, old=before[figure], new=value, allowed=limit)


def _limits(before: Row, now: Row) -> Iterator[tuple[str, float, bool]]:
    """Figures that both have: name, worst value that passes, whether the new one is beyond it."""
    both = {key for key in JUDGED if before.get(key) is not None and now.get(key) is not None}
    if "samples_per_second" in both:
        slowest = before["samples_per_second"] - _allowed_drop(before, now)
        yield "samples_per_second", slowest, now["samples_per_second"] < slowest
    if "peak_memory_bytes" in both and before["memory_kind"] == now["memory_kind"]:
        most = before["peak_memory_bytes"] * (1 + MEMORY_TOLERANCE)
        yield "peak_memory_bytes", most, now["peak_memory_bytes"] > most
    for share in (key for key in SHARES if key in both):
        interval = before.get(f"{share}_interval")
        least = interval[0] if interval else before[share] * (1 - ACCURACY_TOLERANCE)
        yield share, least, now[share] < least
    if "perplexity" in both:
        most = before["perplexity"] ** (1 + LOSS_TOLERANCE)
        yield "perplexity", most, now["perplexity"] > most
    if "eval_loss" in both:
        highest = before["eval_loss"] + abs(before["eval_loss"]) * LOSS_TOLERANCE
        yield "eval_loss", highest, now["eval_loss"] > highest


def _allowed_drop(before: Row, now: Row) -> float:
    """Half of both intervals together: their ends then do not meet; without both, a share of the old rate."""
    spans = [row["samples_per_second_interval"] for row in (before, now)]
    if None in spans:
        return float(before["samples_per_second"]) * RATE_TOLERANCE
    return sum(high - low for low, high in spans) / 2


def _unmeasured(before: Row, now: Row) -> list[str]:
    if not _is_ok(now):
        return []
    lost = [key for key in JUDGED if before.get(key) is not None and now.get(key) is None]
    kinds = before["memory_kind"], now["memory_kind"]
    if None not in kinds and kinds[0] != kinds[1]:
        lost.append(f"peak_memory_bytes, {kinds[0]} and {kinds[1]}")
    return [f"{before['name']}: {key}: not measured in both" for key in lost]


def _is_ok(row: Row) -> bool:
    """Whether its figures are of runs that ended well: `ok`, or `2 ok, 1 oom`."""
    return "ok" in str(row["status"]).replace(",", " ").split()


def _key(row: Row) -> str:
    settings = {key: value for key, value in row["settings"].items() if not key.startswith(("hardware ", "versions "))}
    return as_key(settings, row["arrangement"])


def _hardware(row: Row) -> Row:
    return {key: value for key, value in row["settings"].items() if key.startswith("hardware ")}


def _is_number(value: object) -> bool:
    """JSON has no NaN, but Python's reader takes it, and no figure is ever worse than that."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_figure(value: object) -> bool:
    return value is None or _is_number(value)


def _is_interval(value: object) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _shown(value: Any) -> str:
    if value is None:
        return "gone"
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


SHARES = ("execution_accuracy", "f1")
OF_ALL = ("samples_per_second", "peak_memory_bytes", "execution_accuracy", "eval_loss")
JUDGED = (*OF_ALL, "f1", "perplexity")
"""A summary from before there were causal runs has no `f1` and no `perplexity`."""
NEEDED = {"name", "status", "settings", "arrangement", "samples_per_second_interval", "memory_kind", *OF_ALL}
SOUND: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(JUDGED, _is_figure),
    **dict.fromkeys(("samples_per_second_interval", *(f"{share}_interval" for share in SHARES)), _is_interval),
    **dict.fromkeys(("name", "status"), _is_text),
    **dict.fromkeys(("settings", "arrangement"), _is_object),
    "memory_kind": lambda kind: kind is None or _is_text(kind),
    "perplexity": lambda value: value is None or (_is_number(value) and value >= 1),  # type: ignore[operator]
}
"""What a row's values must be: a gate lets nothing pass that it cannot judge."""
