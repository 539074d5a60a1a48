"""The newest checkpoint that counts, and why newer ones do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zeropods.checkpoints.manifest import Manifest, UnsoundError
from zeropods.checkpoints.names import names_of, newest_first, step_of
from zeropods.checkpoints.origin import Origin
from zeropods.checkpoints.pointer import POINTER, Pointer, read_pointer
from zeropods.checkpoints.verify import verified


@dataclass(frozen=True)
class Found:
    """What a run can go on from."""

    path: Path | None
    """None where there is nothing."""
    skipped: tuple[tuple[str, str], ...]
    """Names, newest first, each with the reason why it does not count; `latest.json` where it misleads."""
    manifest: Manifest | None = field(default=None, compare=False)
    """Of what is at `path`."""


def newest_good(folder: Path, origin: Origin) -> Found:
    """Verify the checkpoints of a run, newest first, until one is whole.

    The listing of a shared folder may be old on this machine. A name that the pointer gives is looked up by itself.

    Args:
        folder: `checkpoints/` of a run folder; it may be missing.
        origin: of the run that wants to go on.
    """
    skipped: list[tuple[str, str]] = []
    pointer = None
    try:
        pointer = read_pointer(folder)
    except UnsoundError as unsound:
        skipped.append((POINTER, str(unsound)))
    for name in newest_first(names_of(folder) | ({pointer.checkpoint} if pointer else set())):
        try:
            manifest = _one(folder / name, origin)
        except UnsoundError as unsound:
            skipped.append((name, str(unsound)))
            continue
        return Found(folder / name, (*skipped, *_misled(pointer, name, manifest)), manifest)
    return Found(None, tuple(skipped))


def _one(checkpoint: Path, origin: Origin) -> Manifest:
    if not checkpoint.is_dir():
        raise UnsoundError("gone" if not checkpoint.exists() else "no folder")
    manifest = verified(checkpoint, lambda found: found.other_run(origin))
    if manifest.step != step_of(checkpoint.name):
        raise UnsoundError(f"is of step {manifest.step}, under another name")
    return manifest


def _misled(pointer: Pointer | None, good: str, manifest: Manifest) -> list[tuple[str, str]]:
    """What is wrong with a pointer, now that the newest good checkpoint is known."""
    if pointer is None:
        return []
    if (step_of(pointer.checkpoint) or 0) < manifest.step:
        return [(POINTER, f"names {pointer.checkpoint}; {good} is newer and complete")]
    if pointer.checkpoint == good and pointer.manifest != manifest.digest():
        return [(POINTER, f"names another save of {good}")]
    return []
