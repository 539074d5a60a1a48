"""`exit()` that is called inside a run, not by its script: it must not look like success."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from zeropods.errors import UserError
from zeropods.measure.heartbeat import place_of


@contextlib.contextmanager
def no_success_by_exit() -> Iterator[None]:
    """Make an error of `exit()` with status 0 in this block: the run has then not finished.

    Libraries call `exit()`, such as DeepSpeed's autotuner, and so may a signal's handler. With
    another status it ends the process as usual.

    Raises:
        UserError: `exit()` was called with status 0; the message says where.
    """
    try:
        yield
    except SystemExit as ended:
        if not is_success(ended.code):
            raise
        raise UserError(
            f"{exit_call(ended)} before the run was finished; nothing in a run may end it so"
        ) from ended


def is_success(code: object) -> bool:
    """Whether a process that ends by `SystemExit` with this code has exit status 0."""
    if code is None:
        return True
    # The system keeps 8 bits of a status.
    return isinstance(code, int) and code % 256 == 0


def exit_call(ended: SystemExit) -> str:
    """What `exit()` was called with, and where: `exit(0) was called at FILE:LINE FUNCTION`."""
    callers = []
    for frame, _ in traceback.walk_tb(ended.__traceback__):
        # `exit` itself is a function of Python's module `site`.
        if frame.f_globals.get("__name__") != "_sitebuiltins":
            callers.append(frame)
    shown = "" if ended.code is None else repr(ended.code)
    return f"exit({shown}) was called at {place_of(callers[-1])}"
