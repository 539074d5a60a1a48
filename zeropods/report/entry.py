"""Run folders as a summary sees them: a run's record and score, or in one line why there is none to show."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.evaluate.score_file import Score, read_score
from zeropods.measure.record import Record, RunConfig, read_config, read_record
from zeropods.measure.run_folder import CONFIG, LAUNCH_LOCK, LOCK, RECORD, is_held
from zeropods.plan.shapes import shape_from

SCORED_SPLITS = ("test", "dev")
"""The first that has a score is shown."""


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
    split = next((split for split in SCORED_SPLITS if (folder / f"score.{split}.json").is_file()), None)
    try:
        return entry if split is None else replace(entry, split=split, score=read_score(folder / f"score.{split}.json"))
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
    return Entry(name=name, folder=folder, status=record.status, reason=reason, config=record)


def _unrecorded(folder: Path, name: str) -> Entry:
    config = read_config(folder) if (folder / CONFIG).is_file() else None
    if is_held(folder / LOCK) or is_held(folder / LAUNCH_LOCK):
        return Entry(name=name, folder=folder, status="running", reason="no record yet", config=config)
    reason = "ended without a record; the same command resumes it"
    return Entry(name=name, folder=folder, status="killed", reason=reason, config=config)
