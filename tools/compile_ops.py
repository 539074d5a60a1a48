"""Compile the DeepSpeed operations that run on the CPU, once; torch keeps them in its cache of
extensions.

    python3 tools/compile_ops.py

Otherwise the first training run would compile them, in the middle of what it measures. They are
compiled again if the version of ninja differs, so .venv/bin must come first on PATH. It needs torch
and DeepSpeed, a C++ compiler, Python's headers and ninja; no CUDA toolkit, and not that this
project is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Compile them with this interpreter's programs, or find them up to date."""
    # In a clone that is not installed, Python looks for modules in this file's own folder only.
    sys.path.insert(0, str(PROJECT))
    from zeropods.programs import compile_in_turns, prepare_compiling

    prepare_compiling()
    compile_in_turns()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
