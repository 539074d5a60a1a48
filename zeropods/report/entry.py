"""Run folders as a summary sees them: record, score, earlier attempts, samples, or in one line why there is none."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.evaluate.score_file import Score, score_of
from zeropods.measure.record import Record, RunConfig, read_config, read_record
from zeropods.measure.run_folder import CONFIG, LAUNCH_LOCK, LOCK, RECORD, is_held
from zeropods.plan.shapes import shape_from

if TYPE_CHECKING:
    from pandas import DataFrame

MEMORY_COLUMNS = {
    "device_used_bytes": "GiB device-used",
    "allocated_bytes": "GiB allocated",
    "resident_bytes": "GiB resident",
}
USE_COLUMNS = {"utilization_percent": "GPU (%)", "cpu_percent": "CPU (% of cores)"}
"""What people call the columns of `memory/N.csv`; of each kind the first that has samples is drawn."""
SLACK_SECONDS = 1.0
"""Between the clock that a run is timed by and the one that samples have."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run of a summary."""

    name: str
    folder: Path
    status: str
    """The record's; without one `running`, `killed` or `broken`."""
    reason: str | None = None
    """One line."""
    config: RunConfig | None = None
    """The record; the configuration where there is no record yet; None where it is broken."""
    earlier: tuple[Record, ...] = ()
    """The records of earlier attempts, as far as they can be read."""
    split: str | None = None
    score: Score | None = None

    @property
    def record(self) -> Record | None:
        """The record, or None where the run has none that can be read."""
        return self.config if isinstance(self.config, Record) else None


def read_entry(folder: Path, name: str) -> Entry:
    """Read a run folder; what is wrong with it becomes a status and a reason."""
    try:
        entry = _recorded(folder, name) if (folder / RECORD).is_file() else _unrecorded(folder, name)
    except (UserError, OSError) as error:
        return Entry(name=name, folder=folder, status="broken", reason=one_line(error, folder))
    try:
        found = score_of(folder)
        return entry if found is None else replace(entry, split=found[0], score=found[1])
    except (UserError, OSError) as error:
        return replace(entry, reason=one_line(error, folder))


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name, in the order of the folders named: each is a run, or holds runs below it.

    A run's name is its path below the named folder, or that folder's own name; where two runs share
    one, their whole paths tell them apart. A folder is a run's if it was opened by a writer, or holds a record.
    """
    found: dict[Path, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name run folders, or a folder that holds some")
        whole = folder.resolve()
        for place, children, files in os.walk(whole):
            children.sort()
            if LOCK in files or RECORD in files:
                # Nothing inside a run is looked at.
                children.clear()
                run = Path(place)
                found.setdefault(run, whole.name if run == whole else run.relative_to(whole).as_posix())
    if not found:
        raise UserError(f"{', '.join(map(str, folders))}: no run there; textsql_train.py --outputdir makes one")
    names = list(found.values())
    return {name if names.count(name) == 1 else str(run): run for run, name in found.items()}


@dataclass(frozen=True)
class Timeline:
    """The samples of the last attempt of one run."""

    label: str
    ranks: dict[int, DataFrame]
    """By rank, with at least one sample: `unix_seconds`, `phase` and columns of numbers, NaN where there is none."""
    faults: tuple[str, ...]
    """What of it could not be read."""

    def column(self, columns: Iterable[str]) -> str:
        """The first of some columns that has samples; an empty text where none has."""
        return next((name for name in columns if self.peak(name) > 0), "")

    def peak(self, column: str) -> float:
        """The highest sample of all ranks; 0 where there is none."""
        return max((samples[column].max() for samples in self.ranks.values() if column in samples), default=0.0)


def read_timeline(entry: Entry, label: str) -> Timeline:
    """The samples of a run's ranks; what is damaged is named, not raised."""
    ranks, faults = {}, []
    paths = [path for path in (entry.folder / "memory").glob("*.csv") if path.stem.isdigit()]
    for path in sorted(paths, key=lambda path: int(path.stem)):
        try:
            samples, fault = _read_samples(path)
        except (UserError, OSError) as error:
            faults.append(one_line(error, entry.folder))
            continue
        faults += [one_line(fault, entry.folder)] if fault else []
        last = samples[samples["unix_seconds"] >= _began(entry, int(path.stem))]
        if len(last):
            ranks[int(path.stem)] = last
    return Timeline(label, ranks, tuple(faults))


def _read_samples(path: Path) -> tuple[DataFrame, str | None]:
    """The samples of a file, and the first line that is none: it is left out.

    Raises:
        UserError: it is no table, or one without the columns that are needed.
    """
    import pandas as pd

    try:
        text = path.read_text(encoding="utf-8")
        # The text behind the last line end is empty, or a line that was cut short when the run was killed.
        lines = io.StringIO(text[: text.rfind("\n") + 1])
        # An attempt of a later version may have written more columns: those that the header names are taken.
        header = text.partition("\n")[0].split(",")
        whole = pd.read_csv(lines, dtype=str, usecols=header, index_col=False, quoting=csv.QUOTE_NONE)
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}; run it again") from None
    missing = [name for name in ("unix_seconds", "phase", *MEMORY_COLUMNS) if name not in whole]
    if missing:
        raise UserError(f"{path}: header {','.join(whole)!r:.60}; expected a column {missing[0]}: run it again")
    numbers = whole.drop(columns="phase").apply(pd.to_numeric, errors="coerce")
    is_bad = numbers["unix_seconds"].isna() | whole["phase"].isna()
    is_bad |= (numbers.isna() & whole.drop(columns="phase").notna()).any(axis="columns")
    bad = [int(line) + 2 for line in whole.index[is_bad]]
    fault = f"{path}:{bad[0]}: {text.splitlines()[bad[0] - 1]!r:.60} is no sample, left out" if bad else None
    return numbers.assign(phase=whole["phase"])[~is_bad], fault


def _began(entry: Entry, number: int) -> float:
    """When the rank's last attempt began, by its clock; from the beginning where it did not say."""
    rank = next((rank for rank in (entry.record.ranks if entry.record else ()) if rank.rank == number), None)
    if rank is None or rank.ended_unix_seconds is None or rank.wall_seconds is None:
        return 0.0
    return rank.ended_unix_seconds - rank.wall_seconds - SLACK_SECONDS


def one_line(what: object, folder: Path) -> str:
    """A reason without line breaks, letters that steer a terminal, and the place where the run happens to lie."""
    words = " ".join(str(what).replace(f"{folder}/", "").split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in words)


def _recorded(folder: Path, name: str) -> Entry:
    record = read_record(folder)
    for rank in record.ranks:
        try:
            if rank.shape is not None:
                shape_from(rank.shape)
        except UserError as error:
            raise UserError(f"{folder / RECORD}: ranks.{rank.rank}.{error}") from None
    reason = one_line(record.reason, folder) if record.reason else None
    earlier = tuple(_earlier(folder, record.attempt))
    return Entry(name=name, folder=folder, status=record.status, reason=reason, config=record, earlier=earlier)


def _earlier(folder: Path, attempts: int) -> Iterator[Record]:
    for number in range(attempts):
        with suppress(UserError, OSError):
            yield read_record(folder, number)


def _unrecorded(folder: Path, name: str) -> Entry:
    config = read_config(folder) if (folder / CONFIG).is_file() else None
    if is_held(folder / LOCK) or is_held(folder / LAUNCH_LOCK):
        return Entry(name=name, folder=folder, status="running", reason="no record yet", config=config)
    reason = "ended without a record; the same command resumes it"
    return Entry(name=name, folder=folder, status="killed", reason=reason, config=config)
