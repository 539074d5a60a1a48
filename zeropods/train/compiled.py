"""A T5 whose passes are compiled, and operations of DeepSpeed that training never calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zeropods.errors import UserError
from zeropods.train.deepspeed import read_config

# A T5 whose passes are compiled: fewer kernels to launch, or none at all.
#
# A small model at a small batch waits for its launches, not for arithmetic. `blocks` compiles each layer, once for all
# of them and for all lengths, and fuses what lies between products. `graphs` compiles encoder and decoder whole and
# replays them as CUDA graphs, one for each pair of lengths: a whole pass is then a handful of launches.
# Source: torch.compile's regional compilation, and CUDA graph trees (`mode="reduce-overhead"`).

MOST_SHAPES = 256
"""Graphs of one function before torch gives up compiling it; there are two for each pair of lengths."""


def compile_model(model: Any, how: str, **options: Any) -> None:
    """Compile a T5's layers in place; names of parameters stay, and so do saved files.

    Args:
        how: `off`, `blocks` or `graphs`.
        options: for `torch.compile`, in place of its own.
    """
    if how == "off":
        return
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(MOST_SHAPES, torch._dynamo.config.recompile_limit)
    stacks = (model.encoder, model.decoder)
    for part in stacks if how == "graphs" else [block for stack in stacks for block in stack.block]:
        chosen = {"mode": "reduce-overhead"} if how == "graphs" else {}
        # A second compilation for each new length would never end: lengths are symbols from the beginning.
        part.compile(dynamic=True, **{**chosen, **options})


def check_compiled(how: str, deepspeed: str | None) -> None:
    """Refuse what cannot be compiled: ZeRO-3 fetches weights between the operations of a layer."""
    if how == "off" or deepspeed is None:
        return
    zero = read_config(Path(deepspeed)).get("zero_optimization") or {}
    if zero.get("stage") == 3:
        raise UserError(
            f"--compile {how} --deepspeed {deepspeed}: its stage 3 fetches weights within a layer; leave it out"
        )


def step_begins(how: str) -> None:
    """Say that results of the step before are not wanted any more: graphs write where they wrote then."""
    if how == "graphs":
        torch.compiler.cudagraph_mark_step_begin()


def uncompiled(how: str) -> AbstractContextManager[Any]:
    """What runs in this block runs as it is written: an evaluation is of other sizes, and short."""
    return nullcontext() if how == "off" else torch.compiler.set_stance("force_eager")


# torch's compiler, which DeepSpeed would load for an optimizer that a run does not have.

MUON = "deepspeed.runtime.zero.muon.original_muon"
DISABLE = "TORCHDYNAMO_DISABLE"


def spare_compiler(config: Mapping[str, Any]) -> None:
    """Import DeepSpeed's Muon without torch's compiler, unless the configuration asks for that optimizer.

    DeepSpeed imports it to ask whether the optimizer of a run is one, and decorates it to be compiled: loading the
    compiler takes each rank more than a second and 40 MB. Nothing is compiled for another optimizer: its numbers stay.
    Source: deepspeed/runtime/zero/utils.py, `is_zero_supported_optimizer`; torch/_dynamo/eval_frame.py, `_optimize`.
    """
    optimizer = config.get("optimizer") or {}
    if str(optimizer.get("type", "")).lower() == "muon":
        return
    before = os.environ.get(DISABLE)
    os.environ[DISABLE] = "1"
    try:
        # One of another version of DeepSpeed may have none.
        with suppress(ImportError):
            import_module(MUON)
    finally:
        if before is None:
            del os.environ[DISABLE]
        else:
            os.environ[DISABLE] = before


# DeepSpeed's operation that adds tensors up in shared memory, which training never calls.
#
# DeepSpeed (0.19.8, comm/torch.py) loads it wherever ranks have no GPU, for tensor-parallel inference. Loading it
# compiles it, or waits for whoever does; each rank then puts a buffer of 66 MiB into `/dev/shm`, which stays there
# however the rank ends, and which a container with the usual 64 MiB has no room for (ops/csrc/cpu/comm/shm.cpp).

OPERATION = "deepspeed_shm_comm"


def spare_shared_memory() -> None:
    """Let DeepSpeed make its process groups without that operation, in this process."""
    import deepspeed.ops

    # Not by attribute, which would first try the compilers of every operation; nothing else is looked up here.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})[OPERATION] = False
