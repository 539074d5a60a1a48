"""Rows of a summary: repeats of a run grouped into one row, what rows differ in, and how they scale."""

from __future__ import annotations

import itertools
import json
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from zeropods.measure.intervals import ratio_interval, t_interval
from zeropods.measure.record import PRECISION_PARTS
from zeropods.report.entry import Entry, accuracy_lines
from zeropods.report.formulas import Values, figures, matmul_key, of_repeats
from zeropods.report.settings import (
    MEASURED,
    PREFIX,
    arrangement,
    as_key,
    is_of,
    is_profiled,
    measured_settings,
    required,
    settings,
    unequal,
)
from zeropods.techniques import NAMES

T = TypeVar("T")
DISTURBED = 0.8
"""Share of the best matmul rate on the same hardware; below it, something else ran beside a run's own matmul."""
FACTS = (
    *("model_id", "init", "task", "technique", "pods", "world_size", "prompt", "precision", "effective_batch_size"),
    "gradient_checkpointing",
    "technique_text",
)
"""Facts of a run's configuration that a row shows."""


class Group:
    """Repeats: runs with the same compared settings, technique and pods. A single run is a group of one."""

    def __init__(self, number: int, letter: str, runs: Sequence[Entry]) -> None:
        """Make a row with every raw value by name, over the repeats that were measured; `group_runs` adds the values
        that compare it with other rows.

        The name is the run's; for repeats, the part of the path that they share, or the name of the first one. The
        status is the one that all repeats share, or the number of repeats with each status.

        Args:
            number: place of the row among all rows, from 0.
            letter: name of the row in tables and plots.
        """
        self.number, self.letter, self.runs, self.first = number, letter, runs, runs[0]
        # Figures come from the runs that ended well; where none did, from those that left a record.
        self.measured = [run for run in runs if run.status == "ok"] or [run for run in runs if run.record is not None]
        # What must be equal for another row to be compared with it. A repeat that failed may not have measured all.
        self.settings = settings((self.measured or runs)[0].config)
        timed = [rate for run in self.measured if (rate := run.values["samples_per_second"]) is not None]
        parts = zip(*(run.name.split("/") for run in runs), strict=False)
        shared = itertools.takewhile(lambda names: len(set(names)) == 1, parts)
        ended = Counter(run.status for run in runs)
        self.values: Values = {
            "row": letter,
            "runs": [run.name for run in runs],
            "name": "/".join(names[0] for names in shared) or self.first.name,
            "repeats": len(self.measured),
            "status": ", ".join([f"{count} {status}" for status, count in ended.items()] if len(ended) > 1 else ended),
            **{key: self.first.values[key] for key in FACTS},
            **of_repeats([run.values for run in self.measured]),
            "samples_per_second_values": timed,
            "samples_per_second_interval": t_interval(timed),
            **next(accuracy_lines(self.measured)),
            **NOT_SCALED,
        }

    def to_json(self) -> Values:
        """The row's raw values, and what another summary needs to find the same row."""
        return {**self.values, "settings": self.settings, "arrangement": arrangement(self.first.config)}


def group_runs(
    entries: Sequence[Entry], price_per_hour: float | None = None, *, allow_differences: bool = False
) -> list[Group]:
    """The rows of a summary, by processes and technique within equal settings; the settings with the most runs first.

    A profiled run never comes before one that is not profiled. A run without a record is a row of its own. So is a
    copy, a second record with the id of another one: its figures were measured only once.

    Args:
        allow_differences: where no other row is comparable, compare with any of the same model, task and row length,
            and say what differs. Where one of these differs, so does the work per sample, and rows are never compared.
    """
    peaks, copied = best_peaks(entries), copies(entries)

    def row_of(run: Entry) -> str:
        if run.record is None or run.name in copied:
            return run.name
        compared = {name: value for name, value in settings(run.config).items() if not name.startswith(MEASURED)}
        return as_key(compared, arrangement(run.config))

    def with_values(entry: Entry) -> Entry:
        peak = peaks.get(matmul_key(entry.record)) if entry.record else None
        values = {
            **{"run": entry.name, "status": entry.status, "reason": entry.reason},
            **{key: getattr(entry.config, key, None) for key in FACTS},
            "seed": entry.config and entry.config.identity.get("seed"),
            **figures(entry.record, price_per_hour, earlier=entry.earlier, peak=peak),
            **next(accuracy_lines([entry])),
        }
        return replace(entry, values=values)

    def block_order(rows: Sequence[Sequence[Entry]]) -> tuple[bool, int]:
        return is_profiled(rows[0][0].config), -sum(run.status == "ok" for runs in rows for run in runs)

    def row_order(runs: Sequence[Entry]) -> tuple[int, ...]:
        config = runs[0].config
        if config is None:
            return ()
        technique = NAMES.index(config.technique) if config.technique in NAMES else len(NAMES)
        return config.world_size, config.pods, technique

    repeats = _by_key(map(with_values, entries), row_of).values()
    rows = [row for runs in repeats for row in _by_measured_precision(runs)]
    blocks = _by_key(rows, lambda runs: required(settings(runs[0].config))).values()
    ordered = (runs for block in sorted(blocks, key=block_order) for runs in sorted(block, key=row_order))
    groups = [Group(number, *each) for number, each in enumerate(zip(letters(), ordered, strict=False))]
    _scale(groups, allow_differences)
    return groups


def _by_measured_precision(runs: Sequence[Entry]) -> list[list[Entry]]:
    """Runs of equal settings, apart by the number formats that they ran in.

    One that failed before it measured them counts as a repeat of the first. One that ended well without them is from
    before they were measured: it counts as a repeat where all others agree, since its settings are theirs.
    """
    measured = [formats for run in runs if (formats := measured_settings(run.config))]
    others_agree = len({as_key(formats) for formats in measured}) == 1

    def key_of(run: Entry) -> str:
        formats = measured_settings(run.config)
        is_like_the_first = others_agree or run.status != "ok"
        if not formats and measured and is_like_the_first:
            formats = measured[0]
        return as_key(formats)

    return list(_by_key(runs, key_of).values())


def _by_key(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def best_peaks(entries: Iterable[Entry]) -> dict[str, tuple[float, str]]:
    """The FLOP/s of the best matrix multiplication that any run measured, and the name of that run, by hardware and
    precision. Slower runs are taken to have shared the hardware with something else."""
    best: dict[str, tuple[float, str]] = {}
    for entry in entries:
        if entry.record is not None and entry.record.matmul_flops_per_second is not None:
            own, key = (entry.record.matmul_flops_per_second, entry.name), matmul_key(entry.record)
            best[key] = max(best.get(key, own), own, key=lambda peak: peak[0])
    return best


NAMED_RUNS = 3
"""Number of runs that a line about several of them names; the rest are counted."""


def disturbed_peaks(entries: Sequence[Entry]) -> Iterator[str]:
    """A line about the runs whose own matrix multiplications were far slower than the best on the same hardware.

    There is one line for each kind of hardware and precision, however many runs it is about.
    """
    best = best_peaks(entries)
    slow: dict[str, list[tuple[str, float]]] = {}
    for entry in entries:
        if entry.record is not None and entry.record.matmul_flops_per_second is not None:
            key = matmul_key(entry.record)
            share = entry.record.matmul_flops_per_second / best[key][0]
            if share < DISTURBED:
                slow.setdefault(key, []).append((entry.name, share))
    for key, runs in slow.items():
        most, of_run = best[key]
        shares = [share for _, share in runs]
        names = ", ".join(name for name, _ in runs[:NAMED_RUNS])
        others = f" and {len(runs) - NAMED_RUNS} more" if len(runs) > NAMED_RUNS else ""
        found = f"its own matmul peak is {shares[0]:.0%}"
        their = "its"
        if len(runs) > 1:
            found = f"their own matmul peaks are {min(shares):.0%} to {max(shares):.0%}"
            their = "their"
        yield (
            f"{names}{others}: {found} of the {most / 1e9:,.1f} GFLOP/s of {of_run}, on which {their} MFU is based: "
            f"something else was running, and {their} times may be too long as well"
        )


def unlike_formats(entries: Iterable[Entry]) -> Iterator[str]:
    """A line for each run that computed otherwise than it was asked to, or whose ranks differ in a number format."""
    for entry in entries:
        record = entry.record
        if record is None or record.measured_precision is None:
            continue
        of_ranks = [rank.measured_precision for rank in record.ranks if rank.measured_precision is not None]
        unlike = []
        for part in PRECISION_PARTS:
            values = {getattr(precision, part) for precision in of_ranks} - {None}
            if len(values) > 1:
                unlike.append(f"{part.replace('_', ' ')} {getattr(record.measured_precision, part)}")
        output = record.measured_precision.linear_output
        if unlike:
            yield f"{entry.name}: its ranks computed in different precisions: {', '.join(unlike)}"
        elif output is not None and output != record.precision:
            yield f"{entry.name}: was asked for {record.precision}, but its linear layers returned {output}"


def copies(entries: Sequence[Entry]) -> dict[str, str]:
    """A line for each record that has the id of an earlier one, by the name of its run."""
    first: dict[str, str] = {}
    found = {}
    for entry in entries:
        if entry.record is not None and first.setdefault(entry.record.run_id, entry.name) != entry.name:
            of = f"{entry.record.run_id} of {first[entry.record.run_id]}"
            found[entry.name] = f"{entry.name}: has the id {of}: a copied run, not counted as a repeat"
    return found


def letters() -> Iterator[str]:
    """The letters A, B ... Z, AA, AB and so on."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_uppercase, repeat=length))


# What rows differ in besides technique and pods, so that nobody compares rows that are not comparable.

NOT_RECORDED, BY_DEFAULT = "not recorded", "by default"
SHOWN_VALUES = 5
"""Number of values of one setting that a line shows; the rest are counted."""
SHOWN_LETTERS = 60
"""Maximum number of characters of one value that a line shows."""


def differences(groups: Sequence[Group]) -> list[str]:
    """A line for each setting in which rows of one task differ: `what: value (rows); value (rows)`.

    The task itself comes first: rows of two tasks have little else in common, and are never compared. Rows are named
    by their letters; `B-E` are all rows from B to E. Runs whose settings are not known are left out.
    """
    by_task = _by_key((group for group in groups if group.settings), lambda group: group.values["task"])
    lines = []
    if len(by_task) > 1:
        lines.append(f"task: {_listed(by_task)}: different kinds of samples, never compared")
    for rows in by_task.values():
        for name in dict.fromkeys(name for row in rows for name in row.settings):
            told: dict[str, list[Group]] = {}
            for row in (row for row in rows if is_of(name, row.settings)):
                value = row.settings.get(name, BY_DEFAULT if name.startswith(PREFIX) else NOT_RECORDED)
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                text = text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"
                told.setdefault(text, []).append(row)
            if len(told) > 1:
                lines.append(f"{name}: {_listed(told)}")
    return lines


def row_letters(rows: Iterable[Group]) -> str:
    """The letters of rows as text, such as `A, C-F`."""
    spans = []
    for _, run in itertools.groupby(enumerate(rows), lambda pair: pair[1].number - pair[0]):
        span = [row.letter for _, row in run]
        spans.append(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(span))
    return ", ".join(spans)


def _listed(values: Mapping[str, Sequence[Group]]) -> str:
    shown = [f"{value} ({row_letters(rows)})" for value, rows in list(values.items())[:SHOWN_VALUES]]
    more = len(values) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])


# How much faster a row is than the one with the fewest processes, among rows that may be compared.

LENGTHS = ("max_seq_length", "loss_on")
"""Flags of a causal run that decide what a sample is."""
NOT_SCALED: Values = {
    "base": None, "speed_up": None, "speed_up_interval": None, "scaling_efficiency": None, "differs_in": [],
}  # fmt: skip
"""Values that compare a row with its base, here of a row without one: the letter of the base, maybe the row's own;
samples/s of the row / of its base, with the 95 % interval where both have three repeats; that / (processes of the row /
processes of its base); and, where differences were allowed, the settings in which the two differ."""


def compared_rows(groups: Sequence[Group]) -> set[str]:
    """Letters of the rows that a summary is about: for each model, those that are compared with each other.

    Where a model has several such sets, the one with the most runs is taken, and a profiled one only if there is no
    other. Rows of the same settings that were not timed, such as one that ran out of memory, belong to the set.
    """
    related = (group for group in groups if group.values["base"] is not None and not group.values["differs_in"])
    sets = [rows for rows in _by_key(related, lambda group: group.values["base"]).values() if len(rows) > 1]
    sets.sort(key=lambda rows: (is_profiled(rows[0].first.config), -sum(len(group.measured) for group in rows)))
    chosen: dict[tuple[str, str], str] = {}
    for row in (rows[0].values for rows in sets):
        chosen.setdefault((row["model_id"], row["task"]), row["base"])
    bases = [group.settings for group in groups if group.letter in chosen.values()]
    return {group.letter for group in groups if any(not unequal(group.settings, base) for base in bases)}


def _scale(groups: Sequence[Group], allow_differences: bool) -> None:
    """Add to each row's values its comparison with the row of fewest processes, `none` before other techniques."""
    well = [group for group in groups if any(run.status == "ok" for run in group.runs)]
    timed = [group for group in well if group.values["samples_per_second"]]
    by_settings, by_work = _by_key(timed, lambda group: required(group.settings)), _by_key(timed, _work)
    for group in timed:
        near = by_settings[required(group.settings)]
        peers = [other for other in near if not unequal(group.settings, other.settings)]
        if peers == [group] and allow_differences:
            peers = by_work[_work(group)]
        if len(peers) > 1:
            base = min(peers, key=lambda peer: base_order(peer.values))
            row, other = group.values, base.values
            rates = [each["samples_per_second_values"] for each in (row, other)]
            row["base"], row["speed_up"] = base.letter, row["samples_per_second"] / other["samples_per_second"]
            row["speed_up_interval"] = None if group is base else ratio_interval(*rates)
            row["scaling_efficiency"] = row["speed_up"] * other["world_size"] / row["world_size"]
            row["differs_in"] = unequal(base.settings, group.settings)


def base_order(row: Values) -> tuple[int, bool]:
    """Sort key of rows, the first of which is the base of the others: fewest processes, `none` before others."""
    return row["world_size"], row["technique"] != "none"


def _work(group: Group) -> str:
    """Key that is equal for rows whose samples are the same amount of work."""
    identity = group.first.config.identity if group.first.config else {}
    values, lengths = group.values, {key: identity.get(key) for key in LENGTHS}
    return as_key({"model_id": values["model_id"], "task": values["task"], **lengths})
