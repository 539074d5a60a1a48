"""A disk that is full or may not be written, in one line, from whichever library met it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from zeropods.errors import UserError

TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "Parent directory")
"""In what torch's writer of files says; it has no exception of its own."""


@contextlib.contextmanager
def said_in_one_line(folder: Path, what: str, remedy: str) -> Iterator[None]:
    """Turn an error of writing into a `UserError` that names the folder.

    Args:
        what: is written.
        remedy: what to do about it.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = _cause(error, folder)
        if cause is None:
            raise
        raise UserError(f"{folder}: {what} cannot be written ({cause}); {remedy}") from error


def _cause(error: Exception, folder: Path) -> str | None:
    """What kept a library from writing; None where it was something else."""
    if isinstance(error, OSError):
        return error.strerror
    text = str(error).split("\n")[0]
    if isinstance(error, RuntimeError) and not any(word in text for word in TORCH_WRITER):
        return None
    # These libraries keep the system's reason to themselves, or say it in Rust: it is asked again.
    return _asked_again(folder) or text


def _asked_again(folder: Path) -> str | None:
    """Why nothing can be written in a folder just now."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 2**20)
    except OSError as error:
        return error.strerror
    return None
