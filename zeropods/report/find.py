"""Run folders below the folders that a user names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeropods.errors import UserError
from zeropods.measure.run_folder import LOCK, RECORD


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
