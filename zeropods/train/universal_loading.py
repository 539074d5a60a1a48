"""DeepSpeed told to load a universal checkpoint, and only that one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def expect_universal(config: dict[str, Any]) -> None:
    """Let an engine that is made of this configuration load a universal checkpoint first."""
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}


def universal_loaded(engine: Any) -> None:
    """Make right what was loaded, and let what the engine loads after that be checkpoints of its own.

    ZeRO-3 gives all its sub-groups one tensor that counts their steps: each sub-group would count for all, and Adam's
    correction of its averages would be that of a later step.
    """
    engine._config.load_universal_checkpoint = False
    # DeepSpeed's optimizer has torch's within; without ZeRO it is that itself.
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


@contextlib.contextmanager
def loading_universal(engine: Any) -> Iterator[None]:
    """What the engine loads in this block is a universal checkpoint."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        universal_loaded(engine)
