"""Runs with a fault in training, one after the other, of ranks that this process forks.

    python -m tests.full.misbehaving FLAGS... -- RANKS FOLDER -- RANKS FOLDER

On one rank it asks for more memory than there is, in its third step. Of several, rank 0 meets the others at a barrier
after its third step, and they pass it by.
"""

import os
import sys
from typing import Any

from tests.full.forks import place
from zeropods.errors import guarded
from zeropods.programs import free_port, wait_passively

STEP = 3


def main() -> int:
    wait_passively()
    import torch

    from zeropods.train.meter import Meter

    on_step_end = Meter.on_step_end

    def faulty(self: Meter, args: Any, state: Any, control: Any, **about: Any) -> None:
        on_step_end(self, args, state, control, **about)
        if state.global_step == STEP and args.world_size > 1:
            of_its_own(torch.distributed)
        elif state.global_step == STEP:
            torch.empty(2**50)

    Meter.on_step_end = faulty  # type: ignore[method-assign]
    flags, *runs = (part.split("\n") for part in "\n".join(sys.argv[1:]).split("\n--\n"))
    return max(run(int(ranks), [*flags, "--outputdir", folder]) for ranks, folder in runs)


def run(ranks: int, flags: list[str]) -> int:
    """Fork the ranks of a run and wait for them; returns the highest exit status."""
    from zeropods.train import run_argv

    port, children = free_port(), []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ.update(place(rank, ranks, port, None))
            os._exit(guarded(lambda: run_argv(["textsql_train.py", *flags])))
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def of_its_own(distributed: Any) -> None:
    """A barrier that meets no other collective: those would fail where they do not fit together."""
    group = distributed.new_group()
    if distributed.get_rank() == 0:
        distributed.barrier(group)


if __name__ == "__main__":
    sys.exit(main())
