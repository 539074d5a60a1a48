"""A DeepSpeed configuration: read, pointed into the run folder, named by its technique."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

Config = dict[str, Any]


def read_config(path: Path) -> Config:
    """The JSON object in a file; `UserError` if it is not there or not one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--deepspeed {path}: no such file; expected one like dsconfig/zero1.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--deepspeed {path}: not JSON: {error}; mend the file") from None
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {path}: {type(config).__name__}; expected a JSON object")
    return config


def effective_config(template: Config, run_folder: Path) -> Config:
    """The template with the profiler's and TensorBoard's output inside the run folder."""
    config = json.loads(json.dumps(template))
    if config.get("flops_profiler", {}).get("enabled"):
        config["flops_profiler"]["output_file"] = str(run_folder / "profile.txt")
    if config.get("tensorboard", {}).get("enabled"):
        config["tensorboard"]["output_path"] = str(run_folder / "tensorboard")
    return config


def technique(config: Config | None, world_size: int) -> str:
    """The technique's name: `none`, `ddp`, `zeroN`, `zeroN_offload`, or `custom`."""
    if config is None:
        return "none" if world_size == 1 else "ddp"
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    optimizer = _offloaded(zero, "offload_optimizer")
    parameters = _offloaded(zero, "offload_param")
    if stage not in (1, 2, 3) or (stage == 3 and parameters != optimizer) or (stage < 3 and parameters):
        return "custom"
    return f"zero{stage}_offload" if optimizer else f"zero{stage}"


def _offloaded(zero: Config, key: str) -> bool:
    return zero.get(key, {}).get("device", "none") != "none"
