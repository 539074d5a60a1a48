"""Run folders as a summary sees them: record, score and accuracy, earlier attempts, samples, or why there are none."""

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
from zeropods.evaluate.score_json import LM, SQUAD, TEXT2SQL, Score, score_of
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
"""Labels of the columns of `memory/N.csv`; of each kind, the first column that has samples is drawn."""
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
    """The record, or the configuration where there is no record yet; None where that is missing or damaged."""
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
        if (folder / RECORD).is_file():
            record = read_record(folder)
            reason = one_line(reason_with_pod(record), folder) if record.reason else None
            earlier = []
            for number in range(record.attempt):
                with suppress(UserError, OSError):
                    earlier.append(read_record(folder, number))
            entry = replace(entry, status=record.status, reason=reason, config=record, earlier=tuple(earlier))
        else:
            config = read_config(folder) if (folder / CONFIG).is_file() else None
            is_running = is_held(folder / LOCK) or is_held(folder / LAUNCH_LOCK)
            reason = "no record yet" if is_running else "ended without a record; the same command resumes it"
            entry = replace(entry, status="running" if is_running else "killed", reason=reason, config=config)
        split, score = score_of(folder) or (None, None)
        return replace(entry, split=split, score=score)
    except (UserError, OSError) as error:
        return replace(entry, reason=one_line(error, folder))


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name, in the order of `folders`, each of which is a run or has runs below it.

    A run's name is its path below the given folder, or that folder's own name; where two runs have the same
    name, they are named by their whole paths. A folder is a run folder if a writer opened it, or if it has a record.
    """
    found: dict[str, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: {no_folder(folder)}; name run folders, or a folder that contains some")
        whole = os.path.realpath(folder)
        for place, children, files in os.walk(whole):
            children.sort()
            # A link is followed where it leads to a run, and nowhere else.
            links = [link for child in children if os.path.islink(link := os.path.join(place, child))]
            runs = [link for link in links if any(os.path.isfile(os.path.join(link, name)) for name in SIGNS)]
            if not SIGNS.isdisjoint(files):
                runs.insert(0, place)
                # Nothing inside a run is searched, except such links.
                children.clear()
            for run in runs:
                name = os.path.basename(whole) if run == whole else os.path.relpath(run, whole)
                found.setdefault(os.path.realpath(run), name)
    if not found:
        raise UserError(f"{', '.join(map(str, folders))}: no runs found; create one with textsql_train.py --outputdir")
    counts = Counter(found.values())
    return {name if counts[name] == 1 else run: Path(run) for run, name in found.items()}


@dataclass(frozen=True)
class Timeline:
    """The samples of the last attempt of one run."""

    label: str
    ranks: dict[int, DataFrame]
    """Samples by rank, at least one each: `unix_seconds`, `phase` and columns of numbers, NaN where there is none."""
    faults: tuple[str, ...]
    """What could not be read, one line each."""

    def column(self, columns: Iterable[str]) -> str:
        """The first of these columns that has samples; an empty string where none has."""
        return next((name for name in columns if self.peak(name) > 0), "")

    def peak(self, column: str) -> float:
        """The highest sample of all ranks; 0 where there is none."""
        return max((samples[column].max() for samples in self.ranks.values() if column in samples), default=0.0)


def read_timeline(entry: Entry, label: str) -> Timeline:
    """The samples of a run's ranks; damage is listed in `faults`, not raised."""
    import numpy as np

    ranks, faults = {}, []
    measured = entry.record.ranks if entry.record else ()
    # A rank that did not reach its end has not recorded when it began: all its samples count.
    began = {rank.rank: rank.began_unix_seconds or 0.0 for rank in measured}
    paths = {int(path.stem): path for path in (entry.folder / "memory").glob("*.csv") if path.stem.isdigit()}
    for number, path in sorted(paths.items()):
        try:
            samples = _read_samples(path)
        except (ValueError, OSError) as error:
            faults.append(one_line(f"{path}: damaged: {error}; run it again", entry.folder))
            continue
        whole = samples.dropna(subset=["unix_seconds", "phase"])
        if lost := len(samples) - len(whole):
            faults.append(one_line(f"{path}: left out {counted(lost, 'line')} without a valid sample", entry.folder))
        last = whole[whole["unix_seconds"] >= began.get(number, 0.0) - SLACK_SECONDS]
        if len(last) > DRAWN:
            # One sample for each stretch of samples: the highest value of memory, and the mean of use.
            first = dict.fromkeys(("unix_seconds", "phase"), "first")
            rules = {name: "max" if name in MEMORY_COLUMNS else "mean" for name in last} | first
            last = last.groupby(np.arange(len(last)) * DRAWN // len(last)).agg(rules)
        if len(last):
            ranks[number] = last
    return Timeline(label, ranks, tuple(faults))


def _read_samples(path: Path) -> DataFrame:
    """The samples of a file; `ValueError` where it is not a table, or lacks columns that are needed."""
    import pandas as pd

    content = path.read_bytes()
    # After the last line end there is nothing, or a line that was cut short when the run was killed.
    lines = content[: content.rfind(b"\n") + 1]
    needed = {"unix_seconds", "phase", *MEMORY_COLUMNS}
    # An attempt of a later version may have written more columns: only those that the header names are taken.
    used = {*needed, *USE_COLUMNS}.__contains__
    read = partial(pd.read_csv, usecols=used, index_col=False, quoting=csv.QUOTE_NONE)
    try:
        samples = read(io.BytesIO(lines), dtype=defaultdict(lambda: "float64", phase="str"))
    except ValueError:
        # A full disk or a loss of power may have spoilt a line: anything that is not a number counts as missing.
        samples = read(io.BytesIO(lines), dtype="str")
        numbers = samples.drop(columns="phase", errors="ignore").apply(pd.to_numeric, errors="coerce")
        samples = samples.assign(**{str(name): column for name, column in numbers.items()})
    if not needed <= {*samples}:
        raise ValueError(f"no column {min(needed - {*samples})}")
    return samples


def one_line(what: object, folder: Path) -> str:
    """A reason without line breaks, characters that control a terminal, and the path of the run folder."""
    words = " ".join(str(what).replace(f"{folder}/", "").split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in words)


# How good the models of runs are: the figures of their scores, by key, and their means over repeats.

COUNTS = ("examples", "executable", "text_tokens")
MEASURES = ("exact_match", "logical_form_accuracy", "execution_accuracy", "f1", "text_loss", "perplexity")
"""Measures that scores consist of, and that may have an interval; each task has some of them."""
IN_FILE = {"text_loss": "loss", "text_tokens": "tokens"}
"""Names in a score file by our own keys: the file's names would say too little next to the figures of a run."""
JUDGED_BY = {TEXT2SQL: ("execution", "execution_accuracy"), SQUAD: ("F1", "f1"), LM: ("perplexity", "perplexity")}
"""Label and key of the measure by which a run of each task is judged."""
KEYS = ("split", "tables", *COUNTS, *MEASURES, "inference_kind", "inference_result")
OWN = "own_metrics."
"""Prefix of a custom metric's key."""
ROUGE = ("rouge1", "rouge2", "rougeL")
"""ROUGE measures that a summary shows, where a score has them. A query is one line, so rougeLsum equals rougeL."""


def accuracy_lines(entries: Sequence[Entry]) -> Iterator[Values]:
    """Accuracy by key over all tables, then once more for each group of tables that all the scores have: `known`,
    `unseen`. Where nothing was scored, every key of `KEYS` is None.

    For repeats, it is the mean of each share. The ends of its interval are the means of the repeats' ends: the interval
    comes from the choice of questions, which is the same in each repeat. Repeats with another task, split or number of
    examples than the first are left out.
    """
    scored = [(entry.split, entry.score) for entry in entries if entry.score is not None]
    if not scored:
        return iter([dict.fromkeys(KEYS)])
    sizes = ("examples", "tokens")
    extents = [(split, score.task, *(getattr(score, size, None) for size in sizes)) for split, score in scored]
    alike = [score for (_, score), extent in zip(scored, extents, strict=True) if extent == extents[0]]
    return score_lines(scored[0][0], alike)


def score_lines(split: str | None, scores: Sequence[Score]) -> Iterator[Values]:
    """Accuracy by key of scores of one task and split, over all tables, then for each group of them."""
    yield _line(split, "all", scores)
    by_group = [getattr(score, "groups", None) or {} for score in scores]
    for group in by_group[0]:
        if all(group in groups for groups in by_group):
            yield _line(split, group.removesuffix("_tables"), [groups[group] for groups in by_group])


def _line(split: str | None, tables: str, scores: Sequence[Score]) -> Values:
    task, found = scores[0].task, [_figures(score) for score in scores]
    values: Values = {}
    for key in (key for key in found[0] if all(key in one for one in found)):
        repeats = [one[key] for one in found]
        if None in repeats:
            values[key] = None
        else:
            # For intervals, the means of their ends.
            is_span = isinstance(repeats[0], tuple)
            values[key] = [mean(ends) for ends in zip(*repeats, strict=True)] if is_span else mean(repeats)
    if values["text_loss"] is not None:
        # Perplexities are powers: their mean would not match the mean loss.
        values["perplexity"] = math.exp(values["text_loss"])
    kind, key = JUDGED_BY[task]
    if values[key] is None:
        # No query could be run.
        kind, key = "logical form", "logical_form_accuracy"
    judged = {"inference_result": values[key], "inference_result_interval": values[f"{key}_interval"]}
    return {"split": split, "tables": tables if task == TEXT2SQL else None, **values, "inference_kind": kind, **judged}


def _figures(score: Score) -> Values:
    """The figures of one score, and the intervals of its measures."""
    intervals, own = getattr(score, "intervals", {}), getattr(score, "own_metrics", {})
    rouge, names = getattr(score, "rouge", None) or {}, {key: IN_FILE.get(key, key) for key in (*COUNTS, *MEASURES)}
    return {
        **{key: getattr(score, name, None) for key, name in names.items()},
        **{f"{key}_interval": intervals.get(key) for key in MEASURES if hasattr(score, names[key])},
        **{name: rouge[name] for name in ROUGE if name in rouge},
        **{f"{OWN}{name}": value for name, value in own.items()},
        **{f"{OWN}{name}_interval": intervals.get(name) for name in own},
    }
