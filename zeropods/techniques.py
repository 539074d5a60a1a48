"""The techniques that are compared, and the keys of a DeepSpeed configuration that tell them apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeropods.errors import UserError

# The techniques that a plan compares, by what they share out and what they put into host memory.


@dataclass(frozen=True, kw_only=True)
class Technique:
    """How the memory of training is divided among processes."""

    name: str
    stage: int = 0
    """ZeRO's: 1 shares optimizer states, 2 gradients too, 3 parameters too; 0 is no DeepSpeed at all."""
    offloads: bool = False
    """Optimizer states, and with stage 3 the parameters too, lie in host memory; the processor steps."""

    @property
    def is_alone(self) -> bool:
        """Whether it is one process, however many pods there are."""
        return self.name == "none"


TECHNIQUES = (
    Technique(name="none"),
    Technique(name="ddp"),
    Technique(name="zero1", stage=1),
    Technique(name="zero1_offload", stage=1, offloads=True),
    Technique(name="zero2", stage=2),
    Technique(name="zero2_offload", stage=2, offloads=True),
    Technique(name="zero3", stage=3),
    Technique(name="zero3_offload", stage=3, offloads=True),
)


def technique_named(name: str) -> Technique:
    """The technique of that name; `UserError` where there is none."""
    found = next((technique for technique in TECHNIQUES if technique.name == name), None)
    if found is None:
        raise UserError(f"technique {name!r}; expected one of {', '.join(t.name for t in TECHNIQUES)}")
    return found


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
