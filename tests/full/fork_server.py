"""A process that has imported all that training needs, and forks one that trains for each line that it reads.

    python -m tests.full.fork_server

A line is JSON: a training `script`, its `argv` and `environment`, and `said`, the file for its stderr; the number of
the process is the answer, and `said` with the suffix `.status` holds its exit status once it has ended. Importing takes
longer than most tests train.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from zeropods.errors import guarded
from zeropods.programs import wait_passively

SAID: dict[int, str] = {}
"""Where each child's words are."""


def main() -> None:
    # Libraries say things on stdout while they are imported.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    wait_passively()
    import deepspeed  # noqa: F401

    import causal_train
    import textsql_train
    import zeropods.train.causal  # noqa: F401
    from zeropods.train.run import fine_tune  # noqa: F401

    mains = {module.__name__: module.main for module in (textsql_train, causal_train)}
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        order = json.loads(line)
        # A child that ends at once is reaped only when it is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        child = os.fork()
        if child == 0:
            become(order, mains[order["script"].removesuffix(".py")])
        SAID[child] = order["said"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        print(child, file=answers, flush=True)


def become(order: dict[str, Any], train: Any) -> None:
    """What the training script is as a process of its own; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    with open(order["said"], "wb") as said, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [order["script"], *order["argv"]]
    status = guarded(train)
    sys.stderr.flush()
    os._exit(status)


def reap(number: int, frame: FrameType | None) -> None:
    while SAID:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            # A second signal has called this function within this call, and has reaped the last.
            return
        if child == 0:
            return
        path = Path(f"{SAID.pop(child)}.status")
        path.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
        path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    main()
