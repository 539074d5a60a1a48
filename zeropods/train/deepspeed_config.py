"""A DeepSpeed configuration: read, checked against the flags, pointed into the run folder, named by its technique."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.train.deepspeed_keys import first_fault, lookup
from zeropods.train.deepspeed_optimizer import optimizer_faults

Config = dict[str, Any]

STAGES = (0, 1, 2, 3)
DEVICES = ("none", "cpu", "nvme")
FLAGS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
"""Keys that say the same as a flag: `auto`, or the same value."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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


def check_config(config: Config, path: str | Path, arguments: Mapping[str, Any], fp16_fault: str | None = None) -> None:
    """Refuse what DeepSpeed does not know, what has no effect, and what contradicts the flags.

    Args:
        path: where the configuration was read from, for messages.
        arguments: the script's flags by name, typed; `world_size`, the number of processes, where it is
            known; `optimizer_steps` likewise. What is missing is not compared.
        fp16_fault: why the model does not train in FP16; None where it does.
    """
    fault = first_fault(config) or next(_faults(config, arguments, fp16_fault), None)
    if fault is not None:
        raise UserError(f"--deepspeed {path}: {fault}")


def effective_config(template: Config, run_folder: Path) -> Config:
    """The template with the profiler's and TensorBoard's output inside the run folder."""
    config = json.loads(json.dumps(template))
    if config.get("flops_profiler", {}).get("enabled"):
        config["flops_profiler"]["output_file"] = str(run_folder / "profile.txt")
    if config.get("tensorboard", {}).get("enabled"):
        config["tensorboard"]["output_path"] = str(run_folder / "tensorboard")
    return config


def without_batch(template: Config) -> Config:
    """The template with `auto` for what the flags and the number of processes say too, and are compared with."""
    return {key: "auto" if key in BATCH else value for key, value in template.items()}


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
    return (zero.get(key) or {}).get("device", "none") != "none"


def _faults(config: Config, arguments: Mapping[str, Any], fp16_fault: str | None) -> Iterator[str]:
    yield from _stage_faults(config.get("zero_optimization") or {})
    yield from _precision_faults(config, arguments.get("precision"), fp16_fault)
    yield from _contradictions(config, arguments)
    yield from optimizer_faults(config, arguments)
    yield from _without_effect(config, arguments)


def _stage_faults(zero: Config) -> Iterator[str]:
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        yield f"zero_optimization.stage {stage!r}; expected 0, 1, 2 or 3"
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in DEVICES:
            yield f"zero_optimization.{key}.device {device!r}; expected {', '.join(DEVICES)}"
        if device != "none" and stage < least:
            yield f"zero_optimization.{key} with stage {stage}: has no effect; needs stage {least} or more"


def _precision_faults(config: Config, precision: str | None, fp16_fault: str | None) -> Iterator[str]:
    if lookup(config, "fp16.enabled") is True and fp16_fault is not None:
        yield f'fp16.enabled true: {fp16_fault}; use bf16, and write "auto" here, or leave fp16 out'
    for name in ("bf16", "fp16"):
        enabled = lookup(config, f"{name}.enabled")
        if precision in ("fp32", "bf16", "fp16") and enabled != "auto" and bool(enabled) != (precision == name):
            shown = "absent" if enabled is None else json.dumps(enabled)
            yield f'{name}.enabled {shown}, --precision {precision}; write "auto", or give both the same'


def _contradictions(config: Config, arguments: Mapping[str, Any]) -> Iterator[str]:
    flags = {key: (arguments[flag], f"--{flag} {arguments[flag]}") for key, flag in FLAGS.items() if flag in arguments}
    for key, (expected, said) in {**flags, **_whole_batch(arguments)}.items():
        value = lookup(config, key)
        if value is not None and value != "auto" and value != expected:
            yield f'{key} {value!r}, {said}; write "auto", or give both the same'
    if lookup(config, "gradient_clipping") is None and arguments.get("max_grad_norm"):
        yield f'gradient_clipping absent: would not clip, --max_grad_norm {arguments["max_grad_norm"]}; write "auto"'


def _whole_batch(arguments: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """What `train_batch_size` must be, and why, where the flags and the number of processes are known."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    if any(name not in arguments for name in names):
        return {}
    rows, accumulated, processes = (arguments[name] for name in names)
    said = f"{rows} rows x {accumulated} passes x {processes} processes = {rows * accumulated * processes}"
    return {"train_batch_size": (rows * accumulated * processes, said)}


def _without_effect(config: Config, arguments: Mapping[str, Any]) -> Iterator[str]:
    if "optimizer" in config and arguments.get("scaled_rates"):
        yield "optimizer: takes the place of --scaled_rates True; leave one of them out"
    if "scheduler" in config and arguments.get("max_train_seconds"):
        yield f"scheduler: takes the place of --max_train_seconds {arguments['max_train_seconds']}; leave one out"
