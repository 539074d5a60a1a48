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
    one.

    `row` is replaced once, when `group_runs` knows what the row is compared with.
    """

    def __init__(self, number: int, letter: str, runs: Sequence[Entry]) -> None:
        """Sum up the repeats that were measured as one row.

        The row's name is the run's; for repeats, the part of the path that they share, or the name
        of the first one.

        Args:
            number: index of the row among all rows, from 0.
            letter: name of the row in tables and plots: `A`, `B` and so on.
            runs: one or more.
        """
        self.number = number
        self.letter = letter
        self.runs = runs
        self.first = runs[0]
        # Figures come from the runs that ended well; where none did, from those that left a record.
        self.measured = [run for run in runs if run.status == "ok"]
        if not self.measured:
            self.measured = [run for run in runs if run.record is not None]
        # A repeat that failed may lack settings that only a run measures, such as number formats.
        first_measured = self.measured[0] if self.measured else self.first
        self.settings = settings(first_measured.config)
        """What must be equal for another row to be compared with it."""
        # The first item is over all tables; there always is one.
        accuracy = next(accuracy_lines(self.measured))

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
            accuracy=accuracy,
        )

    def to_json(self) -> dict[str, object]:
        """The row's raw values by key; `settings` and `arrangement` are there so that another
        summary can find the same row."""
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
                # All values are None. The keys of such a run come in the order of a row's.
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
    """The folders with which the names of all runs begin; of one run the whole name, and empty
    where the names begin differently."""
    shared = []
    paths = [run.name.split("/") for run in runs]
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def _status_text(runs: Sequence[Entry]) -> str:
    """The status that all runs share, or the number of runs with each status: `2 ok, 1 oom`."""
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
    """The rows of a summary, with their figures and comparisons.

    Rows of equal settings stand together: the block with the most runs first, profiled ones last.
    Within a block rows go by processes, pods and technique. A run without a record is a row of
    its own. So is a copy, a second record with the id of another one: its figures were measured
    only once.

    Args:
        price_per_hour: price of a pod in any currency; without one no row has a cost.
        allow_differences: where no other row is comparable, compare with any of the same model,
            task and row length, and say what differs. Where one of these differs, so does the work
            per sample, and rows are never compared.
    """
    peaks = best_peaks(entries)
    copied = copies(entries)

    def key_of(run: Entry) -> str:
        if run.record is None or run.name in copied:
            return run.name
        return _row_key(run)

    with_figures = [_with_figures(entry, peaks, price_per_hour) for entry in entries]
    rows = []
    for runs in _by_key(with_figures, key_of).values():
        rows.extend(_by_measured_precision(runs))

    blocks = _by_key(rows, lambda runs: required(settings(runs[0].config)))
    ordered = []
    for block in sorted(blocks.values(), key=_block_order):
        ordered.extend(sorted(block, key=_row_order))
    groups = []
    # Not strict: the letters never end.
    for number, (letter, runs) in enumerate(zip(letters(), ordered, strict=False)):
        groups.append(Group(number, letter, runs))
    _compare_with_bases(groups, allow_differences)
    return groups


def _row_key(run: Entry) -> str:
    """A key that is equal for runs that may be repeats.

    It leaves out the number formats that ran, which not every repeat has measured;
    `_by_measured_precision` compares them.
    """
    requested = {}
    for name, value in settings(run.config).items():
        if not name.startswith(PRECISION_PREFIX):
            requested[name] = value
    return as_key(requested, arrangement(run.config))


def _with_figures(
    entry: Entry, peaks: Mapping[str, tuple[float, str]], price_per_hour: float | None
) -> Entry:
    """The run with its figures and its accuracy over all tables.

    Args:
        peaks: the best FLOP/s and who measured it, as `best_peaks` returns them.
    """
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
    """Runs of equal settings, divided by the number formats that they ran in.

    A run that failed before it measured its formats counts as a repeat of the first that did
    measure them. A run that ended well without formats had no step left to do in its last attempt:
    it counts as a repeat where all others agree, since its settings are theirs; where they do not,
    nobody knows whose repeat it is, and it stays apart.
    """
    formats_of_runs = [measured_settings(run.config) for run in runs]
    known_formats = [formats for formats in formats_of_runs if formats]
    all_agree = len({as_key(formats) for formats in known_formats}) == 1

    def key_of(run: Entry) -> str:
        formats = measured_settings(run.config)
        may_join = all_agree or run.status != "ok"
        if not formats and known_formats and may_join:
            formats = known_formats[0]
        return as_key(formats)

    return list(_by_key(runs, key_of).values())


def _by_key(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    """The items of each key, in the order in which keys and items are met."""
    grouped: dict[str, list[Item]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def best_peaks(entries: Iterable[Entry]) -> dict[str, tuple[float, str]]:
    """The FLOP/s of the best matrix multiplication that any run measured, and the name of the run
    that measured it, by `matmul_key`: hardware and precision.

    All runs of a key are compared with the best one: a slower one is taken to have shared its
    hardware with something else.
    """
    best: dict[str, tuple[float, str]] = {}
    for entry in entries:
        record = entry.record
        if record is None or record.matmul_flops_per_second is None:
            continue
        key = matmul_key(record)
        if key not in best or record.matmul_flops_per_second > best[key][0]:
            best[key] = (record.matmul_flops_per_second, entry.name)
    return best


# Remarks about runs. A remark that holds for several runs is made once, with their names.

NAMED_RUNS = 3
"""Number of runs that a line about several of them names; the rest are counted."""


def remark_lines(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each text, with the names of the runs that it is about.

    Args:
        remarks: pairs of the name of a run and a text about it.
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
    """The names of runs; of many, the first ones and how many more: `a, b, c and 4 more`."""
    shown = shortened(names, NAMED_RUNS)
    if len(shown) == len(names):
        return ", ".join(names)
    *first_names, rest = shown
    return f"{', '.join(first_names)} and {rest}"


def disturbed_peaks(entries: Sequence[Entry]) -> Iterator[str]:
    """A line for each kind of hardware and precision, about all runs whose own matrix
    multiplications were far slower than the best there; none where no run was that slow."""
    best = best_peaks(entries)
    # By hardware and precision: the names of slow runs, each with its share of the best rate.
    slow_runs: dict[str, list[tuple[str, float]]] = {}
    for entry in entries:
        record = entry.record
        if record is None or record.matmul_flops_per_second is None:
            continue
        key = matmul_key(record)
        best_rate, _ = best[key]
        share = record.matmul_flops_per_second / best_rate
        if share < DISTURBED:
            slow_runs.setdefault(key, []).append((entry.name, share))
    for key, runs in slow_runs.items():
        yield _disturbed_text(runs, best[key])


def _disturbed_text(runs: Sequence[tuple[str, float]], best: tuple[float, str]) -> str:
    """The line about slow runs on the same hardware.

    Args:
        runs: names of the runs, each with its share of the best peak.
        best: the best peak in FLOP/s, and the name of the run that measured it.
    """
    names = _named([name for name, _ in runs])
    shares = [share for _, share in runs]
    if len(runs) == 1:
        their = "its"
        peaks = f"its own matmul peak is {shares[0]:.0%}"
    else:
        their = "their"
        peaks = f"their own matmul peaks are {min(shares):.0%} to {max(shares):.0%}"
    best_rate, best_run = best
    return (
        f"{names}: {peaks} of the {best_rate / 1e9:,.1f} GFLOP/s of {best_run}, on which {their} "
        f"MFU is based: something else was running, and {their} times may be too long as well"
    )


def unlike_formats(entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    """The name of each run that computed in another precision than it was asked for, or whose ranks
    differ in a number format, with a text that says so."""
    for entry in entries:
        record = entry.record
        if record is None or record.measured_precision is None:
            continue
        unlike = _unlike_parts(record, record.measured_precision)
        output_format = record.measured_precision.linear_output
        if unlike:
            yield entry.name, f"its ranks computed in different precisions: {', '.join(unlike)}"
        elif output_format is not None and output_format != record.precision:
            requested = f"was asked for {record.precision}"
            yield entry.name, f"{requested}, but its linear layers returned {output_format}"


def _unlike_parts(record: Record, of_all_ranks: MeasuredPrecision) -> list[str]:
    """Each kind of tensors whose number format differs between ranks, with the formats: `gradients
    sent bf16 on rank 0; fp32 on rank 1`.

    Args:
        of_all_ranks: the record's own formats, whose texts name the ranks where these differ.
    """
    precisions = []
    for rank in record.ranks:
        if rank.measured_precision is not None:
            precisions.append(rank.measured_precision)
    unlike = []
    for part in PRECISION_PARTS:
        # A rank that has not measured a format does not differ in it.
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
    """One line about all runs that are copies of other ones, with the id where it is one copy
    only; no line without copies."""
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
    """The letters A, B ... Z, AA, AB and so on, without end."""
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
    Settings that divide the rows in the same way share a line:
    `rows / rows: what: value / value; what: value / value`.

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
    """The lines of `differences` about rows of one task."""
    # The settings of all rows, in the order in which they are first met.
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.settings)
    # A setting divides the rows into parts, one for each of its values. By the row names of each
    # part: the settings that divide the rows in this way, each with the rows of its values.
    by_parts: dict[tuple[str, ...], dict[str, dict[str, list[Group]]]] = {}
    for name in names:
        with_setting = [row for row in rows if is_of(name, row.settings)]
        rows_by_value = _by_key(with_setting, partial(_setting_text, name))
        if len(rows_by_value) > 1:
            parts = tuple(row_names(part) for part in rows_by_value.values())
            by_parts.setdefault(parts, {})[name] = rows_by_value

    lines = []
    for parts, rows_by_setting in by_parts.items():
        if len(rows_by_setting) == 1:
            ((name, rows_by_value),) = rows_by_setting.items()
            lines.append(f"{name}: {_listed(rows_by_value)}")
        else:
            texts = []
            for name, rows_by_value in rows_by_setting.items():
                values = list(rows_by_value)
                texts.append(f"{name}: {_side_by_side(values)}")
            lines.append(f"{_side_by_side(parts)}: {'; '.join(texts)}")
    return lines


def _task(group: Group) -> str:
    """The task of a row whose settings are known."""
    return group.row.known_config.task


def _setting_text(name: str, row: Group) -> str:
    """The value that a row has for a setting, cut off where it is long.

    A row without the setting has `not recorded`, or for a key of DeepSpeed `by default`.
    """
    if name in row.settings:
        value = row.settings[name]
    else:
        value = BY_DEFAULT if name.startswith(DEEPSPEED_PREFIX) else NOT_RECORDED
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > LONGEST_VALUE:
        return f"{text[: LONGEST_VALUE - 1]}…"
    return text


def row_names(rows: Iterable[Group]) -> str:
    """The plain labels of rows as text, such as `A none x1, C ddp x2 to F zero3 x2`.

    Three or more that follow each other in the summary are given by the first and the last.
    """
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


def _side_by_side(texts: Sequence[str]) -> str:
    """The first of some texts side by side, and how many more there are."""
    return " / ".join(_first_texts(texts))


def _first_texts(texts: Sequence[str]) -> list[str]:
    """The first `SHOWN_VALUES` of some texts; the last item says how many more there are: `and 3
    more`."""
    shown = shortened(texts, SHOWN_VALUES)
    if len(shown) < len(texts):
        shown[-1] = f"and {shown[-1]}"
    return shown


# How much faster a row is than the one with the fewest processes, among rows that may be compared.

LENGTHS = ("max_seq_length", "loss_on")
"""Flags of a causal run that decide what a sample is."""


def compared_rows(groups: Sequence[Group]) -> set[str]:
    """Letters of the rows that a summary is about: for each model and task, one set of rows that
    are compared with each other.

    Where there are several sets, the one with the most runs is taken, and a profiled one only if
    there is no other. Rows of the same settings that were not timed, such as one that ran out of
    memory, belong to the set.
    """
    bases_of_models: dict[tuple[str, str], str] = {}
    for rows in sorted(_compared_sets(groups), key=_set_order):
        config = rows[0].row.known_config
        # The sets are in order of preference: the first one of a model stays.
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
    """Sets of rows that have the same base and differ from it only in technique and pods; each has
    at least two rows, the base among them."""
    comparable = []
    for group in groups:
        comparison = group.row.comparison
        if comparison.base is not None and not comparison.differs_in:
            comparable.append(group)
    sets = _by_key(comparable, _base)
    return [rows for rows in sets.values() if len(rows) > 1]


def _base(group: Group) -> str:
    """Letter of the base of a row that has one."""
    base = group.row.comparison.base
    # `_compared_sets` takes only rows that have a base.
    assert base is not None
    return base


def _set_order(rows: Sequence[Group]) -> tuple[bool, int]:
    """Sort key of sets of rows: not profiled first, then those with the most runs."""
    number_of_runs = sum(len(group.measured) for group in rows)
    return is_profiled(rows[0].first.config), -number_of_runs


def _compare_with_bases(groups: Sequence[Group], allow_differences: bool) -> None:
    """Replace the row of each timed group that has a comparable one by a row with its comparison;
    leave the others.

    The base is the comparable row with the fewest processes, `none` before other techniques: it may
    be the row itself.

    Args:
        allow_differences: a row without a comparable one is compared with those of the same work.
    """
    timed = [group for group in groups if _is_timed(group)]
    by_settings = _by_key(timed, lambda group: required(group.settings))
    by_work = _by_key(timed, _work)
    for group in timed:
        # Rows of equal `required` settings may still differ in one that only some of them have.
        candidates = by_settings[required(group.settings)]
        # The row itself is one of them.
        comparable = [other for other in candidates if not unequal(group.settings, other.settings)]
        if len(comparable) == 1 and allow_differences:
            comparable = by_work[_work(group)]
        if len(comparable) > 1:
            base = min(comparable, key=lambda other: base_order(other.row))
            group.row = replace(group.row, comparison=_comparison(group, base))


def _is_timed(group: Group) -> bool:
    """Whether a run of a row ended well, and the row has a rate."""
    ended_well = any(run.status == "ok" for run in group.runs)
    return ended_well and bool(group.row.figures.samples_per_second)


def _comparison(group: Group, base: Group) -> Comparison:
    """How a timed row compares with its base, which may be itself; then the speed-up is 1, without
    an interval."""
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
    """Sort key of rows with a configuration, the first of which is the base of the others: fewest
    processes, `none` before other techniques."""
    config = row.known_config
    return config.world_size, config.technique != "none"


def _work(group: Group) -> str:
    """Key that is equal for rows whose samples are the same amount of work."""
    config = group.row.known_config
    work: Settings = {"model_id": config.model_id, "task": config.task}
    for flag in LENGTHS:
        work[flag] = config.identity.get(flag)
    return as_key(work)
