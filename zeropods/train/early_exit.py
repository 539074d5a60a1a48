"""`exit()` that is called inside a run by something else than the script itself: it must not look like success."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from zeropods.errors import UserError
from zeropods.measure.heartbeat import place_of


@contextlib.contextmanager
def no_success_by_exit() -> Iterator[None]:
    """Make an error of `exit()` with status 0 in this block, wherever it is called: a run has then not finished.

    Libraries do so, such as DeepSpeed's autotuner, and so may a signal's handler.
    """
    try:
        yield
    except SystemExit as ended:
        if not is_success(ended.code):
            raise
        raise UserError(f"{exit_call(ended)} before the run was finished; nothing in a run may end it so") from ended


def is_success(code: object) -> bool:
    """Whether a process that ends by `SystemExit` with this code has exit status 0, of which 8 bits are kept."""
    return code is None or (isinstance(code, int) and code % 256 == 0)


def exit_call(ended: SystemExit) -> str:
    """What `exit()` was called with, and where: `exit(0) was called at FILE:LINE FUNCTION`."""
    frames = [frame for frame, _ in traceback.walk_tb(ended.__traceback__)]
    # `exit` itself is a function of Python's module `site`.
    callers = [frame for frame in frames if frame.f_globals.get("__name__") != "_sitebuiltins"]
    shown = "" if ended.code is None else repr(ended.code)
    return f"exit({shown}) was called at {place_of(callers[-1])}"
