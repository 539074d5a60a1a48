"""What a training script does: parse the flags, run, and say nothing more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from zeropods.extension_cache import use_own_cache
from zeropods.own_programs import own_programs_first
from zeropods.threads import wait_passively
from zeropods.train.run_arguments import RunArguments


def run_script(kind: type[RunArguments]) -> int:
    """Run a script of the project with this process's arguments; returns the exit status."""
    wait_passively()
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    from zeropods.measure.environment import process_age_seconds

    return run_parsed(kind, sys.argv, process_age_seconds)


def run_parsed(kind: type[RunArguments], argv: Sequence[str], age_seconds: Callable[[], float] = lambda: 0.0) -> int:
    """Train as `argv` says, the script's name first; an error that all ranks share is said by one of them.

    Args:
        age_seconds: how long ago the run's own process began.
    """
    from zeropods.train.flags import parse_flags
    from zeropods.train.processes import SharedError
    from zeropods.train.run import fine_tune

    try:
        flags = parse_flags(kind, argv[1:], script=kind.script, description=kind.description)
        fine_tune(flags, list(argv), age_seconds())
    except SharedError as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        return error.exit_status
    return 0
