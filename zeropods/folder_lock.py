"""A folder that one process at a time writes into, and that holds what it should."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zeropods.errors import UserError


@contextmanager
def folder_locked(folder: Path, lock: str, *, signs: Sequence[str], kind: str, flag: str) -> Iterator[None]:
    """Hold a lock of a folder, which is made where it is missing; a second writer is refused with the holder's name.

    Args:
        lock: name of the lock's file in it.
        signs: names of which one tells that a folder with something in it is of this kind.
        kind: what it is, for messages: `run`.
        flag: by which the user named it, for the remedy.
    """
    _refuse_foreign(folder, signs, kind, flag)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / lock, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"{folder}: in use by {holder}; wait for it, or choose another {flag}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _refuse_foreign(folder: Path, signs: Sequence[str], kind: str, flag: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; choose another {flag}")
    ours = any((folder / name).exists() for name in signs)
    if folder.is_dir() and not ours and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something that is no {kind}; choose another {flag}")
