"""Scripts as CML runs them: statement by statement in a kernel.

A script's work therefore runs in its own process. In the kernel `sys.argv` is the kernel's, the
arguments of a job are in JOB_ARGUMENTS, `__file__` may be missing, an event loop runs already, and
any SystemExit fails the job, even one of status 0. The working directory is the project's.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zeropods.errors import UserError, guarded
from zeropods.programs import in_kernel

ARGUMENTS = "JOB_ARGUMENTS"
OLDEST_PYTHON = (3, 11)
"""The oldest Python for which all of requirements.txt can be installed."""
TASK_GRACE_SECONDS = 30.0
"""Seconds from SIGINT to SIGKILL."""


class TaskError(UserError):
    """A task's process did not end with status 0."""

    def __init__(self, words: Sequence[str], status: int) -> None:
        super().__init__(f"{shlex.join(words)}: ended with status {status}; see its output above")
        # A process that a signal ended has minus its number; shells then report 128 plus it.
        self.exit_status = status if status > 0 else 128 - status


def task_arguments() -> list[str]:
    """The script's arguments, in a kernel or elsewhere."""
    if in_kernel():
        return shlex.split(os.environ.get(ARGUMENTS, ""))
    return sys.argv[1:]


def project() -> Path:
    """The project's folder, in which a task has to be started."""
    folder = Path.cwd()
    if not (folder / "zeropods" / "cml_task.py").is_file():
        remedy = "start this where requirements.txt and zeropods/ are"
        raise UserError(f"{folder}: not the project's folder; {remedy}")
    return folder


def run_task(*words: str) -> None:
    """Run Python with the arguments `words` in a process and pass on its output.

    Ctrl-C, or an interrupt of the kernel, interrupts that process too.

    Raises:
        TaskError: the process fails.
    """
    # The project comes first on the path, so jobs need no installation of it.
    path = str(project())
    usual_path = os.environ.get("PYTHONPATH")
    if usual_path:
        path = f"{path}{os.pathsep}{usual_path}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )
    try:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
        status = process.wait()
    finally:
        # The process still runs only where an error, such as an interrupt, has ended the loop.
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(TASK_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if status:
        raise TaskError(words, status)


def conclude(command: Callable[[], int | None]) -> None:
    """Run a command as a script's last line.

    In a kernel an exception fails the job, elsewhere the status does.
    """

    def checked_command() -> int | None:
        require_python()
        return command()

    if in_kernel():
        checked_command()
    else:
        sys.exit(guarded(checked_command))


def require_python() -> None:
    """Refuse a Python that is too old, in which pip would only say that a package is not there."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:2]))
        remedy = "choose a runtime with Python 3.11 or newer"
        raise UserError(f"Python {version}: zeropods needs 3.11 or newer; {remedy}")
