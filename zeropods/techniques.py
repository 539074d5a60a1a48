"""The techniques that are compared, each one value here, and the keys of a DeepSpeed configuration
behind them.

A new technique needs a value in `TECHNIQUES`, its file in `dsconfig/`, and its terms in `plan/`
where they are new. One with keys of its own, such as ZeRO++, gets a field of `Technique` for them;
`is_of` checks that field, the keys are taken out of `PLAIN`, and `train/deepspeed_keys.py` lets
them pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

DSCONFIG = Path(__file__).resolve().parents[1] / "dsconfig"
CUSTOM = "custom"
"""Name for a configuration that is none of the techniques."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """How the memory of training is divided among processes."""

    name: str
    stage: int = 0
    """ZeRO stage: 1 divides optimizer states, 2 gradients too, 3 parameters too; 0 is training
    without DeepSpeed."""
    offloads: bool = False
    """Whether optimizer states, and in stage 3 the parameters too, lie in host memory; the
    processor then runs Adam."""
    profiled: str | None = None
    """Name of the file in `dsconfig/` that is the same with DeepSpeed's flops profiler switched
    on."""

    @property
    def is_alone(self) -> bool:
        """Whether it runs as one process, however many pods there are."""
        return self.name == "none"

    @property
    def file(self) -> Path | None:
        """The file in `dsconfig/`; None for training without DeepSpeed."""
        return DSCONFIG / f"{self.name}.json" if self.stage else None

    def is_of(self, config: Mapping[str, Any]) -> bool:
        """Whether a DeepSpeed configuration is of this technique and has nothing beyond it."""
        stage = block(config, "zero_optimization").get("stage", 0)
        if self.stage == 0 or stage != self.stage:
            return False
        if is_offloaded(config, "offload_optimizer") != self.offloads:
            return False
        offloads_parameters = self.offloads and self.stage == 3
        if is_offloaded(config, "offload_param") != offloads_parameters:
            return False
        return not keys_beyond(config)


TECHNIQUES = (
    Technique(name="none"),
    Technique(name="ddp"),
    Technique(name="zero1", stage=1, profiled="zero1profiler"),
    Technique(name="zero1_offload", stage=1, offloads=True),
    Technique(name="zero2", stage=2, profiled="zero2profiler"),
    Technique(name="zero2_offload", stage=2, offloads=True),
    Technique(name="zero3", stage=3),
    Technique(name="zero3_offload", stage=3, offloads=True, profiled="zero3profiler"),
)
NAMES = tuple(technique.name for technique in TECHNIQUES)


def technique_named(name: str) -> Technique:
    """The technique of that name; `UserError` where there is none."""
    for technique in TECHNIQUES:
        if technique.name == name:
            return technique
    raise UserError(f"technique {name!r}; expected one of {', '.join(NAMES)}")


def technique_of(config: Mapping[str, Any] | None, world_size: int) -> str:
    """Name of the technique of a run by its effective DeepSpeed configuration, else `custom`.

    Args:
        config: None for training without DeepSpeed.
    """
    if config is None:
        return "none" if world_size == 1 else "ddp"
    for technique in TECHNIQUES:
        if technique.is_of(config):
            return technique.name
    return CUSTOM


PLAIN: dict[str, tuple[object, ...]] = {
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.zenflow": (),
    "zero_optimization.offload_optimizer.device": ("none", "cpu"),
    "zero_optimization.offload_optimizer.ratio": (1,),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.offload_param.device": ("none", "cpu"),
    "tensor_parallel.autotp_size": (0, 1),
}
"""Keys by which DeepSpeed divides or sends states differently from the techniques, and the values,
besides None, with which it does not: ZeRO++, MiCS, ZenFlow, NVMe, partial offload, tensor
parallelism (zero/config.py of 0.19.8)."""


def keys_beyond(config: Mapping[str, Any]) -> dict[str, object]:
    """The keys, with their values, that make a DeepSpeed configuration none of the techniques."""
    beyond = {}
    for path, plain_values in PLAIN.items():
        value = lookup(config, path)
        if value is not None and value not in plain_values:
            beyond[path] = value
    return beyond


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """The value at `block.key` of a DeepSpeed configuration; None where it or its block is
    absent."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def technique_text(name: str, config: Mapping[str, Any] | None) -> str:
    """A technique as text; a custom one with the keys that make it so, `custom
    (offload_param.device nvme)`."""
    if name != CUSTOM or config is None:
        return name
    keys = []
    for path, value in keys_beyond(config).items():
        key = path.removeprefix("zero_optimization.")
        text = value if isinstance(value, str) else json.dumps(value)
        keys.append(f"{key} {text}")
    return f"{name} ({', '.join(keys)})" if keys else name


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the processor runs the optimizer's step, whichever technique the configuration is."""
    return is_offloaded(config, "offload_optimizer")


def is_offloaded(config: Mapping[str, Any], key: str) -> bool:
    """Whether `offload_optimizer` or `offload_param` of a DeepSpeed configuration names a
    device."""
    return lookup(config, f"zero_optimization.{key}.device") not in (None, "none")


def block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A block of a DeepSpeed configuration, empty where it is absent.

    Raises:
        UserError: it is not an object.
    """
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{name} {value!r:.60}; expected an object")
    return value
