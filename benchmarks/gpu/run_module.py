"""Run a module of the project as a program: `python benchmarks/gpu/run_module.py MODULE WORDS...`.

A server forks scripts, not modules; this is the script that it forks.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module that is named first, with the words that follow."""
    # Imports must not find the folder of this file, whose modules share names with others, before
    # the project.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
