"""torch's compiler, which DeepSpeed would load for an optimizer that a run does not have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

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
