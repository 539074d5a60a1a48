"""What a training script does: parse the flags and train. It imports torch only after the threads are set up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zeropods.programs import own_programs_first, use_own_cache, wait_passively

if TYPE_CHECKING:
    from zeropods.train.tasks import Task


def run_script(script: str) -> int:
    """Run a script of the project, by its file name, with this process's arguments; returns the exit status."""
    wait_passively()
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    from zeropods.measure.environment import process_age_seconds

    return run_parsed(task_of_script(script), sys.argv, process_age_seconds)


def task_of_script(script: str) -> type[Task]:
    """What runs of a script have of their own; a run of one task loads nothing of the other."""
    if script == "causal_train.py":
        from zeropods.train.causal import Causal

        return Causal
    from zeropods.train.text2sql import TextToSQL

    return TextToSQL


def run_parsed(task: type[Task], argv: Sequence[str], age_seconds: Callable[[], float] = lambda: 0.0) -> int:
    """Train as `argv` says, the script's name first; an error that all ranks share is said by one of them.

    Args:
        age_seconds: how long ago the run's own process began; 0 where it is one among others of a process.
    """
    from zeropods.train.arguments import parse_flags
    from zeropods.train.processes import SharedError
    from zeropods.train.run import fine_tune

    try:
        fine_tune(task(parse_flags(task.flags, argv[1:])), list(argv), age_seconds())
    except SharedError as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        return error.exit_status
    return 0
