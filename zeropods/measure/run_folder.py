"""A run folder is exactly one run: opened by one writer at a time, resumed or refused, never
overwritten."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError, told_differences
from zeropods.files import folder_locked
from zeropods.measure.record import (
    CONFIG,
    LAUNCH_LOCK,
    LOCK,
    RECORD,
    compose_record,
    read_config,
    read_json,
    write_record,
)


@dataclass(frozen=True)
class Opening:
    """How a run begins."""

    run_id: str
    attempt: int
    """Number of earlier attempts of this run."""
    finished: bool
    """True where this very run has ended with status `ok`, so that there is nothing left to do."""
    resume: bool
    """True where earlier checkpoints may be used."""


def locked(folder: Path, lock: str = LOCK) -> AbstractContextManager[None]:
    """Hold a lock of a run folder; a second writer is refused with the holder's host and
    process."""
    signs = (CONFIG, LOCK, LAUNCH_LOCK)
    return folder_locked(folder, lock, signs=signs, kind="run", flag="--outputdir")


def open_run(folder: Path, identity: Mapping[str, object], *, again: bool) -> Opening:
    """Decide between a first attempt, a further one and a finished run, and prepare the folder.

    Before a further attempt, what the last one measured is moved into `attempts/`. What a run with
    other settings has left that had done no step is removed. The caller holds the lock, and writes
    `config.json`.

    Args:
        identity: what must be equal for two calls to mean the same run.
        again: start from the beginning; earlier checkpoints are moved into `attempts/` too.

    Raises:
        UserError: the folder holds a finished run that would be started again, or a run with other
            settings; or what it holds cannot be read.
    """
    if not (folder / CONFIG).is_file():
        # The record of a launch that ended before it had opened the run says nothing about this
        # one.
        (folder / RECORD).unlink(missing_ok=True)
        return _first_opening()
    config = read_config(folder)
    is_finished = (folder / RECORD).is_file() and read_json(folder / RECORD)["status"] == "ok"
    if is_finished and again:
        raise UserError(
            f"{folder}: a finished run is never overwritten; choose another --outputdir"
        )
    # As it would be read from `config.json`, where tuples are lists.
    identity_as_read = json.loads(json.dumps(dict(identity)))
    changes = _changes(config.identity, identity_as_read)
    if changes and not is_claimed(folder):
        _remove_unclaimed(folder)
        return _first_opening()
    if changes and not again:
        settings = ", ".join(changes[:4])
        if is_finished:
            raise UserError(
                f"{folder}: holds a finished run with other settings ({settings}); "
                "choose another --outputdir"
            )
        raise UserError(
            f"{folder}: holds an unfinished run with other settings ({settings}); "
            "choose another --outputdir, or --resume never to start again"
        )
    if is_finished:
        return Opening(config.run_id, config.attempt, finished=True, resume=False)
    attempt = _put_aside(folder, again)
    return Opening(config.run_id, attempt, finished=False, resume=not again)


def _first_opening() -> Opening:
    """The first attempt of a new run."""
    return Opening(secrets.token_hex(6), 0, finished=False, resume=False)


def _remove_unclaimed(folder: Path) -> None:
    """Remove what a run that has done no step wrote about itself, but for `config.json`."""
    # There is a record, or the folder would count as claimed.
    (folder / RECORD).unlink()
    for name in ("attempts", "memory", "ranks", "stacks", "steps"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Each setting that differs, as it was and as it is now."""
    changes = []
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            changes.append(told_differences(old, new, [key]))
    return changes


def is_claimed(folder: Path) -> bool:
    """Whether the run in a folder has done a step, as far as its records show: the folder of a run
    that has done none, because of a misspelled flag or a missing model, is free for a run with
    other settings."""
    if not (folder / CONFIG).is_file():
        return False
    paths = [folder / RECORD, *(folder / "attempts").glob("*.json")]
    records = [read_json(path) for path in paths if path.is_file()]
    if len(records) < len(paths):
        # The last attempt runs or was killed: how far it has come is not known.
        return True
    for record in records:
        # Without what a rank measured, 0 only says that the steps are not known.
        did_nothing = record.get("steps") == 0 and record.get("ranks")
        if not did_nothing:
            return True
    return any((folder / "checkpoints").glob("checkpoint-*"))


def _put_aside(folder: Path, again: bool) -> int:
    """Move the last attempt's record, stacks and step times into `attempts/`, and remove what its
    ranks wrote into `ranks/`, which the record has; returns the number of the new attempt.

    Where the last attempt was killed before it could write its record, one is made.

    Args:
        again: move the checkpoints as well.
    """
    attempts = folder / "attempts"
    attempts.mkdir(exist_ok=True)
    number = len(list(attempts.glob("*.json")))
    if not (folder / RECORD).is_file():
        reason = "killed before it could write its record"
        write_record(folder, compose_record(folder, status="failed", reason=reason))
    os.rename(folder / RECORD, attempts / f"{number}.json")
    ranks = folder / "ranks"
    for path in (*ranks.glob("*.json"), *ranks.glob("*.beat")):
        path.unlink()
    # A killed rank that was never asked for its stacks has left an empty file, not worth moving.
    for path in (folder / "stacks").glob("*"):
        if path.stat().st_size == 0:
            path.unlink()
    names = ["stacks", "steps"]
    if again:
        names.append("checkpoints")
    for name in names:
        if any((folder / name).glob("*")):
            os.rename(folder / name, attempts / f"{number}.{name}")
    return number + 1
