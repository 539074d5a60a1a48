"""How a cell's programs run: as forks of a server that has imported what they need, where there is no GPU and importing
takes longer than a cell trains; otherwise each in a process of its own, as users start them.

    python benchmarks/gpu/jobs.py MODULE WORDS...     # run a module as a script, which is what such a server forks
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from zeropods.launch.forks import fork, own_server
from zeropods.launch.local import Started, start_child, to_end
from zeropods.measure.record import LAUNCH_LOCK, Record
from zeropods.measure.run_folder import locked
from zeropods.programs import child_environment
from zeropods.train.arguments import PROJECT

LAST_CHARACTERS = 600


def train(flags: Sequence[str], folder: Path, seconds: float, without: str | None = None) -> Record:
    """Run textsql_train.py into a run folder; a run that takes longer than `seconds` is ended, and still has a record.

    Args:
        without: a measure in `without.TAKEN` that is taken away.

    Raises:
        UnopenedError: the run ended before it had opened its folder.
    """
    script = [str(PROJECT / "textsql_train.py")] if without is None else ["-m", "benchmarks.gpu.without", without]
    with locked(folder, LAUNCH_LOCK):
        return to_end(lambda output: [_started([*script, *flags], output)], folder, seconds)


def call(module: str, words: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a module as a program; returns its status and the end of its output. No process of it is left."""
    with tempfile.TemporaryFile() as output:
        process = _started(["-m", module, *words], output)
        try:
            status, why = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            status, why = 1, f"took longer than {seconds:g} s, and was ended"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace").strip()
    return status, why or text[-LAST_CHARACTERS:]


def _started(words: Sequence[str], output: IO[bytes]) -> Started:
    """Start a script or module, as a fork where there is a server for it."""
    server, script = own_server(), [__file__, *words[1:]] if words[0] == "-m" else words
    with open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), output.fileno(), output.fileno())
        forked = None if server is None else fork(server, script, child_environment(), streams)
    return forked or start_child([sys.executable, *words], output)


def main() -> None:
    """Run a module of the project with the words that follow its name."""
    # Imports must not find the folder of this file, whose modules share names with others, before the project.
    sys.path[0], sys.argv = str(PROJECT), sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
