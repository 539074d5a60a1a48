"""A DeepSpeed configuration: read, directed into the run folder, and what it needs of this machine.

`deepspeed_config_check` says whether a run may begin with it. A launch reads it too, so nothing
here imports torch or DeepSpeed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.files import no_file, read_object
from zeropods.programs import lacking_for_operation
from zeropods.techniques import HPZ, QUANTIZED, is_offloaded, lookup

Config = dict[str, Any]
CPU_ADAM = "cpu_adam"
"""Operation that DeepSpeed compiles for the step of an optimizer that is offloaded."""
FUSED_ADAM = "fused_adam"
"""The same for an optimizer without offload."""
QUANTIZER = "quantizer"
"""The operation that it compiles for what ZeRO++ sends quantized, for GPUs only."""


def read_config(path: Path) -> Config:
    """The JSON object in a file.

    Raises:
        UserError: there is no file, or no object in it.
    """
    if not path.is_file():
        raise UserError(
            f"--deepspeed {path}: {no_file(path)}; expected one like dsconfig/zero1.json"
        )
    return read_object(path, "correct the file")


def slots_of_pod(ranks: int) -> int:
    """Number of processes on this process's pod, as DeepSpeed's launcher or torchrun has set it.

    Args:
        ranks: number of processes of the run, which is returned where neither launcher has set
            anything: all of them are on one pod then.
    """
    # DeepSpeed's comes first: on a CPU accelerate adds LOCAL_WORLD_SIZE=1.
    for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        slots = os.environ.get(variable)
        if slots:
            return int(slots)
    return ranks


def effective_config(template: Config, run_folder: Path, slots: int) -> Config:
    """A copy of the template that writes the profiler's and TensorBoard's output into a run folder.

    A precision that the template leaves out becomes `auto`, so that `--precision` decides. An
    `auto` of hpZ becomes the number of slots.

    Args:
        slots: number of processes of a pod, among which hpZ then divides the parameters.
    """
    config = copy.deepcopy(template)
    for name in ("bf16", "fp16"):
        config.setdefault(name, {}).setdefault("enabled", "auto")
    if lookup(config, HPZ) == "auto":
        config["zero_optimization"]["zero_hpz_partition_size"] = slots
    if lookup(config, "flops_profiler.enabled"):
        config["flops_profiler"]["output_file"] = str(run_folder / "profile.txt")
    if lookup(config, "tensorboard.enabled"):
        config["tensorboard"]["output_path"] = str(run_folder / "tensorboard")
    return config


# The operation that the optimizer's step needs, which DeepSpeed compiles when it is used first.


def operation_of(config: Mapping[str, Any]) -> str | None:
    """Name of the operation that DeepSpeed runs the optimizer's step with.

    Returns:
        None where PyTorch's own optimizer is used.
    """
    has_optimizer = "optimizer" in config
    if lookup(config, "optimizer.params.torch_adam") is True:
        return None
    if not has_optimizer and lookup(config, "zero_force_ds_cpu_optimizer") is False:
        return None
    if is_offloaded(config, "offload_optimizer"):
        return CPU_ADAM
    if has_optimizer:
        return FUSED_ADAM
    return None


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether ZeRO++ sends weights or gradients quantized."""
    return any(lookup(config, key) is True for key in QUANTIZED)


def check_operation(config: Mapping[str, Any], path: str | Path, *, on_gpu: bool) -> None:
    """Refuse a configuration whose operations are not compiled and cannot be compiled here.

    Args:
        path: where the configuration was read from, for messages.
        on_gpu: whether the run is on a GPU of this machine.

    Raises:
        UserError: this machine lacks something to compile them; the message says what.
    """
    operation = operation_of(config)
    if operation is not None:
        _check_compiled(operation, "its optimizer", path, cuda=on_gpu and operation == FUSED_ADAM)
    if on_gpu and is_quantized(config):
        _check_compiled(QUANTIZER, "what it sends quantized", path, cuda=True)


def _check_compiled(operation: str, purpose: str, path: str | Path, *, cuda: bool) -> None:
    """Refuse an operation that is not compiled and cannot be compiled here.

    Args:
        purpose: what DeepSpeed needs it for, in words.
        path: where the configuration was read from, for messages.
        cuda: whether CUDA's own compiler compiles it.
    """
    lacking = lacking_for_operation(operation, cuda=cuda)
    if not lacking:
        return
    missing = ", ".join(f"no {name} ({source})" for name, source in lacking.items())
    remedy = "install it" if len(lacking) == 1 else "install them"
    raise UserError(
        f"--deepspeed {path}: DeepSpeed must compile {operation} for {purpose}, "
        f"and here is {missing}; {remedy}"
    )
