"""Runs that are repeats of one another as one row, and which rows may be compared."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import mean, stdev
from typing import Any

from zeropods.evaluate.score_file import TEXT2SQL
from zeropods.measure.record import Record, RunConfig
from zeropods.report.accuracy import accuracy
from zeropods.report.entry import Entry
from zeropods.report.figures import figures, machines, of_repeats

# The interval in which a mean of repeats lies.

CONFIDENCE = 0.95


def t_interval(values: Sequence[float]) -> list[float] | None:
    """95 % interval of the mean by Student's t: mean +- t(0.975, n - 1) x standard deviation / sqrt(n).

    For rates, which are never below 0: neither is the interval, which is wide for two repeats (t = 12.7).

    Returns:
        Its ends; None for fewer than two values, of whose spread nothing is known.
    """
    if len(values) < 2:
        return None
    # Not scipy.stats, whose import takes a second.
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    half = quantile * stdev(values) / math.sqrt(len(values))
    return [max(0.0, mean(values) - half), mean(values) + half]


# What must be equal for the figures of two runs to be compared.

Settings = dict[str, Any]

SETTING_FACTS = (
    "model_id",
    "init",
    "task",
    "prompt",
    "precision",
    "effective_batch_size",
    "gradient_checkpointing",
    "train_rows",
)
TECHNIQUE = {
    "deepspeed",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
}
"""Flags that a technique or a number of pods changes by itself; the effective batch size is compared."""
BY_DESIGN = {"seed"}
"""What repeats of a run may differ in."""
DATA = ("dataset_path", "data")
"""What the two scripts call the prepared data; a run's identity has its content key there."""
SHOWN_DIGITS = 12
"""Of the prepared data's content key and of a configuration's digest."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
"""Of a DeepSpeed configuration: buckets need memory whatever the stage. Compared where both runs have them."""


def settings(config: RunConfig | None) -> Settings:
    """All but technique and pods: model, data, flags, hardware, versions, by name.

    Args:
        config: a record, or the configuration of a run that has none yet; of nothing, nothing is compared.
    """
    if config is None:
        return {}
    identity = config.identity
    left = identity.keys() - TECHNIQUE - BY_DESIGN - {*SETTING_FACTS, *DATA}
    key = next((identity[name] for name in DATA if name in identity), None)
    data = {} if key is None else {"data": str(key)[:SHOWN_DIGITS]}
    return {
        **{key: getattr(config, key) for key in SETTING_FACTS},
        **data,
        **{key: identity[key] for key in sorted(left)},
        **_deepspeed(config.deepspeed or {}),
        **machine_settings(config),
    }


def machine_settings(config: RunConfig) -> Settings:
    """Hardware and versions, each value by its own name. Of GPUs the names count: how many are used is the number of
    processes."""
    hardware = dict(config.hardware)
    if "gpus" in hardware:
        hardware["gpus"] = sorted(set(hardware["gpus"] or ()))
    parts = {"hardware": hardware, "versions": config.versions}
    return {f"{group} {key}": value for group, values in parts.items() for key, value in values.items()}


def arrangement(config: RunConfig | None) -> Settings:
    """Technique, pods and what goes with them: equal, with equal settings, in repeats of one run."""
    identity = {} if config is None else config.identity
    keys = ("technique", "pods", "slots", "per_device_train_batch_size", "gradient_accumulation_steps")
    return {
        **{key: getattr(config, key, None) for key in keys},
        "deepspeed": _digest(identity.get("deepspeed")),
        "per_device_eval_batch_size": identity.get("per_device_eval_batch_size"),
        "machines": machines(config) if isinstance(config, Record) and config.ranks else None,
    }


def unequal(one: Settings, other: Settings) -> list[str]:
    """Names of the settings in which two runs differ."""
    names = dict.fromkeys([*one, *other])
    return [name for name in names if not _agree(name, one, other)]


def as_key(*parts: Settings) -> str:
    """Equal for equal settings."""
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def is_optional(name: str) -> bool:
    """Whether a run that does not have this setting agrees with any value of it."""
    return name in BUCKETS


def _agree(name: str, one: Settings, other: Settings) -> bool:
    if is_optional(name) and not (name in one and name in other):
        return True
    return name in one and name in other and bool(one[name] == other[name])


def _digest(config: Any) -> str | None:
    return None if config is None else hashlib.sha256(as_key(config).encode()).hexdigest()[:SHOWN_DIGITS]


def _deepspeed(config: Mapping[str, Any]) -> Settings:
    zero, profiler = config.get("zero_optimization") or {}, config.get("flops_profiler") or {}
    buckets = {name: zero[name] for name in BUCKETS if name in zero}
    return {"profiler": bool(profiler.get("enabled", False)), **buckets}


# Runs that are repeats of one another, as one row of a summary.

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
            **{key: getattr(entry.config, key, None) for key in FACTS},
            "seed": None if entry.config is None else entry.config.identity.get("seed"),
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
        return TEXT2SQL if self.first.config is None else self.first.config.task

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
        return settings(self.first.config)

    @cached_property
    def arrangement(self) -> Settings:
        """Technique, pods and what goes with them."""
        return arrangement(self.first.config)

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
            **{key: getattr(self.first.config, key, None) for key in FACTS},
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
        run_id = None if entry.record is None else entry.record.run_id
        alone = entry.record is None or run_id in seen
        key = str(number) if alone else as_key(settings(entry.config), arrangement(entry.config))
        seen |= {run_id} if run_id else set()
        found.setdefault(key, []).append(Run(entry, price_per_hour))
    return [Group(letter, tuple(runs)) for letter, runs in zip(letters(), found.values(), strict=False)]


def copies(entries: Sequence[Entry]) -> Iterator[str]:
    """A line for each record that has the id of an earlier one."""
    seen: dict[str, str] = {}
    for entry in entries:
        run_id = None if entry.record is None else entry.record.run_id
        if run_id in seen:
            yield f"{entry.name}: has the id {run_id} of {seen[run_id]}: a copied run, not counted as a repeat"
        elif run_id:
            seen[run_id] = entry.name


def letters() -> Iterator[str]:
    """A, B ... Z, AA, AB and so on."""
    for length in itertools.count(1):
        for of in itertools.product(string.ascii_uppercase, repeat=length):
            yield "".join(of)


# What rows differ in besides technique and pods, so that nobody compares what cannot be compared.

NOT_RECORDED = "not recorded"
SHOWN_VALUES = 5
"""Of one setting; the rest is counted."""
SHOWN_LETTERS = 60
"""Of one value."""


def differences(groups: Sequence[Group]) -> list[str]:
    """A line for each setting in which rows of one task differ: `what: value (rows); value (rows)`.

    The task itself comes first: rows of two tasks have little else in common, and are never compared. Rows are named
    by their letters; `B-E` are all rows from B to E. Runs of which nothing is known are left out.
    """
    known = [(number, group) for number, group in enumerate(groups) if group.settings]
    by_task: dict[str, list[tuple[int, Group]]] = {}
    for number, group in known:
        by_task.setdefault(group.task, []).append((number, group))
    lines = []
    if len(by_task) > 1:
        tasks = {task: [number for number, _ in of_task] for task, of_task in by_task.items()}
        lines.append(f"task: {_listed(tasks, groups)}: of each another kind of sample, never compared")
    for of_task in by_task.values():
        lines += _within_one_task(of_task, groups)
    return lines


def _within_one_task(known: Sequence[tuple[int, Group]], groups: Sequence[Group]) -> Iterator[str]:
    for name in dict.fromkeys(name for _, group in known for name in group.settings):
        values: dict[str, list[int]] = {}
        for number, group in known:
            if name in group.settings or not is_optional(name):
                values.setdefault(_text(group.settings.get(name, NOT_RECORDED)), []).append(number)
        if len(values) > 1:
            yield f"{name}: {_listed(values, groups)}"


def spans(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each unbroken run of rising numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _listed(values: dict[str, list[int]], groups: Sequence[Group]) -> str:
    shown = [f"{value} ({row_letters(numbers, groups)})" for value, numbers in list(values.items())[:SHOWN_VALUES]]
    more = len(values) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])


def row_letters(numbers: Sequence[int], groups: Sequence[Group]) -> str:
    """Rows by their letters, `A, C-F`."""
    return ", ".join(_span(groups[first].letter, groups[last].letter, last - first) for first, last in spans(numbers))


def _span(first: str, last: str, length: int) -> str:
    if length == 0:
        return first
    return f"{first}-{last}" if length > 1 else f"{first}, {last}"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"


# How much faster a row is than the one with the fewest processes: only between rows that may be compared.


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
    config = group.first.config
    identity = {} if config is None else config.identity
    return as_key({"model_id": group.values["model_id"], "task": group.task, **{k: identity.get(k) for k in LENGTHS}})


def _required(group: Group) -> str:
    return as_key({name: value for name, value in group.settings.items() if not is_optional(name)})


def _by_key(groups: Iterable[Group], key: Any) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(key(group), []).append(group)
    return found
