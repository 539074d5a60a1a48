"""Rows of a summary: repeats of a run grouped into one row, what rows differ in, and how they
scale."""

from __future__ import annotations

import itertools
import json
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from zeropods.measure.intervals import ratio_interval, t_interval
from zeropods.measure.record import PRECISION_PARTS, MeasuredPrecision, Record, RunConfig
from zeropods.report.entry import Entry, accuracy_lines
from zeropods.report.formulas import by_key, figures, matmul_key, of_repeats
from zeropods.report.row import Comparison, Row
from zeropods.report.settings import (
    DEEPSPEED_PREFIX,
    PRECISION_PREFIX,
    Settings,
    arrangement,
    as_key,
    is_of,
    is_profiled,
    measured_settings,
    required,
    settings,
    unequal,
)
from zeropods.tables import shortened
from zeropods.techniques import NAMES

Item = TypeVar("Item")
DISTURBED = 0.8
"""Share of the best matmul rate on the same hardware; below it, something else ran beside a run's
own matmul."""
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
    "technique_text",
)
"""Facts of a run's configuration that `summary.json` and `summary.csv` have."""


class Group:
    """Repeats: runs with the same compared settings, technique and pods. A single run is a group of
    one."""

    def __init__(self, number: int, letter: str, runs: Sequence[Entry]) -> None:
        """Sum up the repeats that were measured as one row; `group_runs` adds how it compares with
        other rows.

        The name is the run's; for repeats, the part of the path that they share, or the name of the
        first one. The status is the one that all repeats share, or the number of repeats with each
        status.

        Args:
            number: place of the row among all rows, from 0.
            letter: name of the row in tables and plots.
        """
        self.number = number
        self.letter = letter
        self.runs = runs
        self.first = runs[0]
        # Figures come from the runs that ended well; where none did, from those that left a record.
        self.measured = [run for run in runs if run.status == "ok"]
        if not self.measured:
            self.measured = [run for run in runs if run.record is not None]
        # A repeat that failed may not have measured all.
        first_measured = self.measured[0] if self.measured else self.first
        self.settings = settings(first_measured.config)
        """What must be equal for another row to be compared with it."""
        # The first line of accuracy is over all tables; there always is one.
        overall, *_ = accuracy_lines(self.measured)

        known_rates = []
        for run in self.measured:
            if run.figures.samples_per_second is not None:
                known_rates.append(run.figures.samples_per_second)
        self.row = Row(
            letter=letter,
            runs=[run.name for run in runs],
            name=_shared_path(runs) or self.first.name,
            repeats=len(self.measured),
            status=_status_text(runs),
            reasons=list(dict.fromkeys(run.reason for run in runs if run.reason)),
            config=self.first.config,
            figures=of_repeats([run.figures for run in self.measured]),
            samples_per_second_values=known_rates,
            samples_per_second_interval=t_interval(known_rates),
            accuracy=overall,
        )

    def to_json(self) -> dict[str, object]:
        """The row's raw values by key, and what another summary needs to find the same row."""
        row = self.row
        return {
            "row": row.letter,
            "runs": row.runs,
            "name": row.name,
            "repeats": row.repeats,
            "status": row.status,
            **_facts(row.config),
            **by_key(row.figures),
            "samples_per_second_values": row.samples_per_second_values,
            "samples_per_second_interval": row.samples_per_second_interval,
            **row.accuracy.to_json(),
            **vars(row.comparison),
            "settings": self.settings,
            "arrangement": arrangement(self.first.config),
        }

    def runs_to_json(self) -> list[dict[str, object]]:
        """The raw values of each of its runs by key."""
        documents = []
        for run in self.runs:
            values = vars(run.figures)
            if run.record is None:
                # Nothing is known; the keys come in the order of a row.
                values = by_key(run.figures)
            documents.append(
                {
                    "row": self.letter,
                    "run": run.name,
                    "status": run.status,
                    "reason": run.reason,
                    **_facts(run.config),
                    "seed": run.config.identity.get("seed") if run.config else None,
                    **values,
                    **run.accuracy.to_json(),
                }
            )
        return documents


def _facts(config: RunConfig | None) -> dict[str, object]:
    """The facts of a run's configuration by key; all None without one."""
    return {key: getattr(config, key, None) for key in FACTS}


def _shared_path(runs: Sequence[Entry]) -> str:
    """The first parts of the names of runs, as far as they are equal."""
    shared = []
    for names in zip(*(run.name.split("/") for run in runs), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return "/".join(shared)


def _status_text(runs: Sequence[Entry]) -> str:
    """The status that all runs share, or the number of runs with each status."""
    number_by_status = Counter(run.status for run in runs)
    if len(number_by_status) == 1:
        return runs[0].status
    return ", ".join(f"{number} {status}" for status, number in number_by_status.items())


def group_runs(
    entries: Sequence[Entry],
    price_per_hour: float | None = None,
    *,
    allow_differences: bool = False,
) -> list[Group]:
    """The rows of a summary, by processes and technique within equal settings; the settings with
    the most runs first.

    A profiled run never comes before one that is not profiled. A run without a record is a row of
    its own. So is a copy, a second record with the id of another one: its figures were measured
    only once.

    Args:
        allow_differences: where no other row is comparable, compare with any of the same model,
            task and row length, and say what differs. Where one of these differs, so does the work
            per sample, and rows are never compared.
    """
    peaks = best_peaks(entries)
    copied = copies(entries)

    def row_of(run: Entry) -> str:
        if run.record is None or run.name in copied:
            return run.name
        return _row_key(run)

    with_figures = [_with_figures(entry, peaks, price_per_hour) for entry in entries]
    rows = []
    for runs in _by_key(with_figures, row_of).values():
        rows.extend(_by_measured_precision(runs))

    blocks = _by_key(rows, lambda runs: required(settings(runs[0].config)))
    ordered = []
    for block in sorted(blocks.values(), key=_block_order):
        ordered.extend(sorted(block, key=_row_order))
    groups = []
    for number, (letter, runs) in enumerate(zip(letters(), ordered, strict=False)):
        groups.append(Group(number, letter, runs))
    _scale(groups, allow_differences)
    return groups


def _row_key(run: Entry) -> str:
    """A key that is equal for runs that may be repeats; formats that ran are compared later."""
    requested = {}
    for name, value in settings(run.config).items():
        if not name.startswith(PRECISION_PREFIX):
            requested[name] = value
    return as_key(requested, arrangement(run.config))


def _with_figures(
    entry: Entry, peaks: Mapping[str, tuple[float, str]], price_per_hour: float | None
) -> Entry:
    """A run with its figures and its accuracy."""
    peak = peaks.get(matmul_key(entry.record)) if entry.record else None
    return replace(
        entry,
        figures=figures(entry.record, price_per_hour, earlier=entry.earlier, peak=peak),
        accuracy=next(accuracy_lines([entry])),
    )


def _block_order(rows: Sequence[Sequence[Entry]]) -> tuple[bool, int]:
    """Sort key of rows of equal settings: not profiled first, then those with the most runs that
    ended well."""
    all_runs = itertools.chain.from_iterable(rows)
    ended_well = [run for run in all_runs if run.status == "ok"]
    return is_profiled(rows[0][0].config), -len(ended_well)


def _row_order(runs: Sequence[Entry]) -> tuple[int, ...]:
    """Sort key of a row within its block: processes, pods, technique; without a configuration
    first."""
    config = runs[0].config
    if config is None:
        return ()
    technique = len(NAMES)
    if config.technique in NAMES:
        technique = NAMES.index(config.technique)
    return config.world_size, config.pods, technique


def _by_measured_precision(runs: Sequence[Entry]) -> list[list[Entry]]:
    """Runs of equal settings, apart by the number formats that they ran in.

    One that failed before it measured them counts as a repeat of the first. One that ended well
    without them had no step left to do in its last attempt: it counts as a repeat where all others
    agree, since its settings are theirs.
    """
    formats_of_runs = [measured_settings(run.config) for run in runs]
    measured = [formats for formats in formats_of_runs if formats]
    others_agree = len({as_key(formats) for formats in measured}) == 1

    def key_of(run: Entry) -> str:
        formats = measured_settings(run.config)
        is_like_the_first = others_agree or run.status != "ok"
        if not formats and measured and is_like_the_first:
            formats = measured[0]
        return as_key(formats)

    return list(_by_key(runs, key_of).values())


def _by_key(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    grouped: dict[str, list[Item]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def best_peaks(entries: Iterable[Entry]) -> dict[str, tuple[float, str]]:
    """The FLOP/s of the best matrix multiplication that any run measured, and the name of that run,
    by hardware and precision. Slower runs are taken to have shared the hardware with something
    else."""
    best: dict[str, tuple[float, str]] = {}
    for entry in entries:
        record = entry.record
        if record is None or record.matmul_flops_per_second is None:
            continue
        key = matmul_key(record)
        if key not in best or record.matmul_flops_per_second > best[key][0]:
            best[key] = (record.matmul_flops_per_second, entry.name)
    return best


# What there is to know about runs: what is to be said of several is said once.

NAMED_RUNS = 3
"""Number of runs that a line about several of them names; the rest are counted."""


def remark_lines(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each text, with the names of all runs of which it is said.

    Args:
        remarks: names of runs, each with a text about it.
    """
    names_by_text: dict[str, list[str]] = {}
    for name, text in remarks:
        names_by_text.setdefault(text, []).append(name)
    lines = []
    for text, names in names_by_text.items():
        of_each = "each of " if len(names) > 1 else ""
        lines.append(f"{of_each}{_named(names)}: {text}")
    return lines


def _named(names: Sequence[str]) -> str:
    """The names of runs; of many, the first ones and how many more."""
    shown = shortened(names, NAMED_RUNS)
    if len(shown) == len(names):
        return ", ".join(names)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def disturbed_peaks(entries: Sequence[Entry]) -> Iterator[str]:
    """A line about the runs whose own matrix multiplications were far slower than the best on the
    same hardware.

    There is one line for each kind of hardware and precision, however many runs it is about.
    """
    best = best_peaks(entries)
    slow: dict[str, list[tuple[str, float]]] = {}
    for entry in entries:
        record = entry.record
        if record is None or record.matmul_flops_per_second is None:
            continue
        key = matmul_key(record)
        most, _ = best[key]
        share = record.matmul_flops_per_second / most
        if share < DISTURBED:
            slow.setdefault(key, []).append((entry.name, share))
    for key, runs in slow.items():
        yield _disturbed_text(runs, best[key])


def _disturbed_text(runs: Sequence[tuple[str, float]], best: tuple[float, str]) -> str:
    """A line about runs, each with its share of the best peak."""
    names = _named([name for name, _ in runs])
    shares = [share for _, share in runs]
    if len(runs) == 1:
        their = "its"
        peaks = f"its own matmul peak is {shares[0]:.0%}"
    else:
        their = "their"
        peaks = f"their own matmul peaks are {min(shares):.0%} to {max(shares):.0%}"
    most, best_run = best
    return (
        f"{names}: {peaks} of the {most / 1e9:,.1f} GFLOP/s of {best_run}, on which {their} MFU "
        f"is based: something else was running, and {their} times may be too long as well"
    )


def unlike_formats(entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    """Each run that computed otherwise than it was asked to, or whose ranks differ in a number
    format, with a text that says so."""
    for entry in entries:
        record = entry.record
        if record is None or record.measured_precision is None:
            continue
        unlike = _unlike_parts(record, record.measured_precision)
        output = record.measured_precision.linear_output
        if unlike:
            yield entry.name, f"its ranks computed in different precisions: {', '.join(unlike)}"
        elif output is not None and output != record.precision:
            text = f"was asked for {record.precision}, but its linear layers returned {output}"
            yield entry.name, text


def _unlike_parts(record: Record, of_all_ranks: MeasuredPrecision) -> list[str]:
    """Each kind of tensors whose number format differs between ranks, with the formats.

    Args:
        of_all_ranks: the run's own formats, in which one that differs is said for each rank.
    """
    precisions = []
    for rank in record.ranks:
        if rank.measured_precision is not None:
            precisions.append(rank.measured_precision)
    unlike = []
    for part in PRECISION_PARTS:
        formats = {getattr(precision, part) for precision in precisions} - {None}
        if len(formats) > 1:
            unlike.append(f"{part.replace('_', ' ')} {getattr(of_all_ranks, part)}")
    return unlike


def copies(entries: Sequence[Entry]) -> dict[str, str]:
    """The names of the runs whose record has the id of an earlier one, each with the name of that
    earlier run."""
    first_runs: dict[str, str] = {}
    originals = {}
    for entry in entries:
        if entry.record is None:
            continue
        first_run = first_runs.setdefault(entry.record.run_id, entry.name)
        if first_run != entry.name:
            originals[entry.name] = first_run
    return originals


def copy_remarks(entries: Sequence[Entry]) -> Iterator[str]:
    """A line about all runs that are copies of other ones."""
    originals = copies(entries)
    if len(originals) > 1:
        names = _named([f"{name} of {original}" for name, original in originals.items()])
        yield f"{names}: copied runs, which have the ids of the others; not counted as repeats"
        return
    for entry in entries:
        if entry.record is not None and entry.name in originals:
            yield (
                f"{entry.name}: has the id {entry.record.run_id} of {originals[entry.name]}: "
                "a copied run, not counted as a repeat"
            )


def letters() -> Iterator[str]:
    """The letters A, B ... Z, AA, AB and so on."""
    for length in itertools.count(1):
        for word in itertools.product(string.ascii_uppercase, repeat=length):
            yield "".join(word)


# What rows differ in besides technique and pods, so that nobody compares rows that are not
# comparable.

NOT_RECORDED, BY_DEFAULT = "not recorded", "by default"
SHOWN_VALUES = 5
"""Number of values of one setting that a line shows; the rest are counted."""
LONGEST_VALUE = 60
"""Maximum number of characters of one value that a line shows."""


def differences(groups: Sequence[Group]) -> list[str]:
    """A line for each setting in which rows of one task differ: `what: value (rows); value (rows)`.
    Settings in which the same rows differ share a line: `rows / rows: what: value / value; ...`.

    The task itself comes first: rows of two tasks have little else in common, and are never
    compared. Runs whose settings are not known are left out.
    """
    with_settings = [group for group in groups if group.settings]
    by_task = _by_key(with_settings, _task)
    lines = []
    if len(by_task) > 1:
        listed = _listed(by_task)
        lines.append(f"task: {listed}: different kinds of samples, never compared")
    for rows in by_task.values():
        lines += _differences_of_task(rows)
    return lines


def _differences_of_task(rows: Sequence[Group]) -> list[str]:
    """The lines about rows of one task."""
    # The settings of all rows, in the order in which they are first met.
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.settings)
    # By the names of the rows on each side: the settings that divide the rows so, and for each
    # setting the rows of each value.
    by_sides: dict[tuple[str, ...], dict[str, dict[str, list[Group]]]] = {}
    for name in names:
        with_setting = [row for row in rows if is_of(name, row.settings)]
        rows_by_value = _by_key(with_setting, partial(_setting_text, name))
        if len(rows_by_value) > 1:
            sides = tuple(row_names(side) for side in rows_by_value.values())
            by_sides.setdefault(sides, {})[name] = rows_by_value

    lines = []
    for sides, settings_apart in by_sides.items():
        if len(settings_apart) == 1:
            ((name, rows_by_value),) = settings_apart.items()
            lines.append(f"{name}: {_listed(rows_by_value)}")
        else:
            texts = []
            for name, rows_by_value in settings_apart.items():
                values = list(rows_by_value)
                texts.append(f"{name}: {_cut(values)}")
            lines.append(f"{_cut(sides)}: {'; '.join(texts)}")
    return lines


def _task(group: Group) -> str:
    return group.row.known_config.task


def _setting_text(name: str, row: Group) -> str:
    """The value that a row has for a setting, cut off where it is long."""
    if name in row.settings:
        value = row.settings[name]
    else:
        value = BY_DEFAULT if name.startswith(DEEPSPEED_PREFIX) else NOT_RECORDED
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > LONGEST_VALUE:
        return f"{text[: LONGEST_VALUE - 1]}…"
    return text


def row_names(rows: Iterable[Group]) -> str:
    """The plain labels of rows as text, such as `A none x1, C ddp x2 to F zero3 x2`."""
    spans: list[list[Group]] = []
    for row in rows:
        if spans and row.number == spans[-1][-1].number + 1:
            spans[-1].append(row)
        else:
            spans.append([row])
    texts = []
    for span in spans:
        labels = [group.row.plain_label for group in span]
        if len(span) > 2:
            texts.append(f"{labels[0]} to {labels[-1]}")
        else:
            texts += labels
    return ", ".join(texts)


def _listed(rows_by_value: Mapping[str, Sequence[Group]]) -> str:
    """The first values of a setting, each with its rows, and how many more there are."""
    texts = [f"{value} ({row_names(rows)})" for value, rows in rows_by_value.items()]
    return "; ".join(_first_texts(texts))


def _cut(texts: Sequence[str]) -> str:
    """The first of some texts side by side, and how many more there are."""
    return " / ".join(_first_texts(texts))


def _first_texts(texts: Sequence[str]) -> list[str]:
    """The first of some texts and, in words that go on from them, how many more there are."""
    shown = shortened(texts, SHOWN_VALUES)
    if len(shown) < len(texts):
        shown[-1] = f"and {shown[-1]}"
    return shown


# How much faster a row is than the one with the fewest processes, among rows that may be compared.

LENGTHS = ("max_seq_length", "loss_on")
"""Flags of a causal run that decide what a sample is."""


def compared_rows(groups: Sequence[Group]) -> set[str]:
    """Letters of the rows that a summary is about: for each model, those that are compared with
    each other.

    Where a model has several such sets, the one with the most runs is taken, and a profiled one
    only if there is no other. Rows of the same settings that were not timed, such as one that ran
    out of memory, belong to the set.
    """
    bases_of_models: dict[tuple[str, str], str] = {}
    for rows in sorted(_compared_sets(groups), key=_set_order):
        config = rows[0].row.known_config
        # The first set of a model stays.
        bases_of_models.setdefault((config.model_id, config.task), _base(rows[0]))
    bases = set(bases_of_models.values())
    base_settings = [group.settings for group in groups if group.letter in bases]
    compared = set()
    for group in groups:
        is_like_a_base = any(not unequal(group.settings, base) for base in base_settings)
        if is_like_a_base:
            compared.add(group.letter)
    return compared


def _compared_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """The rows that have the same base and differ from it only in technique and pods, two or more
    each."""
    related = []
    for group in groups:
        comparison = group.row.comparison
        if comparison.base is not None and not comparison.differs_in:
            related.append(group)
    sets = _by_key(related, _base)
    return [rows for rows in sets.values() if len(rows) > 1]


def _base(group: Group) -> str:
    """Letter of the base of a row that has one."""
    base = group.row.comparison.base
    assert base is not None
    return base


def _set_order(rows: Sequence[Group]) -> tuple[bool, int]:
    """Sort key of sets of rows: not profiled first, then those with the most runs."""
    runs = sum(len(group.measured) for group in rows)
    return is_profiled(rows[0].first.config), -runs


def _scale(groups: Sequence[Group], allow_differences: bool) -> None:
    """Add to each row its comparison with the row of fewest processes, `none` before other
    techniques."""
    timed = [group for group in groups if _is_timed(group)]
    by_settings = _by_key(timed, lambda group: required(group.settings))
    by_work = _by_key(timed, _work)
    for group in timed:
        # Rows of equal `required` settings may still differ in one that only some of them have.
        candidates = by_settings[required(group.settings)]
        peers = [other for other in candidates if not unequal(group.settings, other.settings)]
        is_alone = peers == [group]
        if is_alone and allow_differences:
            peers = by_work[_work(group)]
        if len(peers) > 1:
            base = min(peers, key=lambda peer: base_order(peer.row))
            group.row = replace(group.row, comparison=_comparison(group, base))


def _is_timed(group: Group) -> bool:
    """Whether a run of a row ended well, and the row has a rate."""
    ended_well = any(run.status == "ok" for run in group.runs)
    return ended_well and bool(group.row.figures.samples_per_second)


def _comparison(group: Group, base: Group) -> Comparison:
    """How a row compares with its base, which may be itself."""
    row = group.row
    base_row = base.row
    speed_up = row.rate / base_row.rate
    interval = None
    if group is not base:
        interval = ratio_interval(row.samples_per_second_values, base_row.samples_per_second_values)
    processes = row.known_config.world_size
    processes_of_base = base_row.known_config.world_size
    return Comparison(
        base=base.letter,
        speed_up=speed_up,
        speed_up_interval=interval,
        scaling_efficiency=speed_up * processes_of_base / processes,
        differs_in=unequal(base.settings, group.settings),
    )


def base_order(row: Row) -> tuple[int, bool]:
    """Sort key of rows, the first of which is the base of the others: fewest processes, `none`
    before others."""
    config = row.known_config
    return config.world_size, config.technique != "none"


def _work(group: Group) -> str:
    """Key that is equal for rows whose samples are the same amount of work."""
    config = group.row.known_config
    work: Settings = {"model_id": config.model_id, "task": config.task}
    for flag in LENGTHS:
        work[flag] = config.identity.get(flag)
    return as_key(work)
