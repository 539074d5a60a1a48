"""Several runs of `textsql_train.py`, one after the other, by forks of a process that has imported everything.

    python tests/full/several.py COMMON... -- RANKS FOLDER FLAGS... -- RANKS FOLDER FLAGS...

Importing takes longer than they do. DeepSpeed does not begin twice in one process, so each rank has its own.
"""

from __future__ import annotations

import os
import socket
import sys

from zeropods.errors import guarded
from zeropods.threads import wait_passively


def main() -> int:
    wait_passively()
    import deepspeed  # noqa: F401

    from zeropods.train.run import fine_tune  # noqa: F401

    common, *runs = parts(sys.argv[1:])
    return max(run(int(ranks), [*common, "--outputdir", folder, *flags]) for ranks, folder, *flags in runs)


def parts(words: list[str]) -> list[list[str]]:
    """The words between the separators."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


def run(ranks: int, argv: list[str]) -> int:
    """Fork the ranks of a run and wait for them; returns the highest exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [fork(rank, ranks, port, argv) for rank in range(ranks)]
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def fork(rank: int, ranks: int, port: int, argv: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    from zeropods.train.arguments import parse_arguments
    from zeropods.train.run import fine_tune

    status = guarded(lambda: fine_tune(parse_arguments(argv), argv))
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
