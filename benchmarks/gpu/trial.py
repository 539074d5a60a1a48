"""Try, in seconds and without data, what training and prediction use of torch, transformers and
DeepSpeed.

    python -m benchmarks.gpu.trial [deepspeed]

It imports what they import, and makes the arguments that transformers' trainer gets, as a run does.
Where a version lacks something of that, the program ends with an error that says what.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module

from zeropods.train.device import choose_attention
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.job import training_arguments
from zeropods.train.text2sql import TextToSQL

OTHERS = ("zeropods.train.run", "zeropods.evaluate.generate")
"""Modules that training and prediction import besides."""


def main() -> None:
    """Import the modules, and those named on the command line; make a run's arguments."""
    for name in (*OTHERS, *sys.argv[1:]):
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="zeropods-trial-") as work:
        task = TextToSQL(TextToSQLArguments(init="random", model_id="t5-tiny", outputdir=work))
        task.precision = "fp32"
        training_arguments(task)
        choose_attention()


if __name__ == "__main__":
    main()
