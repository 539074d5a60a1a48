"""Checkpoints for any number of ranks: `checkpoints/universal/N`, made of `checkpoint-N`, which stays as it is.

One that is there is whole: it is built under a name that counts for nothing, and renamed after its own manifest.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from zeropods.checkpoints.disk import discard, put_away, sync_folder, sync_tree
from zeropods.checkpoints.manifest import Manifest, UnsoundError, write_manifest
from zeropods.checkpoints.names import name_of
from zeropods.checkpoints.shards import MANIFEST, measured, names_in, zero_folders
from zeropods.checkpoints.verify import verified

UNIVERSAL = "universal"
SOURCE = "source.json"
"""In a universal checkpoint: the manifest of what it was made of."""
BUILDING = ".building-"
WHOLE = ("trainer_state.json", "scheduler.pt")
"""What each checkpoint holds undivided, and resuming reads."""

Convert = Callable[[Path, Path], None]
"""Makes a folder of DeepSpeed's universal form of a folder of shards."""


def universal_of(folder: Path, step: int) -> Path:
    """Where the universal form of a step is, below `checkpoints/`."""
    return folder / UNIVERSAL / str(step)


def check_universal(place: Path, checkpoint: Path) -> None:
    """`UnsoundError` where a universal checkpoint is not whole, or was made of another save."""
    verified(place, lambda _: None)
    if (place / SOURCE).read_bytes() != (checkpoint / MANIFEST).read_bytes():
        raise UnsoundError(f"{SOURCE}: of another save of the step")


def make_universal(place: Path, checkpoint: Path, manifest: Manifest, convert: Convert) -> None:
    """Make the universal form of a checkpoint that verifies, by one who has the run's lock.

    Args:
        place: where it goes; what is there is replaced.
        manifest: of the checkpoint.
        convert: is given the folder of shards and the folder to make.

    Raises:
        UnsoundError: nothing in it was divided by ZeRO.
    """
    divided = zero_folders(manifest.files)
    if len(divided) != 1:
        raise UnsoundError(f"holds the shards of {len(divided)} steps, expected those of 1")
    shards = divided.pop()
    place.parent.mkdir(exist_ok=True)
    building = place.with_name(f"{BUILDING}{place.name}-{secrets.token_hex(4)}")
    building.mkdir()
    try:
        for name in WHOLE:
            if name in manifest.files:
                shutil.copyfile(checkpoint / name, building / name)
        shutil.copyfile(checkpoint / MANIFEST, building / SOURCE)
        convert(checkpoint / shards, building / f"{shards}_{UNIVERSAL}")
        _complete(building, place, manifest)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _complete(building: Path, place: Path, manifest: Manifest) -> None:
    files = measured(building, sorted(names_in(building)))
    sync_tree(building)
    write_manifest(building, Manifest(step=manifest.step, origin=manifest.origin, files=files))
    if place.exists():
        discard(place)
    os.rename(building, place)
    sync_folder(place.parent)


def sweep_universal(folder: Path) -> None:
    """Remove universal checkpoints whose checkpoint is gone, and those that a killed run did not end.

    Args:
        folder: `checkpoints/` of a run folder, by one who has the run's lock.
    """
    for path in (folder / UNIVERSAL).glob("*"):
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.isdecimal() and not (folder / name_of(int(path.name))).is_dir():
            shutil.rmtree(put_away(path), ignore_errors=True)
