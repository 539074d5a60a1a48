"""Errors that a user can mend, and how a command ends on them."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType


class UserError(Exception):
    """One line that says the place, the value and the remedy."""

    exit_status = 1
    """Exit status of a command that ends with it."""


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit status.

    A `UserError` or an error of the operating system becomes one line on stderr and status 1, or the error's own;
    Ctrl-C becomes status 130. Anything else is a defect of ours and keeps its traceback.
    """
    try:
        return command() or 0
    except UserError as error:
        return _fail(str(error), error.exit_status)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130


@contextlib.contextmanager
def terminable(*, saving: signal.Signals | None = None) -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, so that its record is written.

    Args:
        saving: the signal that asks for a save instead; where it is SIGTERM, that stays as it is.
    """
    if saving == signal.SIGTERM:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(line: str, status: int = 1) -> int:
    print(f"zeropods: {' '.join(line.split())}", file=sys.stderr)
    return status
