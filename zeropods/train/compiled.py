"""A T5 whose passes are compiled: fewer kernels to launch, or none at all.

A small model at a small batch waits for its launches, not for arithmetic. `blocks` compiles each layer, once for all of
them and for all lengths, and fuses what lies between products. `graphs` compiles encoder and decoder whole and replays
them as CUDA graphs, one for each pair of lengths: a whole pass is then a handful of launches.
Source: torch.compile's regional compilation, and CUDA graph trees (`mode="reduce-overhead"`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropods.errors import UserError
from zeropods.train.deepspeed_config import read_config

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
    for part in _parts(model, how):
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
    return nullcontext() if how == "off" else _eager()


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def _parts(model: Any, how: str) -> Iterator[nn.Module]:
    stacks = (model.encoder, model.decoder)
    if how == "graphs":
        yield from stacks
    else:
        for stack in stacks:
            yield from stack.block
