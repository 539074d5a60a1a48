"""Compile the DeepSpeed operations that run on the CPU, once; torch keeps them in its cache of extensions.

    .venv/bin/python tools/compile_ops.py

Otherwise the first training run would compile them, in the middle of what it measures. They are compiled
again if the version of ninja differs, so .venv/bin must come first on PATH.
"""

from __future__ import annotations

from zeropods.programs import compile_in_turns, prepare_compiling


def main() -> None:
    prepare_compiling()
    compile_in_turns()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
