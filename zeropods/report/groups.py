"""Runs that are repeats of one another, as one row of a summary."""

from __future__ import annotations

import itertools
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zeropods.evaluate.score_file import TEXT2SQL
from zeropods.report.accuracy import accuracy
from zeropods.report.entry import Entry
from zeropods.report.figures.of_run import figures, of_repeats
from zeropods.report.intervals import t_interval
from zeropods.report.settings import Settings, arrangement, as_key, settings

FACTS = (
    "model_id",
    "init",
    "task",
    "technique",
    "pods",
    "world_size",
    "prompt",
    "precision",
    "effective_batch_size",
    "gradient_checkpointing",
)


@dataclass(frozen=True)
class Run:
    """One run and its figures."""

    entry: Entry
    price_per_hour: float | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every raw value by name."""
        entry = self.entry
        return {
            "run": entry.name,
            "status": entry.status,
            "reason": entry.reason,
            **{key: entry.facts.get(key) for key in FACTS},
            "seed": (entry.facts.get("identity") or {}).get("seed"),
            **self.figures,
            **accuracy([entry]),
        }

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures of its record."""
        return figures(self.entry.record, self.price_per_hour)


@dataclass(frozen=True)
class Group:
    """Repeats: equal in all that is compared, and in technique and pods. A single run is a group of one."""

    letter: str
    """How tables and plots call it."""
    runs: tuple[Run, ...]

    @property
    def first(self) -> Entry:
        return self.runs[0].entry

    @cached_property
    def measured(self) -> tuple[Run, ...]:
        """The runs that the figures are of: those that ended well; where none did, those that left a record."""
        good = tuple(run for run in self.runs if run.entry.status == "ok")
        return good or tuple(run for run in self.runs if run.entry.record is not None)

    @property
    def task(self) -> str:
        """What it was trained for; text-to-SQL where nothing is known of it."""
        return str(self.first.facts.get("task", TEXT2SQL))

    @property
    def is_ok(self) -> bool:
        """Whether its figures are of runs that ended well."""
        return any(run.entry.status == "ok" for run in self.runs)

    @property
    def name(self) -> str:
        """The run's; of repeats, the part of the path that they share, or the first one's."""
        parts = [run.entry.name.split("/") for run in self.runs]
        shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
        return "/".join(names[0] for names in shared) or self.first.name

    @property
    def status(self) -> str:
        """`ok`, or how many ended how."""
        counts = Counter(run.entry.status for run in self.runs)
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    @cached_property
    def settings(self) -> Settings:
        """What must be equal for another row to be compared with it."""
        return settings(self.first.facts)

    @cached_property
    def arrangement(self) -> Settings:
        """Technique, pods and what goes with them."""
        return arrangement(self.first.facts)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every raw value by name, over the repeats that were measured."""
        rates = [run.figures["samples_per_second"] for run in self.measured]
        return {
            "row": self.letter,
            "runs": [run.entry.name for run in self.runs],
            "name": self.name,
            "repeats": len(self.measured),
            "status": self.status,
            **{key: self.first.facts.get(key) for key in FACTS},
            **of_repeats([run.figures for run in self.measured]),
            "samples_per_second_interval": t_interval([rate for rate in rates if rate is not None]),
            **accuracy([run.entry for run in self.measured]),
        }


def group_runs(entries: Iterable[Entry], price_per_hour: float | None = None) -> list[Group]:
    """Rows in the order of their first runs. A run without a record is a row of its own.

    So is a copy, a second record with the id of another: its figures were measured once.
    """
    found: dict[str, list[Run]] = {}
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        run_id = (entry.record or {}).get("run_id")
        alone = entry.record is None or run_id in seen
        key = str(number) if alone else as_key(settings(entry.facts), arrangement(entry.facts))
        seen |= {run_id} if run_id else set()
        found.setdefault(key, []).append(Run(entry, price_per_hour))
    return [Group(letter, tuple(runs)) for letter, runs in zip(letters(), found.values(), strict=False)]


def copies(entries: Sequence[Entry]) -> Iterator[str]:
    """A line for each record that has the id of an earlier one."""
    seen: dict[str, str] = {}
    for entry in entries:
        run_id = (entry.record or {}).get("run_id")
        if run_id in seen:
            yield f"{entry.name}: has the id {run_id} of {seen[run_id]}: a copied run, not counted as a repeat"
        elif run_id:
            seen[run_id] = entry.name


def letters() -> Iterator[str]:
    """A, B ... Z, AA, AB and so on."""
    for length in itertools.count(1):
        for of in itertools.product(string.ascii_uppercase, repeat=length):
            yield "".join(of)
