"""What the processes of a run tell one another outside of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zeropods.errors import UserError


def rank() -> int:
    """This process's rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_rank_zero(action: Callable[[], Any]) -> Any:
    """Do something on rank 0 and give every rank its result, or its `UserError`."""
    told: list[Any] = [None, None]
    if rank() == 0:
        try:
            told[0] = action()
        except UserError as error:
            told[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise UserError(told[1])
    return told[0]


def leave() -> None:
    """End the process group after everyone is done.

    Without it one CPU run in three that succeeded aborts at exit with status 250, and DeepSpeed's
    launcher then ends the ranks beside it.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
