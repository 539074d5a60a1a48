"""DeepSpeed's operations for the CPU: compiled on this machine, or able to be; found out without importing torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from zeropods.extension_cache import extension_cache
from zeropods.extension_turns import is_taken

CPU_ADAM = "cpu_adam"
"""Needed by optimizer offload."""
OPERATIONS = (CPU_ADAM,)


def operation_states() -> dict[str, str]:
    """For each operation `compiled`, `compilable`, `compiling` or `impossible: WHAT IS MISSING`."""
    cache = extension_cache()
    impossible = _impossible()
    return {name: _state(cache / name, name, impossible) for name in OPERATIONS}


def _state(folder: Path, name: str, impossible: str) -> str:
    if _prebuilt(name):
        return "compiled"
    if (folder / f"{name}.so").is_file():
        return "compiled"
    return "compiling" if is_taken(folder) else impossible or "compilable"


def _prebuilt(name: str) -> bool:
    """Whether DeepSpeed was installed with this operation compiled (`DS_BUILD_OPS`)."""
    folder = _package("deepspeed")
    return folder is not None and any((folder / "ops").glob(f"*/{name}_op*.so"))


def _impossible() -> str:
    """What a compilation lacks on this machine, or nothing."""
    compiler = os.environ.get("CXX", "c++")
    lacks = {
        "C++ compiler": shutil.which(compiler) is None,
        "Python.h": not Path(sysconfig.get_path("include"), "Python.h").is_file(),
        "ninja": shutil.which("ninja") is None and not Path(sys.executable).with_name("ninja").is_file(),
    }
    missing = [name for name, lack in lacks.items() if lack]
    return f"impossible: no {', no '.join(missing)}" if missing else ""


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None
