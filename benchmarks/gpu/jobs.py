"""How a cell's programs run: as forks of a server that has imported what they need, where there is
no GPU and importing takes longer than a cell trains; otherwise each in a process of its own, as
users start them, or in one that has imported everything beforehand (`prefetching`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO

from benchmarks.gpu.warm import WarmProcess
from zeropods.launch.forks import fork, own_server
from zeropods.launch.local import Started, to_end
from zeropods.measure.record import LAUNCH_LOCK, Record
from zeropods.measure.run_folder import locked
from zeropods.pods.processes import start_bound
from zeropods.programs import child_environment

LAST_CHARACTERS = 600
RUN_MODULE = Path(__file__).with_name("run_module.py")
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def train(
    argv: Sequence[str],
    folder: Path,
    seconds: float,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Record:
    """Run a training script into a run folder; a run that takes longer than `seconds` is ended, and
    still has a record.

    Args:
        argv: the script and its flags, or `-m`, a module and its words.
        variables: environment variables that the script gets on top of this process's own.

    Raises:
        UnopenedError: the run ended before it had opened its folder.
    """
    with locked(folder, LAUNCH_LOCK):
        return to_end(lambda output: [_started(argv, output, variables)], folder, seconds)


def call(
    module: str,
    words: Sequence[str],
    seconds: float,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> tuple[int, str]:
    """Run a module as a program; returns its status and the end of its output. No process of it is
    left."""
    with tempfile.TemporaryFile() as output:
        process = _started(["-m", module, *words], output, variables)
        try:
            status = process.wait(seconds)
            why = ""
        except subprocess.TimeoutExpired:
            status = 1
            why = f"took longer than {seconds:g} s, and was ended"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace").strip()
    return status, why or text[-LAST_CHARACTERS:]


@contextmanager
def prefetching() -> Iterator[None]:
    """Within this block the process of the next program imports while the one before it runs; for
    machines with a GPU, where programs are not forked."""
    if own_server() is not None:
        yield
        return
    _waiting.append(WarmProcess())
    try:
        yield
    finally:
        while _waiting:
            _waiting.pop().end()


_waiting: list[WarmProcess] = []
"""The process for the next program, within `prefetching`."""


def _started(words: Sequence[str], output: IO[bytes], variables: Mapping[str, str]) -> Started:
    """Start a script or module: as a fork where there is a server for it, in a process that waits
    for it, or else anew.

    Args:
        words: a script and its flags, or `-m`, a module and its words.
    """
    # A process that is there already cannot be given `-m`: a script runs the module in it.
    script = list(words)
    if words[0] == "-m":
        script = [str(RUN_MODULE), *words[1:]]
    environment = {**child_environment(), **variables}
    started: Started | None = None
    with open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), output.fileno(), output.fileno())
        server = own_server()
        if server is not None:
            started = fork(server, script, environment, streams)
        elif _waiting:
            # The next one imports while this one runs.
            started = _waiting.pop().run(script, variables, streams)
            _waiting.append(WarmProcess())
    if started is None:
        # There is neither, or it cannot run this: see `fork` and `WarmProcess.run`.
        argv = [sys.executable, *words]
        started = start_bound(argv, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return started
