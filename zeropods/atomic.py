"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file through a temporary one beside it, so that a reader sees the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as `write_text` does; NaN and infinity raise `ValueError`."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`, and put it in the place of `out` when the block ends well.

    If the block raises, `out` stays as it was. The caller has made sure that an `out` that is there
    already may be replaced.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        built = staging / "new"
        built.mkdir()
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
        shutil.rmtree(staging, ignore_errors=True)


def remove_unfinished(out: Path) -> None:
    """Remove what killed writers of `new_folder(out)` have left. To be called where no other can be writing."""
    for staging in out.parent.glob(f".{out.name}.*"):
        if staging.is_dir():
            shutil.rmtree(staging, ignore_errors=True)
