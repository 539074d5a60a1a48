"""What reaches the disk: files and folders are forced down; what is thrown away goes at once."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

DISCARDED = ".discarded-"
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Some network file systems force no folder down; a folder's entries are on their server already."""


def sync_folder(folder: Path) -> None:
    """Force a folder's entries down: without it a renamed file may be gone after a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Force down the entries of a folder and of all below it, the innermost first."""
    for root, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(root))


def discard(folder: Path) -> None:
    """Take a folder away: its name is free at once, its content goes after that."""
    shutil.rmtree(put_away(folder), ignore_errors=True)


def put_away(folder: Path) -> Path:
    """Give a folder a name that counts for nothing, and return that; `sweep_up` removes it where nobody else does."""
    # A new name takes no room, so this works on a full disk.
    away = folder.with_name(f"{DISCARDED}{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, away)
    return away


def sweep_up(folder: Path) -> None:
    """Remove what killed writers have left: folders half discarded, files under temporary names."""
    for left in folder.glob(f"{DISCARDED}*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(".latest.json.*"):
        left.unlink(missing_ok=True)
