"""Compile the DeepSpeed operations that run on the CPU, once; torch keeps them in its cache of extensions.

    .venv/bin/python tools/compile_ops.py

The first training run would compile them otherwise, in the middle of what it measures. They are compiled
again where the interpreter's folder or the version of ninja differs, so .venv/bin must come first on PATH.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from zeropods.own_programs import own_programs_first

OPERATIONS = ("CPUAdamBuilder", "ShareMemCommBuilder")
STALE_SECONDS = 600


def main() -> int:
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    from deepspeed.accelerator import get_accelerator

    for name in OPERATIONS:
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            wait_for_lock(builder.NAME)
            builder.load(verbose=False)
    return 0


def wait_for_lock(operation: str) -> None:
    """A compilation that was killed leaves its lock, for which torch would wait without end."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(operation, verbose=False)) / "lock"
    while lock.exists():
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            print(f"{lock}: older than {STALE_SECONDS} s; its compilation was killed; removed")
            lock.unlink()
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
