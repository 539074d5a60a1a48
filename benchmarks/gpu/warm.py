"""A process that has imported what training needs, and waits for the script that it is to run.

    python -m benchmarks.gpu.warm DESCRIPTOR

Imports take as long as a short cell trains. While one cell has the GPU, the process of the next one
imports; it opens no CUDA context before it knows its script, so it takes no memory of the GPU.
Unlike a fork, it may use CUDA.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from zeropods.launch.forks import IMPORTED
from zeropods.pods.processes import start_bound
from zeropods.programs import child_environment, prepare_compiling, wait_passively
from zeropods.train import quick_imports
from zeropods.train.flags import PROJECT

MESSAGE_BYTES = 1 << 18
STREAMS = 3


class WarmProcess:
    """A process that waits for its script."""

    def __init__(self) -> None:
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", __spec__.name, str(other.fileno())]
        self.process: subprocess.Popen[bytes] = start_bound(
            argv,
            cwd=PROJECT,
            pass_fds=(other.fileno(),),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        other.close()

    def run(
        self, argv: Sequence[str], variables: Mapping[str, str], streams: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Let the process run a script.

        Args:
            argv: the script's path and its arguments.
            variables: environment variables that the script gets on top of this process's own.
            streams: file descriptors that become its stdin, stdout and stderr.

        Returns:
            The process; None if it has ended meanwhile, so that another one has to run the script.
        """
        order = {
            "argv": list(argv),
            "environment": {**child_environment(), **variables},
            "folder": os.getcwd(),
        }
        with self._connection as connection:
            if self.process.poll() is not None:
                return None
            try:
                socket.send_fds(connection, [json.dumps(order).encode()], list(streams))
            except OSError:
                return None
        return self.process

    def end(self) -> None:
        """End a process that was given nothing to run."""
        self._connection.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Import, wait for a script, and become the process that runs it."""
    wait_passively()
    prepare_compiling()
    with quick_imports():
        for name in IMPORTED:
            _import(name)
    # It uses scipy, which the block above hides from transformers.
    _import("benchmarks.gpu.control")
    connection = socket.socket(fileno=int(sys.argv[1]))
    message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, STREAMS)
    connection.close()
    if not message:
        # The process that was to say what to run has ended.
        return
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    order = json.loads(message)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _import(name: str) -> None:
    """Import a module; where that fails, the script that needs it will say so."""
    with suppress(ImportError):
        import_module(name)


if __name__ == "__main__":
    main()
