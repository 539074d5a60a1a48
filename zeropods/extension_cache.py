"""Where torch keeps the extensions that DeepSpeed lets it compile, and the lock of one that is being compiled."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"
STALE_SECONDS = 600.0
"""No compilation takes as long. An older lock was left by one that was killed; torch would wait for it for ever."""
ORPHANED_SECONDS = 180.0
"""The same for a lock that no process of this machine holds: one of another pod may, where the folder is shared."""


def use_own_cache() -> None:
    """Let torch compile into this Python's own environment, unless the user has said where.

    Its usual cache is the user's: two environments that share it compile everything anew whenever they take turns.
    """
    own = _own_folder(os.environ)
    if own is not None:
        os.environ[VARIABLE] = str(own)


def extension_cache() -> Path:
    """The folder in which this Python's torch keeps what it has compiled, without importing torch.

    Source: `_get_build_directory` in torch/utils/cpp_extension.py (2.13).
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return _own_folder(os.environ) or root / f"{python}_{_accelerator()}"


def is_stale(lock: Path) -> bool:
    """Whether the holder of one of torch's own locks is gone; torch would wait for it for ever."""
    try:
        age = time.time() - lock.stat().st_mtime
        return age > (STALE_SECONDS if _is_open(lock) else ORPHANED_SECONDS)
    except FileNotFoundError:
        return False


def _own_folder(environment: Mapping[str, str]) -> Path | None:
    """A folder in the virtual environment; None outside one, or where it is not ours or not wanted."""
    is_own = sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK)
    return Path(sys.prefix) / "torch_extensions" if is_own and VARIABLE not in environment else None


def _is_open(file: Path) -> bool:
    """Whether a process of this machine that we may look into has the file open, as torch's FileBaton has."""
    inode = os.stat(file)
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samestat(entry.stat(), inode):
                return True
        except OSError:
            continue
    return False


def _accelerator() -> str:
    """What torch was built for, as its cache names it: `cpu`, `cu126`, `rocm63`."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    for name, prefix in (("hip", "rocm"), ("cuda", "cu")):
        stated = re.search(rf"^{name}\b.*= *'([^']+)'", text, re.MULTILINE)
        if stated:
            return prefix + stated[1].replace(".", "")
    return "cpu"
