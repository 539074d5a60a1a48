"""The buffers in shared memory by which DeepSpeed's ranks of one machine add up tensors without a GPU.

DeepSpeed (0.19.8, ops/csrc/cpu/comm/shm.cpp) never removes their names: every rank leaves 66 MiB of main memory behind
in `/dev/shm`, however it ends, until the machine is started again.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

SHARED_MEMORY = Path("/dev/shm")


def buffer_file(rank: int) -> Path:
    """The buffer of a rank of this process's group, by the name that DeepSpeed gives it."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"


def release_shared_buffers() -> None:
    """Remove the name of this rank's buffer once every rank has opened it: the memory then goes with the processes.

    To be called by all ranks, when DeepSpeed has made its process group.
    """
    if torch.cuda.is_available():
        return
    dist.barrier()
    buffer_file(dist.get_rank()).unlink(missing_ok=True)
