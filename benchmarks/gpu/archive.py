"""All records and the summary as one file, which appears whole."""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = "bench-gpu.tar.gz"
KEPT = ("cells/*.json", "summary.*", "machine.json", "runs/*/record.json", "runs/*/config.json", "runs/*/control.json")
KEPT_LOGS = ("runs/*/memory/*.csv", "runs/*/launch.log", "runs/*/train.log")
PREFIX = "bench-gpu"


def write_archive(out: Path) -> Path:
    """Pack what a reader needs; no weights, no data."""
    files = sorted({file for pattern in (*KEPT, *KEPT_LOGS) for file in out.glob(pattern)})
    handle, name = tempfile.mkstemp(dir=out, prefix=f".{ARCHIVE}.")
    try:
        with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as packed:
            for file in files:
                packed.add(file, arcname=f"{PREFIX}/{file.relative_to(out)}")
        os.chmod(name, 0o644)
        os.replace(name, out / ARCHIVE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return out / ARCHIVE
