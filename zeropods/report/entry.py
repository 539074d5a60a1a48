"""Run folders as a summary sees them: record, score and accuracy, earlier attempts, samples, or why
there are none."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.evaluate.score_json import Score, score_of
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
from zeropods.programs import is_held
from zeropods.report.formulas import Values
from zeropods.tables import counted
from zeropods.tasks import TASKS

if TYPE_CHECKING:
    from pandas import DataFrame

SIGNS = {LOCK, RECORD}
"""Files that mark a run folder, which has at least one of them."""
MEMORY_COLUMNS = {
    "device_used_bytes": "GiB device-used",
    "allocated_bytes": "GiB allocated",
    "resident_bytes": "GiB resident",
}
USE_COLUMNS = {"utilization_percent": "GPU (%)", "cpu_percent": "CPU (% of cores)"}
"""Labels of the columns of `memory/N.csv`; of each kind, the first column that has samples is
drawn."""
DRAWN = 2_000
"""Number of samples that are kept per rank, more than a plot can show separately."""
SLACK_SECONDS = 1.0
"""Tolerance between the clock by which a run is timed and the clock of its samples."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run of a summary."""

    name: str
    folder: Path
    status: str
    """The record's status; without a record `running`, `killed` or `broken`."""
    reason: str | None = None
    """The reason for the status, in one line."""
    config: RunConfig | None = None
    """The record, or the configuration where there is no record yet; None where that is missing or
    damaged."""
    earlier: tuple[Record, ...] = ()
    """The records of earlier attempts, as far as they can be read."""
    split: str | None = None
    score: Score | None = None
    values: Values = field(default_factory=dict)
    """Every raw value by name; only a summary fills it."""

    @property
    def record(self) -> Record | None:
        """The record, or None where the run has none that can be read."""
        return self.config if isinstance(self.config, Record) else None


def read_entry(folder: Path, name: str) -> Entry:
    """Read a run folder; what is wrong with it becomes a status and a reason."""
    entry = Entry(name=name, folder=folder, status="broken")
    try:
        has_record = (folder / RECORD).is_file()
        entry = _with_record(entry) if has_record else _without_record(entry)
        scored = score_of(folder)
        if scored is not None:
            split, score = scored
            entry = replace(entry, split=split, score=score)
    except (UserError, OSError) as error:
        # What was read before stays.
        return replace(entry, reason=one_line(error, folder))
    return entry


def _with_record(entry: Entry) -> Entry:
    """The run with its record and those of its earlier attempts, as far as they can be read."""
    record = read_record(entry.folder)
    reason = None
    if record.reason:
        reason = one_line(reason_with_pod(record), entry.folder)
    earlier = []
    for number in range(record.attempt):
        with suppress(UserError, OSError):
            earlier.append(read_record(entry.folder, number))
    return replace(
        entry, status=record.status, reason=reason, config=record, earlier=tuple(earlier)
    )


def _without_record(entry: Entry) -> Entry:
    """The run with its configuration, if there is one, and whether it is running."""
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
    the same name, they are named by their whole paths. A folder is a run folder if a writer opened
    it, or if it has a record.
    """
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
    """The run folders at or below a folder, and the links to some, sorted by name."""
    for place, children, files in os.walk(top):
        children.sort()
        # A link is followed where it leads to a run, and nowhere else.
        links = []
        for child in children:
            path = os.path.join(place, child)
            if os.path.islink(path) and _is_run(path):
                links.append(path)
        if not SIGNS.isdisjoint(files):
            # Nothing inside a run is searched, except such links.
            children.clear()
            yield place
        yield from links


def _is_run(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in SIGNS)


@dataclass(frozen=True)
class Timeline:
    """The samples of the last attempt of one run."""

    label: str
    ranks: dict[int, DataFrame]
    """Samples by rank, at least one each: `unix_seconds`, `phase` and columns of numbers, NaN where
    there is none."""
    faults: tuple[str, ...]
    """What could not be read, one line each."""

    def column(self, columns: Iterable[str]) -> str:
        """The first of these columns that has samples; an empty string where none has."""
        return next((name for name in columns if self.peak(name) > 0), "")

    def peak(self, column: str) -> float:
        """The highest sample of all ranks; 0 where there is none."""
        peaks = []
        for samples in self.ranks.values():
            if column in samples:
                peaks.append(samples[column].max())
        return max(peaks, default=0.0)


def read_timeline(entry: Entry, label: str) -> Timeline:
    """The samples of a run's ranks; damage is listed in `faults`, not raised."""
    ranks = {}
    faults = []
    measured = entry.record.ranks if entry.record else ()
    # A rank that did not reach its end has not recorded when it began: all its samples count.
    began = {rank.rank: rank.began_unix_seconds or 0.0 for rank in measured}
    paths = {}
    for path in (entry.folder / "memory").glob("*.csv"):
        if path.stem.isdigit():
            paths[int(path.stem)] = path
    for number, path in sorted(paths.items()):
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
        begin = began.get(number, 0.0) - SLACK_SECONDS
        of_last_attempt = valid[valid["unix_seconds"] >= begin]
        if len(of_last_attempt):
            ranks[number] = _thinned(of_last_attempt)
    return Timeline(label, ranks, tuple(faults))


def _thinned(samples: DataFrame) -> DataFrame:
    """At most `DRAWN` samples, one for each stretch: the highest value of memory, and the mean of
    use."""
    if len(samples) <= DRAWN:
        return samples
    import numpy as np

    rules = {}
    for name in samples:
        if name in ("unix_seconds", "phase"):
            rules[name] = "first"
        else:
            rules[name] = "max" if name in MEMORY_COLUMNS else "mean"
    stretches = np.arange(len(samples)) * DRAWN // len(samples)
    return samples.groupby(stretches).agg(rules)


def _read_samples(path: Path) -> DataFrame:
    """The samples of a file; `ValueError` where it is not a table, or lacks columns that are
    needed."""
    import pandas as pd

    content = path.read_bytes()
    # After the last line end there is nothing, or a line that was cut short when the run was
    # killed.
    whole_lines = content[: content.rfind(b"\n") + 1]
    needed = {"unix_seconds", "phase", *MEMORY_COLUMNS}
    known = {*needed, *USE_COLUMNS}
    read = partial(
        pd.read_csv,
        # An attempt of a later version may have written more columns: only those that the header
        # names are taken.
        usecols=lambda name: name in known,
        index_col=False,
        quoting=csv.QUOTE_NONE,
    )
    try:
        types = defaultdict(lambda: "float64", phase="str")
        samples = read(io.BytesIO(whole_lines), dtype=types)
    except ValueError:
        # A full disk or a loss of power may have spoilt a line: anything that is not a number
        # counts as missing.
        samples = read(io.BytesIO(whole_lines), dtype="str")
        texts = samples.drop(columns="phase", errors="ignore")
        numbers = texts.apply(pd.to_numeric, errors="coerce")
        samples = samples.assign(**{str(name): column for name, column in numbers.items()})
    missing = needed - {*samples}
    if missing:
        raise ValueError(f"no column {min(missing)}")
    return samples


def one_line(what: object, folder: Path) -> str:
    """A reason without line breaks, characters that control a terminal, and the path of the run
    folder."""
    words = str(what).replace(f"{folder}/", "").split()
    letters = []
    for letter in " ".join(words):
        letters.append(letter if letter.isprintable() else "\ufffd")
    return "".join(letters)


# How good the models of runs are: the figures of their scores, by key, and their means over
# repeats.

SCORE_COUNTS = ("examples", "executable", "text_tokens")
ACCURACY_MEASURES = (
    "exact_match",
    "logical_form_accuracy",
    "execution_accuracy",
    "f1",
    "text_loss",
    "perplexity",
)
"""Measures that scores consist of, and that may have an interval; each task has some of them."""
IN_FILE = {"text_loss": "loss", "text_tokens": "tokens"}
"""Names in a score file by our own keys: the file's names would say too little next to the figures
of a run."""
ACCURACY_KEYS = (
    "split",
    "tables",
    *SCORE_COUNTS,
    *ACCURACY_MEASURES,
    "inference_kind",
    "inference_result",
)
CUSTOM_METRIC = "own_metrics."
"""Prefix of a custom metric's key."""
ROUGE = ("rouge1", "rouge2", "rougeL")
"""ROUGE measures that a summary shows, where a score has them. A query is one line, so rougeLsum
equals rougeL."""


def accuracy_lines(entries: Sequence[Entry]) -> Iterator[Values]:
    """Accuracy by key over all tables, then once more for each group of tables that all the scores
    have: `known`, `unseen`. Where nothing was scored, every key of `ACCURACY_KEYS` is None.

    For repeats, it is the mean of each share. The ends of its interval are the means of the
    repeats' ends: the interval comes from the choice of questions, which is the same in each
    repeat. Repeats with another task, split or number of examples than the first are left out.
    """
    extents = []
    scores = []
    for entry in entries:
        if entry.score is not None:
            extents.append(_extent(entry.split, entry.score))
            scores.append(entry.score)
    if not scores:
        return iter([dict.fromkeys(ACCURACY_KEYS)])
    alike = []
    for extent, score in zip(extents, scores, strict=True):
        if extent == extents[0]:
            alike.append(score)
    split, *_ = extents[0]
    return score_lines(split, alike)


def _extent(split: str | None, score: Score) -> tuple[str | None, str, int | None, int | None]:
    """What must be equal for scores of repeats: split, task, and number of examples or tokens."""
    examples = getattr(score, "examples", None)
    tokens = getattr(score, "tokens", None)
    return split, score.task, examples, tokens


def score_lines(split: str | None, scores: Sequence[Score]) -> Iterator[Values]:
    """Accuracy by key of scores of one task and split, over all tables, then for each group of
    them."""
    yield _line(split, "all", scores)
    groups_of_scores = [getattr(score, "groups", None) or {} for score in scores]
    for group in groups_of_scores[0]:
        if all(group in groups for groups in groups_of_scores):
            of_group = [groups[group] for groups in groups_of_scores]
            yield _line(split, group.removesuffix("_tables"), of_group)


def _line(split: str | None, tables: str, scores: Sequence[Score]) -> Values:
    """Accuracy by key, as means over scores of the same tables."""
    task = TASKS[scores[0].task]
    figures = [_figures(score) for score in scores]
    values: Values = {}
    for key in figures[0]:
        if not all(key in of_score for of_score in figures):
            continue
        repeats = [of_score[key] for of_score in figures]
        if None in repeats:
            values[key] = None
        elif isinstance(repeats[0], tuple):
            # For intervals, the means of their ends.
            values[key] = [mean(ends) for ends in zip(*repeats, strict=True)]
        else:
            values[key] = mean(repeats)
    if values["text_loss"] is not None:
        # Perplexities are powers: their mean would not match the mean loss.
        values["perplexity"] = math.exp(values["text_loss"])
    measured = [measure for measure in task.judged_by if values[measure[1]] is not None]
    kind, key = measured[0] if measured else task.judged_by[-1]
    return {
        "split": split,
        "tables": tables if "tables" in task.figures else None,
        **values,
        "inference_kind": kind,
        "inference_result": values[key],
        "inference_result_interval": values[f"{key}_interval"],
    }


def _figures(score: Score) -> Values:
    """The figures of one score, and the intervals of its measures."""
    values: Values = {}
    for key in (*SCORE_COUNTS, *ACCURACY_MEASURES):
        values[key] = getattr(score, IN_FILE.get(key, key), None)
    intervals = getattr(score, "intervals", {})
    for key in ACCURACY_MEASURES:
        if hasattr(score, IN_FILE.get(key, key)):
            values[f"{key}_interval"] = intervals.get(key)
    rouge = getattr(score, "rouge", None) or {}
    for name in ROUGE:
        if name in rouge:
            values[name] = rouge[name]
    custom_metrics = getattr(score, "own_metrics", {})
    for name, value in custom_metrics.items():
        values[f"{CUSTOM_METRIC}{name}"] = value
    for name in custom_metrics:
        values[f"{CUSTOM_METRIC}{name}_interval"] = intervals.get(name)
    return values
