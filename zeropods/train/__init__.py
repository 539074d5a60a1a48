"""Fine-tuning on any number of ranks: one engine for both training scripts, whose runs differ in their `tasks.Task`.

`run_script` is what a script does: parse the flags and train. It imports torch only after the threads are set up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zeropods.programs import own_programs_first, use_own_cache, wait_passively

if TYPE_CHECKING:
    from zeropods.train.tasks import Task


def run_script(task: Callable[[], type[Task]]) -> int:
    """Run a script of the project with this process's arguments; returns the exit status.

    Args:
        task: imports what the script's runs have of their own, once threads are set up.
    """
    wait_passively()
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    from zeropods.measure.environment import process_age_seconds
    from zeropods.train.imports import quick_imports

    with quick_imports(sys.argv):
        kind = task()
    return run_parsed(kind, sys.argv, process_age_seconds)


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
