"""What must be equal for the figures of two runs to be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from zeropods.report.figures.arithmetic import machines

Settings = dict[str, Any]

FACTS = (
    "model_id",
    "init",
    "task",
    "prompt",
    "precision",
    "effective_batch_size",
    "gradient_checkpointing",
    "train_rows",
)
TECHNIQUE = {
    "deepspeed",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
}
"""Flags that a technique or a number of pods changes by itself; the effective batch size is compared."""
BY_DESIGN = {"seed"}
"""What repeats of a run may differ in."""
DATA = ("dataset_path", "data")
"""What the two scripts call the prepared data; a run's identity has its content key there."""
SHOWN_DIGITS = 12
"""Of the prepared data's content key and of a configuration's digest."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
"""Of a DeepSpeed configuration: buckets need memory whatever the stage. Compared where both runs have them."""


def settings(facts: Mapping[str, Any]) -> Settings:
    """All but technique and pods: model, data, flags, hardware, versions, by name.

    Args:
        facts: a record, or the configuration of a run that has none yet; of nothing, nothing is compared.
    """
    if not facts:
        return {}
    identity = facts.get("identity") or {}
    left = identity.keys() - TECHNIQUE - BY_DESIGN - {*FACTS, *DATA}
    key = next((identity[name] for name in DATA if name in identity), None)
    data = {} if key is None else {"data": str(key)[:SHOWN_DIGITS]}
    return {
        **{key: facts[key] for key in FACTS if key in facts},
        **data,
        **{key: identity[key] for key in sorted(left)},
        **_deepspeed(facts.get("deepspeed") or {}),
        **machine_settings(facts),
    }


def machine_settings(facts: Mapping[str, Any]) -> Settings:
    """Hardware and versions, each value by its own name. Of GPUs the names count: how many are used is the number of
    processes."""
    hardware = dict(facts.get("hardware") or {})
    if "gpus" in hardware:
        hardware["gpus"] = sorted(set(hardware["gpus"] or ()))
    parts = {"hardware": hardware, "versions": facts.get("versions") or {}}
    return {f"{group} {key}": value for group, values in parts.items() for key, value in values.items()}


def arrangement(facts: Mapping[str, Any]) -> Settings:
    """Technique, pods and what goes with them: equal, with equal settings, in repeats of one run."""
    identity = facts.get("identity") or {}
    keys = ("technique", "pods", "slots", "per_device_train_batch_size", "gradient_accumulation_steps")
    return {
        **{key: facts.get(key) for key in keys},
        "deepspeed": _digest(identity.get("deepspeed")),
        "per_device_eval_batch_size": identity.get("per_device_eval_batch_size"),
        "machines": machines(dict(facts)) if facts.get("ranks") else None,
    }


def unequal(one: Settings, other: Settings) -> list[str]:
    """Names of the settings in which two runs differ."""
    names = dict.fromkeys([*one, *other])
    return [name for name in names if not _agree(name, one, other)]


def as_key(*parts: Settings) -> str:
    """Equal for equal settings."""
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def is_optional(name: str) -> bool:
    """Whether a run that does not have this setting agrees with any value of it."""
    return name in BUCKETS


def _agree(name: str, one: Settings, other: Settings) -> bool:
    if is_optional(name) and not (name in one and name in other):
        return True
    return name in one and name in other and bool(one[name] == other[name])


def _digest(config: Any) -> str | None:
    return None if config is None else hashlib.sha256(as_key(config).encode()).hexdigest()[:SHOWN_DIGITS]


def _deepspeed(config: Mapping[str, Any]) -> Settings:
    zero, profiler = config.get("zero_optimization") or {}, config.get("flops_profiler") or {}
    buckets = {name: zero[name] for name in BUCKETS if name in zero}
    return {"profiler": bool(profiler.get("enabled", False)), **buckets}
