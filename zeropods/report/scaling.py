"""How much faster a row is than the one with the fewest processes: only between rows that may be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zeropods.report.groups import Group
from zeropods.report.settings import as_key, is_optional, unequal


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A row against its base."""

    base: str
    """The letter of the row with the fewest processes; `none` before others. It may be the row itself."""
    speed_up: float
    """samples/s of the row / of its base."""
    efficiency: float
    """Speed-up / (processes of the row / processes of its base)."""
    differs_in: tuple[str, ...] = ()
    """Where differences were allowed: the settings in which the two rows are not equal."""

    def to_json(self) -> dict[str, Any]:
        """By the names that a row of a summary has."""
        return {
            "base": self.base,
            "speed_up": self.speed_up,
            "scaling_efficiency": self.efficiency,
            "differs_in": list(self.differs_in),
        }


LENGTHS = ("max_seq_length", "loss_on")
"""Flags of a causal run that decide what a sample is."""
NOT_SCALED: dict[str, Any] = {"base": None, "speed_up": None, "scaling_efficiency": None, "differs_in": []}


def scalings(groups: Sequence[Group], *, allow_differences: bool = False) -> dict[str, Scaling]:
    """Scaling by the letters of rows; a row that has no other to be compared with has none.

    Args:
        allow_differences: where no other row may be compared, take any of the same model, task and length of rows,
            and say what differs. A sample of another is another amount of work, whatever was asked for.
    """
    timed = [group for group in groups if group.is_ok and group.values["samples_per_second"]]
    by_settings = _by_key(timed, _required)
    by_work = _by_key(timed, _work)
    found = {}
    for group in timed:
        peers = [other for other in by_settings[_required(group)] if not unequal(group.settings, other.settings)]
        if peers == [group] and allow_differences:
            peers = by_work[_work(group)]
        if len(peers) > 1:
            found[group.letter] = scaling(group, min(peers, key=_order))
    return found


def scaling(group: Group, base: Group) -> Scaling:
    """The figures of one row against another."""
    speed_up = group.values["samples_per_second"] / base.values["samples_per_second"]
    return Scaling(
        base=base.letter,
        speed_up=speed_up,
        efficiency=speed_up * base.values["world_size"] / group.values["world_size"],
        differs_in=tuple(unequal(base.settings, group.settings)),
    )


def _order(group: Group) -> tuple[int, bool]:
    return group.values["world_size"], group.values["technique"] != "none"


def _work(group: Group) -> str:
    identity = group.first.facts.get("identity") or {}
    return as_key(
        {"model_id": group.first.facts["model_id"], "task": group.task, **{k: identity.get(k) for k in LENGTHS}}
    )


def _required(group: Group) -> str:
    return as_key({name: value for name, value in group.settings.items() if not is_optional(name)})


def _by_key(groups: Iterable[Group], key: Any) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(key(group), []).append(group)
    return found
