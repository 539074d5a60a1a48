"""What the processes of a run tell one another outside of training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zeropods.errors import UserError
from zeropods.programs import free_port


class SharedError(UserError):
    """An error that every rank has learned of; one of them says it."""


def rank() -> int:
    """This process's rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def be_the_only_rank() -> None:
    """Set what a launcher would set, where there was none: DeepSpeed needs a process group even for one process."""
    if "RANK" in os.environ:
        return
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )


def slots() -> int:
    """Processes of the run on one pod, as torchrun or DeepSpeed's launcher say; else all of them."""
    # DeepSpeed's variable first: accelerate puts LOCAL_WORLD_SIZE=1 beside it on a CPU.
    said = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    return int(said) if said else world_size()


def gathered(value: Any) -> list[Any]:
    """The value of every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_zero(action: Callable[[], Any]) -> Any:
    """Do something on rank 0 and give every rank its result, or its `UserError` as a `SharedError`."""
    told: list[Any] = [None, None]
    if rank() == 0:
        try:
            told[0] = action()
        except UserError as error:
            told[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise SharedError(told[1])
    return told[0]


def alone_on_rank_zero(measure: Callable[[], float]) -> float | None:
    """Measure on rank 0 while the others wait, so that ranks of one machine do not share it; None on the others."""
    measured = measure() if rank() == 0 else None
    if dist.is_initialized():
        dist.barrier()
    return measured


def leave() -> None:
    """End the process group after every rank is done.

    Without it one CPU run in three that succeeded aborts at exit with status 250, and DeepSpeed's
    launcher then ends the ranks beside it.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
