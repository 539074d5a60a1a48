"""Files of torch's that hold tensors and plain values, and nothing that runs when it is loaded."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from typing import Any

STRICT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FOREIGN = re.compile(r"GLOBAL (\S+)")
"""In what torch says of an object that it was not allowed to make."""


@contextlib.contextmanager
def plain_values_only() -> Iterator[None]:
    """Every `torch.load` in this block, DeepSpeed's too, makes tensors and plain values and nothing else."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    allowed: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    before = os.environ.get(STRICT)
    os.environ[STRICT] = "1"
    try:
        with torch.serialization.safe_globals(allowed):
            yield
    finally:
        os.environ.pop(STRICT)
        if before is not None:
            os.environ[STRICT] = before


def foreign_object(error: pickle.UnpicklingError) -> str:
    """What a file holds that was refused: the name of its class, else what torch says first."""
    named = FOREIGN.search(str(error))
    return named[1] if named else first_line(error)


def first_line(error: Exception) -> str:
    """What an error of torch's or DeepSpeed's says first."""
    return str(error).strip().split("\n")[0][:200]
