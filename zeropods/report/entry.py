"""A run folder as the summary sees it: its record, or in one line why there is none to show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.evaluate.score_file import read_score
from zeropods.measure.record import Record, RunConfig, read_config, read_record
from zeropods.measure.run_folder import CONFIG, LAUNCH_LOCK, LOCK, RECORD, is_held
from zeropods.plan.shapes import shape_from

# A run folder as the summary sees it: its record, or in one line why there is none to show.

SCORED_SPLITS = ("test", "dev")
"""The first that has a score is shown."""
Facts = dict[str, Any]

PARTS: dict[type, tuple[str, ...]] = {
    dict: (*("deepspeed.zero_optimization", "deepspeed.flops_profiler"),),
    list: ("hardware.gpus",),
}
"""By kind; what is nested comes after what it is in."""


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
    split: str | None = None
    score: Facts | None = None

    @property
    def record(self) -> Record | None:
        """The record, or None where the run has none that can be read."""
        return self.config if isinstance(self.config, Record) else None


def read_entry(folder: Path, name: str) -> Entry:
    """Read a run folder; what is wrong with it becomes a status and a reason."""
    try:
        entry = _entry(folder, name)
    except (UserError, OSError, RecursionError) as error:
        return Entry(name=name, folder=folder, status="broken", reason=one_line(error, folder))
    try:
        split, score = _score(folder)
    except (UserError, OSError, RecursionError) as error:
        return replace(entry, reason=one_line(error, folder))
    return replace(entry, split=split, score=score)


def one_line(what: object, folder: Path) -> str:
    """A reason without line breaks, letters that steer a terminal, and the place where the run happens to lie."""
    words = " ".join(str(what).replace(f"{folder}/", "").split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in words)


def _entry(folder: Path, name: str) -> Entry:
    if (folder / RECORD).is_file():
        record = read_record(folder)
        _check_parts(folder / RECORD, record)
        _check_shapes(folder / RECORD, record)
        reason = one_line(record.reason, folder) if record.reason else None
        return Entry(name=name, folder=folder, status=record.status, reason=reason, config=record)
    config = read_config(folder) if (folder / CONFIG).is_file() else None
    if config is not None:
        _check_parts(folder / CONFIG, config)
    if is_held(folder / LOCK) or is_held(folder / LAUNCH_LOCK):
        status, reason = "running", "no record yet"
    else:
        status, reason = "killed", "ended without a record; the same command resumes it"
    return Entry(name=name, folder=folder, status=status, reason=reason, config=config)


def _check_parts(path: Path, config: RunConfig) -> None:
    """Refuse parts that settings are compared by where they are not of the kind that a run writes."""
    for kind, names in PARTS.items():
        for name in names:
            first, *below = name.split(".")
            value: Any = getattr(config, first)
            for key in below:
                value = None if value is None else value.get(key)
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{path}: {name} is {value!r:.60}; expected {kind.__name__}: run it again")


def _check_shapes(path: Path, record: Record) -> None:
    for rank in record.ranks:
        try:
            if rank.shape is not None:
                shape_from(rank.shape)
        except UserError as error:
            raise UserError(f"{path}: ranks.{rank.rank}.{error}") from None


def _score(folder: Path) -> tuple[str | None, Facts | None]:
    for split in SCORED_SPLITS:
        path = folder / f"score.{split}.json"
        if path.is_file():
            return split, read_score(path).to_json()
    return None, None


# Run folders below the folders that a user names.


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name, in the order of the folders named: each is a run, or holds runs below it.

    A run's name is its path below the named folder, or that folder's own name; where two runs share
    one, their whole paths tell them apart.
    """
    found: dict[Path, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name run folders, or a folder that holds some")
        whole = folder.resolve()
        for run in _below(whole):
            found.setdefault(run, whole.name if run == whole else run.relative_to(whole).as_posix())
    if not found:
        raise UserError(f"{', '.join(map(str, folders))}: no run there; textsql_train.py --outputdir makes one")
    names = list(found.values())
    return {name if names.count(name) == 1 else str(run): run for run, name in found.items()}


def _below(folder: Path) -> Iterator[Path]:
    """Runs at or below a folder in the order of their paths; nothing inside a run is looked at.

    A folder is a run's if it was opened by a writer, or holds a record.
    """
    for place, children, files in os.walk(folder):
        children.sort()
        if LOCK in files or RECORD in files:
            children.clear()
            yield Path(place)
