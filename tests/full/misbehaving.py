"""`several.py` with a fault in training, by `FAULT` in the environment of its runs.

FAULT=skip: rank 0 meets the others at a barrier after its third step, and they pass it by.
FAULT=allocate: rank 0 asks for more memory than there is, in its third step.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.full import several

STEP = 3


def main() -> int:
    import torch

    from zeropods.train.meter import Recorder

    on_step_end = Recorder.on_step_end

    def faulty(self: Recorder, args: Any, state: Any, control: Any, **about: Any) -> None:
        on_step_end(self, args, state, control, **about)
        if state.global_step == STEP and args.world_size > 1:
            of_its_own(torch.distributed)
        elif state.global_step == STEP:
            torch.empty(2**50)

    Recorder.on_step_end = faulty  # type: ignore[method-assign]
    return several.main()


def of_its_own(distributed: Any) -> None:
    """A barrier that meets no other collective: those would fail where they do not fit together."""
    group = distributed.new_group()
    if distributed.get_rank() == 0:
        distributed.barrier(group)


if __name__ == "__main__":
    sys.exit(main())
