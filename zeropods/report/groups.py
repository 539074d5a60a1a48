"""Rows of a summary: runs that are repeats of one another as one row, what rows differ in, and how they scale."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import mean, stdev
from typing import Any

from zeropods.evaluate.score_file import TEXT2SQL
from zeropods.measure.record import Record, RunConfig
from zeropods.report.accuracy import accuracy
from zeropods.report.entry import Entry
from zeropods.report.figures import Values, figures, machines, of_repeats

CONFIDENCE = 0.95
Settings = dict[str, Any]
"""What is compared, by name."""
FACTS = (
    *("model_id", "init", "task", "technique", "pods", "world_size", "prompt", "precision", "effective_batch_size"),
    "gradient_checkpointing",
    "technique_text",
)
"""Facts of a configuration that a row shows."""


@dataclass(frozen=True)
class SummaryRun:
    """One run and its figures."""

    entry: Entry
    price_per_hour: float | None = None

    @cached_property
    def values(self) -> Values:
        """Every raw value by name."""
        entry = self.entry
        return {
            "run": entry.name,
            "status": entry.status,
            "reason": entry.reason,
            **_facts(entry),
            "seed": entry.config and entry.config.identity.get("seed"),
            **self.figures,
            **accuracy([entry]),
        }

    @cached_property
    def figures(self) -> Values:
        """The figures of its record."""
        return figures(self.entry.record, self.price_per_hour)


@dataclass(frozen=True)
class Group:
    """Repeats: equal in all that is compared, and in technique and pods. A single run is a group of one."""

    letter: str
    """How tables and plots call it."""
    runs: tuple[SummaryRun, ...]

    @property
    def first(self) -> Entry:
        return self.runs[0].entry

    @cached_property
    def measured(self) -> tuple[SummaryRun, ...]:
        """The runs that the figures are of: those that ended well; where none did, those that left a record."""
        good = tuple(run for run in self.runs if run.entry.status == "ok")
        return good or tuple(run for run in self.runs if run.entry.record is not None)

    @property
    def task(self) -> str:
        """What it was trained for; text-to-SQL where nothing is known of it."""
        return self.first.config.task if self.first.config else TEXT2SQL

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
            return self.first.status
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
    def values(self) -> Values:
        """Every raw value by name, over the repeats that were measured."""
        rates = [run.figures["samples_per_second"] for run in self.measured]
        return {
            "row": self.letter,
            "runs": [run.entry.name for run in self.runs],
            "name": self.name,
            "repeats": len(self.measured),
            "status": self.status,
            **_facts(self.first),
            **of_repeats([run.figures for run in self.measured]),
            "samples_per_second_interval": t_interval([rate for rate in rates if rate is not None]),
            **accuracy([run.entry for run in self.measured]),
        }


def group_runs(entries: Iterable[Entry], price_per_hour: float | None = None) -> list[Group]:
    """Rows in the order of their first runs. A run without a record is a row of its own.

    So is a copy, a second record with the id of another: its figures were measured once.
    """
    found: dict[str, list[SummaryRun]] = {}
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        alone = entry.record is None or entry.record.run_id in seen
        key = str(number) if alone else as_key(settings(entry.config), arrangement(entry.config))
        seen |= {entry.record.run_id} if entry.record else set()
        found.setdefault(key, []).append(SummaryRun(entry, price_per_hour))
    return [Group(letter, tuple(runs)) for letter, runs in zip(letters(), found.values(), strict=False)]


def copies(entries: Sequence[Entry]) -> Iterator[str]:
    """A line for each record that has the id of an earlier one."""
    seen: dict[str, str] = {}
    for entry in entries:
        run_id = entry.record.run_id if entry.record else None
        if run_id in seen:
            yield f"{entry.name}: has the id {run_id} of {seen[run_id]}: a copied run, not counted as a repeat"
        elif run_id:
            seen[run_id] = entry.name


def letters() -> Iterator[str]:
    """A, B ... Z, AA, AB and so on."""
    for length in itertools.count(1):
        for of in itertools.product(string.ascii_uppercase, repeat=length):
            yield "".join(of)


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


def _facts(entry: Entry) -> Values:
    return {key: getattr(entry.config, key, None) for key in FACTS}


# What must be equal for the figures of two runs to be compared.

SETTING_FACTS = (
    *("model_id", "init", "task", "prompt", "precision", "effective_batch_size", "gradient_checkpointing"),
    "train_rows",
)
DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")
TECHNIQUE = {"deepspeed", "per_device_eval_batch_size", *DIVISION}
"""Flags that a technique or a number of pods changes by itself; the effective batch size is compared."""
BY_DESIGN = {"seed"}
"""What repeats of a run may differ in."""
DATA = ("dataset_path", "data")
"""What the two scripts call the prepared data; a run's identity has its content key there."""
SHOWN_DIGITS = 12
"""Of the prepared data's content key and of a configuration's digest."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
"""Settings of DeepSpeed that a run without them agrees with: buckets need memory whatever the stage."""


def settings(config: RunConfig | None) -> Settings:
    """All but technique and pods: model, data, flags, hardware, versions, by name; nothing where nothing is known.

    Of GPUs the names count: how many are used is the number of processes.
    """
    if config is None:
        return {}
    identity, deepspeed, hardware = config.identity, config.deepspeed or {}, dict(config.hardware)
    if "gpus" in hardware:
        hardware["gpus"] = sorted(set(hardware["gpus"] or ()))
    left = identity.keys() - TECHNIQUE - BY_DESIGN - {*SETTING_FACTS, *DATA}
    data = next((str(identity[name])[:SHOWN_DIGITS] for name in DATA if name in identity), None)
    zero, profiler = deepspeed.get("zero_optimization") or {}, deepspeed.get("flops_profiler") or {}
    return {
        **{key: getattr(config, key) for key in SETTING_FACTS},
        **({} if data is None else {"data": data}),
        **{key: identity[key] for key in sorted(left)},
        "profiler": bool(profiler.get("enabled", False)),
        **{name: zero[name] for name in BUCKETS if name in zero},
        **{f"hardware {key}": value for key, value in hardware.items()},
        **{f"versions {key}": value for key, value in config.versions.items()},
    }


def arrangement(config: RunConfig | None) -> Settings:
    """Technique, pods and what goes with them: equal, with equal settings, in repeats of one run."""
    identity = config.identity if config else {}
    asked = identity.get("deepspeed")
    return {
        **{key: getattr(config, key, None) for key in ("technique", "pods", "slots", *DIVISION)},
        "deepspeed": None if asked is None else hashlib.sha256(as_key(asked).encode()).hexdigest()[:SHOWN_DIGITS],
        "per_device_eval_batch_size": identity.get("per_device_eval_batch_size"),
        "machines": machines(config) if isinstance(config, Record) and config.ranks else None,
    }


def unequal(one: Settings, other: Settings) -> list[str]:
    """Names of the settings in which two runs differ."""

    def agree(name: str) -> bool:
        if name in one and name in other:
            return bool(one[name] == other[name])
        return name in BUCKETS

    return [name for name in dict.fromkeys([*one, *other]) if not agree(name)]


def as_key(*parts: Settings) -> str:
    """Equal for equal settings."""
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


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
    by_task: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        if group.settings:
            by_task.setdefault(group.task, []).append(number)
    lines = []
    if len(by_task) > 1:
        lines.append(f"task: {_listed(by_task, groups)}: of each another kind of sample, never compared")
    for numbers in by_task.values():
        for name in dict.fromkeys(name for number in numbers for name in groups[number].settings):
            values: dict[str, list[int]] = {}
            for number in numbers:
                of_row = groups[number].settings
                if name in of_row or name not in BUCKETS:
                    values.setdefault(_shortened(of_row.get(name, NOT_RECORDED)), []).append(number)
            if len(values) > 1:
                lines.append(f"{name}: {_listed(values, groups)}")
    return lines


def row_letters(numbers: Iterable[int], groups: Sequence[Group]) -> str:
    """Rows by their letters, `A, C-F`."""
    spans = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [groups[number].letter for _, number in run]
        spans.append(f"{members[0]}-{members[-1]}" if len(members) > 2 else ", ".join(members))
    return ", ".join(spans)


def _listed(values: Mapping[str, list[int]], groups: Sequence[Group]) -> str:
    shown = [f"{value} ({row_letters(numbers, groups)})" for value, numbers in list(values.items())[:SHOWN_VALUES]]
    more = len(values) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"


# How much faster a row is than the one with the fewest processes: only between rows that may be compared.

LENGTHS = ("max_seq_length", "loss_on")
"""Flags of a causal run that decide what a sample is."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A row against its base."""

    base: str | None = None
    """The letter of the row with the fewest processes; `none` before others. It may be the row itself."""
    speed_up: float | None = None
    """samples/s of the row / of its base."""
    scaling_efficiency: float | None = None
    """Speed-up / (processes of the row / processes of its base)."""
    differs_in: tuple[str, ...] = ()
    """Where differences were allowed: the settings in which the two rows are not equal."""

    def to_json(self) -> Values:
        """By the names that a row of a summary has."""
        return {**asdict(self), "differs_in": list(self.differs_in)}


NOT_SCALED = Scaling()
"""Of a row that has no other to be compared with."""


def scalings(groups: Sequence[Group], *, allow_differences: bool = False) -> dict[str, Scaling]:
    """Scaling by the letters of rows; a row that has no other to be compared with has none.

    Args:
        allow_differences: where no other row may be compared, take any of the same model, task and length of rows,
            and say what differs. A sample of another is another amount of work, whatever was asked for.
    """
    timed = [group for group in groups if group.is_ok and group.values["samples_per_second"]]
    by_settings, by_work = _by_key(timed, _required), _by_key(timed, _work)
    found = {}
    for group in timed:
        peers = [other for other in by_settings[_required(group)] if not unequal(group.settings, other.settings)]
        if peers == [group] and allow_differences:
            peers = by_work[_work(group)]
        if len(peers) > 1:
            base = min(peers, key=lambda peer: (peer.values["world_size"], peer.values["technique"] != "none"))
            found[group.letter] = _scaling(group.values, base.values, unequal(base.settings, group.settings))
    return found


def _scaling(row: Values, base: Values, differs_in: Sequence[str]) -> Scaling:
    speed_up = row["samples_per_second"] / base["samples_per_second"]
    efficiency = speed_up * base["world_size"] / row["world_size"]
    return Scaling(base=base["row"], speed_up=speed_up, scaling_efficiency=efficiency, differs_in=tuple(differs_in))


def _required(group: Group) -> str:
    return as_key({name: value for name, value in group.settings.items() if name not in BUCKETS})


def _work(group: Group) -> str:
    """Equal where a sample is the same amount of work."""
    identity = group.first.config.identity if group.first.config else {}
    return as_key({"model_id": group.values["model_id"], "task": group.task, **{k: identity.get(k) for k in LENGTHS}})


def _by_key(groups: Iterable[Group], key: Callable[[Group], str]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(key(group), []).append(group)
    return found
