"""The page that asks the trained models, started as an application of CML; elsewhere call cml/run_demo.py itself."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())

from zeropods.cml_task import conclude, run_task


def main() -> None:
    """Run `cml/run_demo.py`; an application takes no arguments."""
    run_task("cml/run_demo.py")


if __name__ == "__main__":
    conclude(main)
