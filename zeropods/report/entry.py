"""Run folders as a summary sees them: record, score and accuracy, earlier attempts, samples, or why
there are none."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.files import no_folder
from zeropods.measure.record import (
    CONFIG,
    LAUNCH_LOCK,
    LOCK,
    RECORD,
    Record,
    RunConfig,
    read_config,
    read_record,
    reason_with_pod,
)
from zeropods.measure.score_json import (
    AnswerScore,
    Interval,
    QueryScore,
    Score,
    TextScore,
    score_of,
)
from zeropods.programs import is_held
from zeropods.report.row import Accuracy, Figures
from zeropods.tables import counted
from zeropods.tasks import TASKS, LearningTask, Measure

if TYPE_CHECKING:
    from pandas import DataFrame

FILES_OF_RUN = {LOCK, RECORD}
"""Files of which a run folder, and no other, has at least one."""
MEMORY_COLUMNS = {
    "device_used_bytes": "GiB device-used",
    "allocated_bytes": "GiB allocated",
    "resident_bytes": "GiB resident",
}
USE_COLUMNS = {"utilization_percent": "GPU (%)", "cpu_percent": "CPU (% of cores)"}
"""Labels of the columns of `memory/N.csv`; of memory and of use, the first column that has samples
is drawn."""
DRAWN_SAMPLES = 2_000
"""Maximum number of samples that are kept per rank, more than a plot can show separately."""
SLACK_SECONDS = 1.0
"""Tolerance between the clock by which a run is timed and the clock of its samples."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run of a summary."""

    name: str
    """A name that no other run of the summary has, as `find_runs` gives it."""
    folder: Path
    status: str
    """The record's status; without a record `running`, `killed` or `broken`."""
    reason: str | None = None
    """The reason for the status, or what could not be read, in one line; None where there is
    nothing to say."""
    config: RunConfig | None = None
    """The record, or the configuration where there is no record yet; None where that is missing or
    damaged."""
    earlier: tuple[Record, ...] = ()
    """The records of earlier attempts, as far as they can be read."""
    split: str | None = None
    """The split of the data that was scored; None where nothing was, as with `score`."""
    score: Score | None = None
    figures: Figures = field(default_factory=Figures)
    """What follows from the records; only a summary fills it."""
    accuracy: Accuracy = field(default_factory=Accuracy)
    """What follows from the score; only a summary fills it."""

    @property
    def record(self) -> Record | None:
        """The record, or None where the run has none that can be read."""
        return self.config if isinstance(self.config, Record) else None


def read_entry(folder: Path, name: str) -> Entry:
    """Read a run folder. Nothing is raised for a damaged file: the status or the reason tells."""
    entry = Entry(name=name, folder=folder, status="broken")
    try:
        has_record = (folder / RECORD).is_file()
        entry = _with_record(entry) if has_record else _without_record(entry)
        scored = score_of(folder)
        if scored is not None:
            split, score = scored
            entry = replace(entry, split=split, score=score)
    except (UserError, OSError) as error:
        # What was read before stays: a run with a damaged score keeps its record and its status.
        return replace(entry, reason=one_line(error, folder))
    return entry


def _with_record(entry: Entry) -> Entry:
    """The run with its record and those of its earlier attempts, as far as they can be read.

    Raises:
        UserError: the record is damaged.
        OSError: the record cannot be read.
    """
    record = read_record(entry.folder)
    reason = None
    if record.reason:
        reason = one_line(reason_with_pod(record), entry.folder)
    earlier = []
    for attempt in range(record.attempt):
        # Earlier records serve two figures only, which are unknown where one is missing.
        with suppress(UserError, OSError):
            earlier.append(read_record(entry.folder, attempt))
    return replace(
        entry, status=record.status, reason=reason, config=record, earlier=tuple(earlier)
    )


def _without_record(entry: Entry) -> Entry:
    """The run with its configuration, if there is one, and with the status `running` while a
    process holds one of its locks, else `killed`."""
    config = None
    if (entry.folder / CONFIG).is_file():
        config = read_config(entry.folder)
    if is_held(entry.folder / LOCK) or is_held(entry.folder / LAUNCH_LOCK):
        status = "running"
        reason = "no record yet"
    else:
        status = "killed"
        reason = "ended without a record; the same command resumes it"
    return replace(entry, status=status, reason=reason, config=config)


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name, in the order of `folders`, each of which is a run or has runs below it.

    A run's name is its path below the given folder, or that folder's own name; where two runs have
    the same name, they are named by their whole paths. A run that is found twice counts once. A
    folder is a run folder if it has a lock, which is made when a run begins, or a record.

    Raises:
        UserError: one of `folders` does not exist, or there is no run in any of them.
    """
    # By whole paths without links.
    names_by_run: dict[str, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(
                f"{folder}: {no_folder(folder)}; name run folders, or a folder that contains some"
            )
        top = os.path.realpath(folder)
        for run in _runs_below(top):
            name = os.path.basename(top) if run == top else os.path.relpath(run, top)
            names_by_run.setdefault(os.path.realpath(run), name)
    if not names_by_run:
        searched = ", ".join(map(str, folders))
        raise UserError(f"{searched}: no runs found; create one with textsql_train.py --outputdir")
    counts = Counter(names_by_run.values())
    runs = {}
    for run, name in names_by_run.items():
        unique_name = name if counts[name] == 1 else run
        runs[unique_name] = Path(run)
    return runs


def _runs_below(top: str) -> Iterator[str]:
    """The paths of the run folders at or below a folder, and of links to run folders, in the order
    of their names."""
    for folder, children, files in os.walk(top):
        # `os.walk` goes on in `children`: sorted in place they are visited in order, and cleared
        # they are not visited.
        children.sort()
        # It follows no links. Those that lead to a run are run folders themselves; others may lead
        # anywhere, even in a circle.
        links_to_runs = []
        for child in children:
            path = os.path.join(folder, child)
            if os.path.islink(path) and _is_run(path):
                links_to_runs.append(path)
        is_run = any(name in files for name in FILES_OF_RUN)
        if is_run:
            children.clear()
            yield folder
        yield from links_to_runs


def _is_run(folder: str) -> bool:
    """Whether a folder, or the one that a link leads to, is a run folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in FILES_OF_RUN)


@dataclass(frozen=True)
class Timeline:
    """The samples of the last attempt of one run."""

    label: str
    """The name of the run in plots."""
    ranks: dict[int, DataFrame]
    """Samples by rank, at least one each: `unix_seconds`, `phase` and columns of numbers, NaN where
    there is none."""
    faults: tuple[str, ...]
    """What could not be read, one line each."""

    def column(self, columns: Iterable[str]) -> str:
        """The first of these columns that has a sample above 0; an empty string where none has."""
        return next((name for name in columns if self.peak(name) > 0), "")

    def peak(self, column: str) -> float:
        """The highest sample of a column over all ranks; 0 where there is none."""
        peaks = []
        for samples in self.ranks.values():
            if column in samples:
                peaks.append(samples[column].max())
        return max(peaks, default=0.0)


def read_timeline(entry: Entry, label: str) -> Timeline:
    """The samples of a run's ranks in its last attempt, from `memory/N.csv`, which has those of all
    attempts; damage is listed in `faults`, not raised.

    Args:
        label: the name of the run in plots.
    """
    ranks = {}
    faults = []
    recorded_ranks = entry.record.ranks if entry.record else ()
    # A rank that did not reach its end has not recorded when it began: all its samples count.
    began_unix_seconds = {rank.rank: rank.began_unix_seconds or 0.0 for rank in recorded_ranks}
    paths = {}
    for path in (entry.folder / "memory").glob("*.csv"):
        if path.stem.isdigit():
            paths[int(path.stem)] = path
    for rank, path in sorted(paths.items()):
        try:
            samples = _read_samples(path)
        except (ValueError, OSError) as error:
            faults.append(one_line(f"{path}: damaged: {error}; run it again", entry.folder))
            continue
        valid = samples.dropna(subset=["unix_seconds", "phase"])
        left_out = len(samples) - len(valid)
        if left_out:
            lines = counted(left_out, "line")
            fault = f"{path}: left out {lines} without a valid sample"
            faults.append(one_line(fault, entry.folder))
        earliest = began_unix_seconds.get(rank, 0.0) - SLACK_SECONDS
        samples_of_attempt = valid[valid["unix_seconds"] >= earliest]
        if len(samples_of_attempt):
            ranks[rank] = _thinned(samples_of_attempt)
    return Timeline(label, ranks, tuple(faults))


def _thinned(samples: DataFrame) -> DataFrame:
    """The samples, merged to `DRAWN_SAMPLES` where there are more.

    They are cut into that many stretches of about equal length. Each becomes one sample: the
    highest memory and the mean use, with the time and the phase of the stretch's first sample.
    """
    if len(samples) <= DRAWN_SAMPLES:
        return samples
    import numpy as np

    rules = {}
    for name in samples:
        if name in ("unix_seconds", "phase"):
            rules[name] = "first"
        elif name in MEMORY_COLUMNS:
            rules[name] = "max"
        else:
            rules[name] = "mean"
    # The number of the stretch that each sample belongs to.
    stretches = np.arange(len(samples)) * DRAWN_SAMPLES // len(samples)
    return samples.groupby(stretches).agg(rules)


def _read_samples(path: Path) -> DataFrame:
    """The samples of a file, of all attempts; NaN where a value is missing or damaged.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a table, or lacks a column that is needed.
    """
    import pandas as pd

    content = path.read_bytes()
    # After the last line end there is nothing, or a line that was cut short when the run was
    # killed.
    whole_lines = content[: content.rfind(b"\n") + 1]
    needed = {"unix_seconds", "phase", *MEMORY_COLUMNS}
    known = {*needed, *USE_COLUMNS}
    read = partial(
        pd.read_csv,
        # The header is of the first attempt. A later attempt, of a later version, may have appended
        # lines with more columns: only those that the header names are taken.
        usecols=lambda name: name in known,
        # Damage stays within its line: a line with too many fields does not shift the columns, and
        # a quote that is not closed does not swallow the next line.
        index_col=False,
        quoting=csv.QUOTE_NONE,
    )
    try:
        types = defaultdict(lambda: "float64", phase="str")
        samples = read(io.BytesIO(whole_lines), dtype=types)
    except ValueError:
        # A full disk or a loss of power may have spoilt a line. The file is read once more as text,
        # in which anything that is not a number counts as missing.
        samples = read(io.BytesIO(whole_lines), dtype="str")
        for name in set(samples) - {"phase"}:
            samples[name] = pd.to_numeric(samples[name], errors="coerce")
    missing = needed - {*samples}
    if missing:
        raise ValueError(f"no column {min(missing)}")
    return samples


def one_line(what: object, folder: Path) -> str:
    """The text of an error or a reason without line breaks and without the path of the run folder;
    characters that could control a terminal are replaced."""
    words = str(what).replace(f"{folder}/", "").split()
    characters = []
    for character in " ".join(words):
        characters.append(character if character.isprintable() else "\ufffd")
    return "".join(characters)


# How good the models of runs are: the figures of their scores, and their means over repeats.

ROUGE = ("rouge1", "rouge2", "rougeL")
"""ROUGE measures that a summary shows, where a score has them. A query is one line, so rougeLsum
equals rougeL."""


def accuracy_lines(entries: Sequence[Entry]) -> Iterator[Accuracy]:
    """The accuracy of a run or of repeats: first over all tables, then once more for each group of
    tables that all the scores have: `known`, `unseen`. Where nothing was scored, there is one empty
    `Accuracy`.

    For repeats, each figure is the mean of theirs. The ends of its interval are the means of the
    repeats' ends: the interval comes from the choice of questions, which is the same in each
    repeat. Repeats that differ from the first one in task, split or number of examples, or in
    whether their answers were linked to the rows of the tables, are left out.
    """
    scored = [(entry.split, entry.score) for entry in entries if entry.score is not None]
    if not scored:
        return iter([Accuracy()])
    first_split, first_score = scored[0]
    first_extent = _extent(first_split, first_score)
    comparable = [score for split, score in scored if _extent(split, score) == first_extent]
    return score_lines(first_split, comparable)


def _split_text(split: str | None, scores: Sequence[Score]) -> str | None:
    """The split, and whether its answers were linked to the rows of the tables."""
    is_linked = any(isinstance(score, QueryScore) and score.linked for score in scores)
    return f"{split}, linked" if is_linked else split


def _extent(split: str | None, score: Score) -> tuple[str | None, str, int | None]:
    """What must be equal for scores of repeats: split, whether its answers were linked, task, and
    number of examples or tokens."""
    number = None
    if isinstance(score, TextScore):
        number = score.tokens
    elif isinstance(score, AnswerScore):
        number = score.examples
    return _split_text(split, [score]), score.task, number


def score_lines(split: str | None, scores: Sequence[Score]) -> Iterator[Accuracy]:
    """Accuracy by scores of one task and split, over all tables, then for each group of tables that
    all scores have."""
    yield _mean_accuracy(split, "all", scores)
    groups_of_scores = [_groups(score) for score in scores]
    for group in groups_of_scores[0]:
        if all(group in groups for groups in groups_of_scores):
            scores_of_group = [groups[group] for groups in groups_of_scores]
            yield _mean_accuracy(split, group.removesuffix("_tables"), scores_of_group)


def _groups(score: Score) -> Mapping[str, QueryScore]:
    """The scores by groups of tables; none for a task without tables."""
    if isinstance(score, QueryScore) and score.groups is not None:
        return score.groups
    return {}


def _mean_accuracy(split: str | None, tables: str, scores: Sequence[Score]) -> Accuracy:
    """Accuracy as means over scores of the same task and tables."""
    task = TASKS[scores[0].task]
    of_scores = [_accuracy(score, task) for score in scores]
    values = _mean_values(task, [of_score.values for of_score in of_scores])
    return Accuracy(
        split=_split_text(split, scores),
        tables=tables if task.has_tables else None,
        values=values,
        intervals=_mean_intervals([of_score.intervals for of_score in of_scores]),
        rouge=_means([of_score.rouge for of_score in of_scores]),
        custom_metrics=_means([of_score.custom_metrics for of_score in of_scores]),
        custom_intervals=_mean_intervals([of_score.custom_intervals for of_score in of_scores]),
        judged_by=_judging_measure(task, values),
    )


def _accuracy(score: Score, task: LearningTask) -> Accuracy:
    """The figures of one score, and the intervals of its measures, under the keys of a summary."""
    # Which of these three fields a score has depends on its type.
    fields_of_score = vars(score)
    intervals: Mapping[str, Interval | None] = fields_of_score.get("intervals") or {}
    rouge: Mapping[str, float] = fields_of_score.get("rouge") or {}
    custom_metrics: Mapping[str, float] = fields_of_score.get("own_metrics") or {}
    return Accuracy(
        values={figure.key: getattr(score, figure.field) for figure in task.figures},
        intervals={measure.key: _ends(intervals, measure.field) for measure in task.measures},
        rouge={name: rouge[name] for name in ROUGE if name in rouge},
        custom_metrics=custom_metrics,
        custom_intervals={name: _ends(intervals, name) for name in custom_metrics},
    )


def _ends(intervals: Mapping[str, Interval | None], name: str) -> list[float] | None:
    """The ends of the 95 % interval of a measure; None where it has none."""
    interval = intervals.get(name)
    return None if interval is None else list(interval)


def _mean_values(
    task: LearningTask, of_scores: Sequence[Mapping[str, float | None]]
) -> dict[str, float | None]:
    """The mean of each figure of a task over scores; None where one of them has none. A perplexity
    is the exponential of the mean loss."""
    means = {}
    for figure in task.figures:
        means[figure.key] = _mean([values[figure.key] for values in of_scores])
    for figure in task.figures:
        if figure.exponential_of is not None:
            # The mean of the perplexities would not belong to the mean loss beside it.
            exponent = means[figure.exponential_of]
            means[figure.key] = None if exponent is None else math.exp(exponent)
    return means


def _judging_measure(task: LearningTask, values: Mapping[str, float | None]) -> Measure | None:
    """The measure by which the model of a run is judged: the first of the task's `judged_by` that
    was measured; the last of them where none was, and None where the task has none."""
    for measure in task.judged_by:
        if values[measure.key] is not None:
            return measure
    return task.judged_by[-1] if task.judged_by else None


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of values that are all known; else None."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _means(of_scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure that all scores have."""
    means = {}
    for name in of_scores[0]:
        if all(name in measures for measures in of_scores):
            means[name] = mean(measures[name] for measures in of_scores)
    return means


def _mean_intervals(
    of_scores: Sequence[Mapping[str, list[float] | None]],
) -> dict[str, list[float] | None]:
    """The interval of each measure that all scores have: the means of their lower and of their
    upper ends; None where one of the scores has no interval."""
    means: dict[str, list[float] | None] = {}
    for name in of_scores[0]:
        if not all(name in intervals for intervals in of_scores):
            continue
        ends_of_scores = [intervals[name] for intervals in of_scores]
        lows = [ends[0] for ends in ends_of_scores if ends is not None]
        highs = [ends[1] for ends in ends_of_scores if ends is not None]
        all_have_one = len(lows) == len(ends_of_scores)
        means[name] = [mean(lows), mean(highs)] if all_have_one else None
    return means
