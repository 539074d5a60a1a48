"""Errors that a user can mend, and how a command ends on them."""

from __future__ import annotations

import sys
from collections.abc import Callable


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


def _fail(line: str, status: int = 1) -> int:
    print(f"zeropods: {' '.join(line.split())}", file=sys.stderr)
    return status
