"""Processes that were started for a folder of a test."""

from __future__ import annotations

from pathlib import Path


def processes_naming(folder: Path) -> list[int]:
    """Those that name it in their environment or among their arguments."""
    return [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if str(folder) in _read(entry / "environ") or str(folder) in _read(entry / "cmdline")
    ]


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
