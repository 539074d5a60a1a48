"""`latest.json`: the name of the checkpoint that was saved last.

A hint, and never believed: it names a checkpoint to a reader whose view of a shared folder is a minute old, and what it
names is verified like any other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zeropods import atomic
from zeropods.checkpoints.disk import sync_folder
from zeropods.checkpoints.manifest import Manifest, UnsoundError
from zeropods.checkpoints.names import step_of

POINTER = "latest.json"


@dataclass(frozen=True)
class Pointer:
    """What `latest.json` says."""

    checkpoint: str
    manifest: str
    """The manifest's digest."""


def write_pointer(folder: Path, checkpoint: str, manifest: Manifest) -> None:
    """Point to a checkpoint that is complete."""
    atomic.write_json(folder / POINTER, {"checkpoint": checkpoint, "manifest": manifest.digest()})
    sync_folder(folder)


def read_pointer(folder: Path) -> Pointer | None:
    """The pointer; None where there is none yet, `UnsoundError` where it says nothing of use."""
    try:
        said = json.loads((folder / POINTER).read_bytes())
        pointer = Pointer(str(said["checkpoint"]), str(said["manifest"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsoundError(f"cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnsoundError("damaged") from None
    if step_of(pointer.checkpoint) is None:
        raise UnsoundError(f"names {pointer.checkpoint!r:.60}, which is no checkpoint's name")
    return pointer
