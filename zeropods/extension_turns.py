"""Processes that compile or load the same extension of torch take turns, by a lock that ends with its holder.

torch (2.13, utils/file_baton.py) takes turns by a file that exists: where its holder is killed, by a supervisor or for
want of memory, everyone after it waits for ever.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from zeropods.extension_cache import is_stale

log = logging.getLogger(__name__)

NAME = "turn"
"""The file that is locked, beside torch's own `lock`. It stays: what counts is the kernel's lock of it."""
WAIT_SECONDS = 0.1


def compile_in_turns() -> None:
    """Let this process's torch take turns by the kernel's locks."""
    from torch.utils import cpp_extension

    setattr(cpp_extension, "FileBaton", Turn)  # noqa: B010 (a type that mypy does not let us replace)


class Turn:
    """In the place of torch's `FileBaton`, with its methods."""

    def __init__(self, lock_file_path: str, **_: object) -> None:
        self._torchs_own = Path(lock_file_path)
        self._descriptor = -1

    def try_acquire(self) -> bool:
        """Wait for the turn. What another has compiled is found up to date, what it has begun is ended."""
        self._descriptor = os.open(self._torchs_own.with_name(NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._await_torchs_own()
        return True

    def wait(self) -> None:
        """Nothing: whoever asked has had its turn."""

    def release(self) -> None:
        os.close(self._descriptor)

    def _await_torchs_own(self) -> None:
        """A process without this class may compile here too, where the folder is not this environment's own."""
        while self._torchs_own.exists():
            if is_stale(self._torchs_own):
                log.warning("%s: left by a compilation that was killed; removed", self._torchs_own)
                self._torchs_own.unlink(missing_ok=True)
            else:
                time.sleep(WAIT_SECONDS)


def is_taken(folder: Path) -> bool:
    """Whether a process of this machine compiles or loads the extension of a folder now."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
