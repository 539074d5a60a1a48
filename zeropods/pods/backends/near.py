"""The other side of `far`: takes a worker's environment from stdin, runs the worker, and ends it with stdin."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

from zeropods.errors import UserError, guarded

POLL_SECONDS = 1.0
END_SECONDS = 12.0


def main() -> int:
    """Run `sys.argv[1:]` with what stdin says; returns its exit status."""
    told = json.loads(sys.stdin.buffer.readline() or b"null")
    if not isinstance(told, dict):
        raise UserError("zeropods.pods.backends.near: nothing on stdin; it is started by zeropods pods up --hostfile")
    environment = {**os.environ, **told}
    worker = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    while worker.poll() is None:
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0] and not os.read(sys.stdin.fileno(), 4096):
            break
    worker.terminate()
    try:
        return worker.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


if __name__ == "__main__":
    sys.exit(guarded(main))
