"""Where a pod's keys lie, or what visitors of a page upload: a folder that is held as long as its process lives."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

POD, DEMO = "zeropods-pod-", "zeropods-demo-"
"""How their names begin."""
FRESH_SECONDS = 60.0
"""A folder so young may be about to be held."""


def make_private_folder(prefix: str) -> Path:
    """A new folder that only this user can read; it is held by this process and its forks until they end.

    What those that were killed have left under this prefix is removed first: nobody holds it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # Never closed: the kernel lets go of it when the last of the processes has ended.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def _remove_if_left(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        about = os.fstat(handle)
        if about.st_uid == os.geteuid() and time.time() - about.st_mtime > FRESH_SECONDS:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(handle)
