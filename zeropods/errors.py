"""Errors that a user can fix, and how a command ends when they occur."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from signal import SIGHUP, SIGTERM, Signals

WORDS_FOR = {
    IsADirectoryError: "a folder; name a file",
    NotADirectoryError: "a file, or below one; name a folder",
}
"""What is said of a path of the wrong kind, with its remedy; the system's words have none."""
HIDDEN_NAME = re.compile(r"(^|/)\.([^/]+)\.\w{8}(/new)?(?=/|$)")
"""Name of what is being written, `.NAME.abcdefgh` or `.NAME.abcdefgh/new`; group 2 is its final
name."""
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells have it."""


class UserError(Exception):
    """An error whose message, one line, gives the place, the value and the remedy."""

    exit_status = 1
    """Exit status of a command that ends with this error."""


def told_differences(
    old: Mapping[str, object], new: Mapping[str, object], keys: Sequence[str]
) -> str:
    """The settings with these keys, each as it was and as it is: `prompt schema -> question`."""
    changes = [f"{key} {_setting(old.get(key))} -> {_setting(new.get(key))}" for key in keys]
    return ", ".join(changes)


def _setting(value: object) -> str:
    """A setting as text for people."""
    values = value if isinstance(value, list | tuple) else [value]
    return " and ".join(str(part) for part in values if part is not None) or "none"


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit status; None of a command is status 0.

    A `UserError` or an error of the operating system becomes one line on stderr and status 1, or
    the error's own; Ctrl-C becomes status 130; a command that SIGTERM or SIGHUP ends in an orderly
    way keeps its status. Anything else is a bug of ours and keeps its traceback.
    """
    _open_closed_streams()
    # A path that the terminal's encoding cannot show is no reason to fail once the work is done.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "backslashreplace":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command() or 0
    except UserError as error:
        return _fail(str(error), error.exit_status)
    except BrokenPipeError:
        # Nobody reads the output any more, as after `| head`. Python would complain about it on
        # stderr when it flushes stdout at its end.
        sys.stderr.close()
        return 1
    except OSError as error:
        # A file appears whole: until then it has a hidden name beside its final one
        # (`files.write_text`, `new_folder`).
        place = re.sub(HIDDEN_NAME, r"\1\2", str(error.filename or ""))
        words = WORDS_FOR.get(type(error), error.strerror or error)
        return _fail(f"{place}: {words}" if place else f"{words}")
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except SystemExit as ended:
        if ended.code in (128 + SIGTERM, 128 + SIGHUP):
            _fail(f"ended by {Signals(int(ended.code) - 128).name}")
        raise


def _open_closed_streams() -> None:
    """Lead standard streams that are closed, as with `>&-`, to /dev/null.

    Python then has None in their place. A file that is opened later would get the stream's number,
    and a child process would write its output into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, which is this one.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(os.devnull, "w"))


def _fail(line: str, status: int = 1) -> int:
    """Print a message as one line on stderr, and return the status."""
    print(f"zeropods: {' '.join(line.split())}", file=sys.stderr)
    return status
