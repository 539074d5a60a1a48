"""Older checkpoints go once a newer one has been read back whole."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from zeropods.checkpoints.disk import put_away, sync_folder
from zeropods.checkpoints.manifest import UnsoundError, read_manifest
from zeropods.checkpoints.names import name_of, names_of, newest_first, step_of
from zeropods.checkpoints.origin import Origin
from zeropods.checkpoints.pointer import read_pointer
from zeropods.checkpoints.universal import sweep_universal
from zeropods.checkpoints.verify import fault


@dataclass(frozen=True)
class Retired:
    """What came of a wish to keep no more than so many."""

    gone: tuple[str, ...] = ()
    """Names of what was deleted, oldest first."""
    fault: str | None = None
    """Why the newest one does not count, so that nothing was deleted."""


def retire(folder: Path, step: int, origin: Origin, keep: int, best: str | None = None) -> Retired:
    """Delete what lies before the checkpoint of `step` and goes beyond `keep`, by one who has the run's lock.

    The newest ones stay, and the best one instead of the oldest of these; with `keep` 1 both the newest and the best
    stay. Nothing goes where the checkpoint of `step` does not verify, byte by byte. What has no manifest of this
    run was made by another, or by a save that did not end, and is not counted or touched.

    Whoever is killed here leaves each checkpoint whole under its name, or under a name that counts for nothing.

    Args:
        folder: `checkpoints/` of a run folder.
        step: of the checkpoint that was saved last.
        keep: how many may stay, at least 1.
        best: name of the best model's checkpoint, where one is known.
    """
    older = _older(folder, step, origin)
    spared = {best, _pointed_at(folder)} & set(older)
    room = max(0, keep - 1 - len(spared))
    surplus = [name for name in older if name not in spared][room:]
    if not surplus:
        return Retired()
    why = fault(folder / name_of(step), lambda found: found.other_run(origin))
    if why is not None:
        return Retired(fault=why)
    for name in reversed(surplus):
        away = put_away(folder / name)
        # Were the new name lost in a power cut and files already gone, a broken checkpoint would be there again.
        sync_folder(folder)
        shutil.rmtree(away, ignore_errors=True)
    sweep_universal(folder)
    return Retired(gone=tuple(reversed(surplus)))


def _older(folder: Path, step: int, origin: Origin) -> list[str]:
    """Names of this run's checkpoints before a step, newest first."""
    names = (name for name in newest_first(names_of(folder)) if (step_of(name) or 0) < step)
    return [name for name in names if _is_of(folder / name, origin)]


def _is_of(checkpoint: Path, origin: Origin) -> bool:
    try:
        manifest = read_manifest(checkpoint)
    except UnsoundError:
        return False
    return manifest.origin.run_id == origin.run_id and manifest.step == step_of(checkpoint.name)


def _pointed_at(folder: Path) -> str | None:
    try:
        pointer = read_pointer(folder)
    except UnsoundError:
        return None
    return pointer.checkpoint if pointer else None
