"""The other side of `far`: takes what a worker is told from stdin, runs the worker, and ends it with stdin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

from zeropods.errors import UserError, guarded
from zeropods.pods.processes import end_with_parent

END_SECONDS = 12.0
"""A worker takes up to 10 to end everything under it."""


def main() -> int:
    """Run `sys.argv[1:]` with what stdin says as its environment; returns its exit status."""
    told = _told(sys.stdin.buffer.readline())
    parent = os.getpid()
    worker = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **told},
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
    )
    threading.Thread(target=_end_with_stdin, args=(worker,), daemon=True).start()
    return worker.wait()


def _told(line: bytes) -> dict[str, str]:
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise UserError("zeropods.pods.backends.near: stdin says nothing; 'zeropods pods up --hostfile' starts it")
    return told


def _end_with_stdin(worker: subprocess.Popen[bytes]) -> None:
    """End the worker when the connection ends, however that came about."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    worker.terminate()
    time.sleep(END_SECONDS)
    worker.kill()


if __name__ == "__main__":
    sys.exit(guarded(main))
