"""The folder of a generated sample: written once, never over anything else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from zeropods.atomic import new_folder
from zeropods.data.writing import writing
from zeropods.errors import UserError


def holds_sample(out: Path, names: Collection[str]) -> bool:
    """Whether all files of a sample are in `out`; `UserError` where it holds anything else."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise UserError(f"{out}: a file; name a folder")
    found = {path.name for path in out.iterdir()}
    if found and not found >= set(names):
        raise UserError(f"{out}: holds {min(found)!r}, not a sample; name a new folder or empty this one")
    return bool(found)


def write_once(out: Path, files: Mapping[str, bytes], seed: int) -> bool:
    """Write the files of a sample; False where `out` holds just these already, `UserError` where it holds others."""
    if holds_sample(out, files.keys()):
        _require_equal(out, files, seed)
        return False
    with new_folder(out) as folder:
        for name, content in files.items():
            with writing(out / name):
                (folder / name).write_bytes(content)
    return True


def _require_equal(out: Path, files: Mapping[str, bytes], seed: int) -> None:
    for name, content in files.items():
        if (out / name).read_bytes() != content:
            raise UserError(f"{out}: {name!r} is not that of the sample of seed {seed}; name a new folder")
