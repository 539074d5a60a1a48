"""DeepSpeed's operation that adds tensors up in shared memory, which training never calls.

DeepSpeed (0.19.8, comm/torch.py) loads it wherever ranks have no GPU, for tensor-parallel inference. Loading it
compiles it, or waits for whoever does; each rank then puts a buffer of 66 MiB into `/dev/shm`, which stays there
however the rank ends, and which a container with the usual 64 MiB has no room for (ops/csrc/cpu/comm/shm.cpp).
"""

from __future__ import annotations

OPERATION = "deepspeed_shm_comm"


def spare_shared_memory() -> None:
    """Let DeepSpeed make its process groups without that operation, in this process."""
    import deepspeed.ops

    # Not by attribute, which would first try the compilers of every operation; nothing else is looked up here.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})[OPERATION] = False
