"""The output of a command, named by `--out`.

Its place is checked before the work begins, and it appears whole.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeropods.errors import UserError
from zeropods.files import check_utf8, file_held, new_file_held, writing

WRITER_LOCK = "held"
"""File in a folder that is being written, which its writer has locked."""


def out_folder(text: str) -> Path:
    """The folder that `--out` names, after a check that it can be written to.

    The check leaves nothing behind.
    """
    return _place(text, Path(text))


def out_file(text: str) -> Path:
    """The file that `--out` names, with the same check as in `out_folder`."""
    path = Path(text).absolute()
    # A link such as /dev/stdout may lead to a file: replacing the link would change it for every
    # process.
    is_of_system = path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm")
    is_replaceable = path.is_file() and not is_of_system
    if text and path.exists() and not is_replaceable:
        kind = "a folder" if path.is_dir() else "not a file that can be replaced"
        raise UserError(f"--out {text!r}: is {kind}; give the name of a file")
    return _place(text, Path(text).parent)


def _place(text: str, folder: Path) -> Path:
    """The path that `--out` names; `UserError` if nothing can be written into the folder, or the
    nearest one above it that exists."""
    if not text:
        raise UserError("--out '': expected a name; '.' means the current folder")
    check_utf8(text, "--out")
    place, fault = writing_fault(folder)
    if fault is not None:
        raise UserError(f"--out {text}: {place}: {fault}; choose another place")
    return Path(text)


def writing_fault(folder: Path) -> tuple[Path, str | None]:
    """Try to write where a folder is or would be made, and leave nothing behind.

    Returns:
        The folder, or the nearest one above it that exists; and why nothing can be written there,
        None where it can.
    """
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return existing, None
    except OSError as error:
        return existing, error.strerror or str(error)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`, and move it to `out` if the block ends without an error.

    If the block raises, `out` stays as it was. The caller has made sure that an existing `out` may
    be replaced. Folders that killed writers of `out` have left beside it are removed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for leftover in out.parent.glob(f".{glob.escape(out.name)}.*"):
        # `file_held` raises an `OSError` for a folder that belongs to a living writer, perhaps on
        # another machine, and for one that has no lock yet, since it is just being made.
        with contextlib.suppress(OSError), file_held(leftover / WRITER_LOCK):
            # The folder of a writer killed between its two renames holds the only copy of the old
            # output.
            if out.exists() or not (leftover / "old").exists():
                shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        with new_file_held(staging / WRITER_LOCK):
            built = staging / "new"
            built.mkdir()
            with writing(out):
                yield built
            old = staging / "old"
            if out.exists():
                os.rename(out, old)
            try:
                os.rename(built, out)
            except BaseException:
                if old.exists():
                    os.rename(old, out)
                raise
    finally:
        # Only now that the lock is closed: a file server keeps the folder of an open file.
        shutil.rmtree(staging, ignore_errors=True)
