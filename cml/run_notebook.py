"""Execute one notebook, as a job of CML or on any machine; the job fails if a cell does.

    python cml/run_notebook.py 01_prepare_dataset

Executed copies go to `build/notebooks/`, runs to ZEROPODS_RUNS. What an earlier job has finished is used again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if os.environ.get("IS_COMPOSABLE"):
    # A composable AMP lies in a folder of its own below the working one.
    for module in Path.cwd().glob("*/zeropods/cml_task.py"):
        os.chdir(module.parents[1])
sys.path.insert(0, os.getcwd())

from zeropods.cml_task import conclude, run_task, task_arguments


def main() -> None:
    """Run `tools/demo.py` on the notebook that the job's arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("notebook", help="its name, with or without .ipynb")
    arguments = parser.parse_args(task_arguments())
    run_task("tools/demo.py", arguments.notebook.removesuffix(".ipynb"))


if __name__ == "__main__":
    conclude(main)
