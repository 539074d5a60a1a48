"""Compile the DeepSpeed operations that run on the CPU, once; torch keeps them in its cache of extensions.

    .venv/bin/python tools/compile_ops.py

The first training run would compile them otherwise, in the middle of what it measures. They are compiled
again where the version of ninja differs, so .venv/bin must come first on PATH.
"""

from __future__ import annotations

import os

from zeropods.programs import compile_in_turns, own_programs_first, use_own_cache


def main() -> None:
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    compile_in_turns()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
