"""How a checkpoint comes to count.

    rank 0: make_room -> all ranks write -> all ranks: `shards.measured` of their share -> rank 0: complete

A writer may be killed at any moment: without its manifest, which is last, a checkpoint is not there.
"""

from __future__ import annotations

import os
from pathlib import Path

from zeropods.checkpoints.disk import discard, sweep_up, sync_folder, sync_tree
from zeropods.checkpoints.manifest import Manifest, write_manifest
from zeropods.checkpoints.names import name_of, previous_of
from zeropods.checkpoints.origin import Origin
from zeropods.checkpoints.pointer import write_pointer
from zeropods.checkpoints.shards import MANIFEST, Shard, names_in
from zeropods.checkpoints.universal import sweep_universal
from zeropods.errors import UserError


def make_room(folder: Path, step: int) -> Path:
    """The empty folder that a step is to be written in, by one who has the run's lock.

    What a killed save has left there is removed, lest its files mix with the new ones. A complete checkpoint of
    the same step is put aside, and counts until the new one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep_up(folder)
    sweep_universal(folder)
    place, previous = folder / name_of(step), folder / previous_of(step)
    if (place / MANIFEST).is_file():
        if previous.exists():
            discard(previous)
        os.rename(place, previous)
    elif place.exists():
        discard(place)
    place.mkdir()
    return place


def complete(folder: Path, step: int, origin: Origin, files: dict[str, Shard]) -> None:
    """Make a checkpoint count, once all ranks have written and measured their files.

    Everything but the manifest is on the disk before it, and it before the pointer.

    Args:
        files: of all ranks.

    Raises:
        UserError: there are other files than were measured.
    """
    place = folder / name_of(step)
    strange = sorted(names_in(place) ^ files.keys())
    if strange:
        raise UserError(f"{place}: {strange[0]} came or went while the step was saved; let nothing else write there")
    sync_tree(place)
    sync_folder(folder)
    sync_folder(folder.parent)
    manifest = Manifest(step=step, origin=origin, files=dict(sorted(files.items())))
    write_manifest(place, manifest)
    write_pointer(folder, place.name, manifest)
    previous = folder / previous_of(step)
    if previous.exists():
        discard(previous)
