"""Fine-tuning on any number of ranks, in one way for both training scripts.

What differs between their runs is a `job.Task`; what differs between techniques is an engine, in
`engines/`. `run_script` is all that a script does: parse the flags and train. It imports torch only
after the threads are set up.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

from zeropods.chatter import without_chatter
from zeropods.errors import UserError
from zeropods.pods.gpus import take_pods_gpus
from zeropods.programs import prepare_compiling, wait_passively
from zeropods.train.early_exit import no_success_by_exit

UNUSED = ("datasets", "scipy", "sklearn")
"""Packages that transformers imports wherever they are installed. A run uses none of them, except
to prepare raw data."""


def run_script(on_end: Callable[[Path], object] | None = None) -> int:
    """Run a script of the project with this process's arguments, and return its exit status.

    Flags, and the files that they name, are checked before torch is imported, which takes many
    seconds.

    Args:
        on_end: called with the run folder when a run that nothing supervises has its record.

    Raises:
        UserError: the call is wrong, or the run has failed. An error that all ranks share is raised
            on rank 0 only; the others return its exit status.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    # Before torch is imported: it reads some of what these set only then.
    take_pods_gpus()
    wait_passively()
    without_chatter()
    prepare_compiling()
    from zeropods.measure.environment import process_age_seconds
    from zeropods.train.deepspeed_config import read_config
    from zeropods.train.deepspeed_config_check import check_run
    from zeropods.train.flags import SCRIPTS, parse_flags

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        flags = parse_flags(SCRIPTS[Path(sys.argv[0]).name], sys.argv[1:]).divided_among(ranks)
        if is_first:
            if flags.deepspeed is not None:
                config = read_config(Path(flags.deepspeed))
                check_run(config, flags, ranks)
            flags.check_inputs()
    except UserError as error:
        # All ranks have the same flags: only rank 0 says what is wrong.
        if is_first:
            raise
        return error.exit_status
    with no_success_by_exit():
        with quick_imports():
            resolve_name(flags.task_class)
            import_module("zeropods.train.run")
            resolve_name(flags.engine_class)
        return run_argv(sys.argv, process_age_seconds, on_end)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Make imports within this block faster: hide the packages that transformers need not import.

    Imports take most of the time of a small run, and pods on one machine share its cores for them.
    Modules are loaded by the thousand and none of them is garbage, so the garbage collector does
    not scan them, now or later.
    """
    hidden = [name for name in UNUSED if name not in sys.modules]
    gc.disable()
    # The import system finds no module whose entry is None.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        gc.freeze()
        gc.enable()


def run_argv(
    argv: Sequence[str],
    age_seconds: Callable[[], float] = lambda: 0.0,
    on_end: Callable[[Path], object] | None = None,
) -> int:
    """Train as `argv` says, and return the exit status: 0, or on ranks other than 0 that of an
    error that all ranks share.

    Args:
        argv: the script's name, and its arguments.
        age_seconds: returns how many seconds ago the run's process began; 0 where several runs
            share a process.
        on_end: as for `run_script`.

    Raises:
        UserError: as for `run_script`.
    """
    from zeropods.train.flags import SCRIPTS, parse_flags
    from zeropods.train.processes import SharedError
    from zeropods.train.run import fine_tune

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    flags = parse_flags(SCRIPTS[Path(argv[0]).name], argv[1:]).divided_among(ranks)
    try:
        task = resolve_name(flags.task_class)(flags)
        task.on_end = on_end
        fine_tune(task, list(argv), age_seconds())
    except SharedError as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        return error.exit_status
    return 0
