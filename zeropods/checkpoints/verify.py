"""Whether a checkpoint counts: every file of its manifest is there, unchanged, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zeropods.checkpoints.manifest import Manifest, UnsoundError, read_manifest
from zeropods.checkpoints.origin import Origin
from zeropods.checkpoints.shards import THREADS, Shard, names_in, shard


def fault(checkpoint: Path, refused: Callable[[Origin], str | None]) -> str | None:
    """Why a checkpoint does not count; None where it is whole. What is cheap is looked at first.

    Args:
        refused: why a checkpoint of such an origin is not wanted; None where it is.
    """
    try:
        verified(checkpoint, refused)
    except UnsoundError as unsound:
        return str(unsound)
    return None


def verified(checkpoint: Path, refused: Callable[[Origin], str | None]) -> Manifest:
    """The manifest of a checkpoint that counts; `UnsoundError` where it does not."""
    manifest = read_manifest(checkpoint)
    unwanted = refused(manifest.origin)
    if unwanted is not None:
        raise UnsoundError(unwanted)
    try:
        _same_files(checkpoint, manifest)
        _same_sizes(checkpoint, manifest)
        _same_bytes(checkpoint, manifest)
    except OSError as error:
        raise UnsoundError(f"{_shown(checkpoint, error.filename)}: cannot be read ({error.strerror})") from None
    return manifest


def _same_files(checkpoint: Path, manifest: Manifest) -> None:
    """The manifest's names are those that are found below the folder, so none of them can lead out of it."""
    there = names_in(checkpoint)
    for name in sorted(manifest.files.keys() - there):
        raise UnsoundError(f"{name}: missing")
    for name in sorted(there - manifest.files.keys()):
        raise UnsoundError(f"{name}: not in the manifest")


def _same_sizes(checkpoint: Path, manifest: Manifest) -> None:
    for name, expected in sorted(manifest.files.items()):
        size = os.lstat(checkpoint / name).st_size
        if size != expected.bytes:
            raise UnsoundError(f"{name}: {size} bytes, expected {expected.bytes}")


def _same_bytes(checkpoint: Path, manifest: Manifest) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: shard(checkpoint / name), manifest.files)
        for (name, expected), now in zip(manifest.files.items(), found, strict=True):
            _same_shard(name, now, expected)


def _same_shard(name: str, now: Shard, expected: Shard) -> None:
    if now != expected:
        raise UnsoundError(f"{name}: its bytes have changed since it was saved (SHA-256)")


def _shown(checkpoint: Path, path: str | None) -> str:
    return os.path.relpath(path, checkpoint) if path else checkpoint.name
