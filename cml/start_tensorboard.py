"""TensorBoard over all runs, started as an application of CML; elsewhere call cml/run_tensorboard.py itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("IS_COMPOSABLE"):
    # A composable AMP lies in a folder of its own below the working one.
    for module in Path.cwd().glob("*/zeropods/cml_task.py"):
        os.chdir(module.parents[1])
sys.path.insert(0, os.getcwd())

from zeropods.cml_task import conclude, run_task


def main() -> None:
    """Run `cml/run_tensorboard.py`, after making the folder of runs if needed; an application takes no arguments."""
    os.makedirs("runs", exist_ok=True)
    run_task("cml/run_tensorboard.py")


if __name__ == "__main__":
    conclude(main)
