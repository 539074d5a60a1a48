"""Several runs of a training script, one after the other, by forks of a process that has imported everything.

    python tests/full/several.py SCRIPT COMMON... -- RANKS FOLDER FLAGS... -- RANKS FOLDER FLAGS...

SCRIPT is `textsql_train.py`, which is also meant where the first word is a flag, or `causal_train.py`.
Importing takes longer than they do. DeepSpeed does not begin twice in one process, so each rank has its own.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from zeropods.errors import guarded
from zeropods.programs import free_port, wait_passively

if TYPE_CHECKING:
    from zeropods.train.tasks import Task

TEXT_TO_SQL = "textsql_train.py"


def main() -> int:
    wait_passively()
    import deepspeed  # noqa: F401

    import zeropods.train.run  # noqa: F401
    from zeropods.launch.notebook import task_of

    words = sys.argv[1:]
    task = task_of(TEXT_TO_SQL if words[0].startswith("--") else words.pop(0))
    common, *runs = parts(words)
    return max(run(int(ranks), task, [*common, "--outputdir", folder, *flags]) for ranks, folder, *flags in runs)


def parts(words: list[str]) -> list[list[str]]:
    """The words between the separators."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


def run(ranks: int, task: type[Task], argv: list[str]) -> int:
    """Fork the ranks of a run and wait for them; one that fails ends the others.

    Returns the highest exit status; that of a rank that was killed is below zero, which is for the tests that kill.
    """
    port = free_port()
    children = {fork(rank, ranks, port, task, argv) for rank in range(ranks)}
    statuses = []
    while children:
        child, status = os.wait()
        children.discard(child)
        statuses.append(os.waitstatus_to_exitcode(status))
        if statuses[-1]:
            # The others would wait for it.
            for other in children:
                os.kill(other, signal.SIGKILL)
    return max(statuses)


def fork(rank: int, ranks: int, port: int, task: type[Task], argv: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    from zeropods.train.arguments import parse_flags
    from zeropods.train.run import fine_tune

    def trained() -> None:
        fine_tune(task(parse_flags(task.flags, argv)), argv)

    status = guarded(trained)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
