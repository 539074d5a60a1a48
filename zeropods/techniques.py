"""The techniques that are compared, each one value here, and the keys of a DeepSpeed configuration behind them.

A new technique is a value of `TECHNIQUES`, its file in `dsconfig/`, and its terms in `plan/` where they are new. One
that has keys of its own, as ZeRO++ has, gets a field of `Technique` for them: `is_of` asks for it, and `PLAIN` lets
them go.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

DSCONFIG = Path(__file__).resolve().parents[1] / "dsconfig"
CUSTOM = "custom"
"""Name of a configuration that is none of the techniques."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """How the memory of training is divided among processes."""

    name: str
    stage: int = 0
    """ZeRO's: 1 shares optimizer states, 2 gradients too, 3 parameters too; 0 is no DeepSpeed at all."""
    offloads: bool = False
    """Optimizer states, and with stage 3 the parameters too, lie in host memory; the processor steps."""
    profiled: str | None = None
    """The file in `dsconfig/` that is the same with DeepSpeed's flops profiler switched on."""

    @property
    def is_alone(self) -> bool:
        """Whether it is one process, however many pods there are."""
        return self.name == "none"

    @property
    def file(self) -> Path | None:
        """The file in `dsconfig/`; None for training without DeepSpeed."""
        return DSCONFIG / f"{self.name}.json" if self.stage else None

    def is_of(self, config: Mapping[str, Any]) -> bool:
        """Whether a DeepSpeed configuration is of this technique, and has nothing beyond it."""
        zero = _object(config, "zero_optimization")
        optimizer, parameters = offloads_optimizer(config), _is_offloaded(config, "offload_param")
        expected = (self.stage, self.offloads, self.offloads and self.stage == 3)
        is_alike = self.stage > 0 and (zero.get("stage", 0), optimizer, parameters) == expected
        return is_alike and not keys_beyond(config)


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
    found = next((technique for technique in TECHNIQUES if technique.name == name), None)
    if found is None:
        raise UserError(f"technique {name!r}; expected one of {', '.join(NAMES)}")
    return found


def technique_of(config: Mapping[str, Any] | None, world_size: int) -> str:
    """Name of the technique of a run with this effective DeepSpeed configuration, or none; else `custom`."""
    if config is None:
        return "none" if world_size == 1 else "ddp"
    return next((technique.name for technique in TECHNIQUES if technique.is_of(config)), CUSTOM)


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
"""Keys by which DeepSpeed divides or sends states in another way than the techniques do, and the values with which it
does not, beside None: ZeRO++, MiCS, ZenFlow, NVMe, partial offload, tensor parallelism (zero/config.py of 0.19.8)."""


def keys_beyond(config: Mapping[str, Any]) -> dict[str, object]:
    """The keys, with their values, that make a DeepSpeed configuration none of the techniques."""
    found = {path: lookup(config, path) for path in PLAIN}
    return {path: value for path, value in found.items() if value is not None and value not in PLAIN[path]}


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """The value at `block.key` of a DeepSpeed configuration; None where it or its block is absent."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def technique_text(name: str, config: Mapping[str, Any] | None) -> str:
    """A technique for people; of a custom one with the keys that make it so, `custom (offload_param.device nvme)`."""
    if name != CUSTOM or config is None:
        return name
    keys = {path.removeprefix("zero_optimization."): value for path, value in keys_beyond(config).items()}
    said = ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items())
    return f"{name} ({said})" if said else name


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the processor steps, of whatever technique the configuration is."""
    return _is_offloaded(config, "offload_optimizer")


def _is_offloaded(config: Mapping[str, Any], key: str) -> bool:
    return lookup(config, f"zero_optimization.{key}.device") not in (None, "none")


# The keys of a DeepSpeed configuration that its memory and traffic depend on.


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Those keys; the defaults are those of the files in `dsconfig/`, which are equal in every stage."""

    reduce_elements: int = 10_000_000
    """`reduce_bucket_size`."""
    overlap: bool = True
    """`overlap_comm`: gradients are reduced while the backward pass goes on, from two buckets in turn."""
    contiguous: bool = True
    """`contiguous_gradients`: stages 1 and 2 make their reduce buckets whole, however small the model is. Else they
    copy together what there is to reduce, at most a bucket of it. DeepSpeed of 2022 and 2023 took no notice of it, nor
    of `overlap_comm`, in stage 1: neither was on there (engine.py, "meaningless in stage 1 and are ignored")."""
    multi_rank_all_reduce: bool = True
    """`use_multi_rank_bucket_allreduce` (DeepSpeed's default): stages 1 and 2 send a gradient to every rank, not only
    to its owner. DeepSpeed before 0.12 did not have it."""
    prefetch_elements: int = 10_000_000
    live_elements: int = 100_000_000
    """Parameters that stage 3 keeps gathered: the smaller of `stage3_max_live_parameters` and
    `stage3_max_reuse_distance`."""
    persistent_elements: int = 100_000
    """`stage3_param_persistence_threshold`: stage 3 keeps tensors of at most so many whole on every rank."""
    pins: bool = True
    """`pin_memory` of what is offloaded."""


def read_zero_settings(config: Mapping[str, Any]) -> ZeroSettings:
    """Those of an effective DeepSpeed configuration; DeepSpeed's own default where it does not say (zero/config.py).

    Raises:
        UserError: a size is no number of elements (`auto`, say), or what should be an object is none.
    """
    zero = _object(config, "zero_optimization")
    overlap, optimizer = zero.get("overlap_comm"), _object(zero, "offload_optimizer")
    live = (_of_stage3(zero, name, 1e9) for name in ("max_live_parameters", "max_reuse_distance"))
    return ZeroSettings(
        reduce_elements=_elements(zero, "reduce_bucket_size", 5e8),
        overlap=zero.get("stage") == 3 if overlap is None else bool(overlap),
        contiguous=bool(zero.get("contiguous_gradients", True)) or bool(optimizer),
        multi_rank_all_reduce=zero.get("use_multi_rank_bucket_allreduce", True),
        prefetch_elements=_of_stage3(zero, "prefetch_bucket_size", 5e7),
        live_elements=min(live),
        persistent_elements=_of_stage3(zero, "param_persistence_threshold", 1e5),
        pins=bool(optimizer.get("pin_memory", False)),
    )


def _of_stage3(zero: Mapping[str, Any], name: str, default: float) -> int:
    """Such a key may be written with `stage3_` before it, and without."""
    return _elements(zero, f"stage3_{name}" if f"stage3_{name}" in zero else name, default)


def _elements(zero: Mapping[str, Any], name: str, default: float) -> int:
    value = zero.get(name, default)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UserError(f"zero_optimization.{name} {value!r:.60}; expected a number of elements")
    return int(value)


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{name} {value!r:.60}; expected an object")
    return value
