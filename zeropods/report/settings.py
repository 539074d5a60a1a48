"""What must be equal for the figures of two runs to be compared: everything but technique, pods and seed.

`report.groups` draws a ratio between rows where `required` is equal and nothing is `unequal`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from zeropods.measure.record import Record, RunConfig
from zeropods.report.formulas import machines
from zeropods.techniques import lookup

Settings = dict[str, Any]
"""What is compared, by name."""
SETTING_FACTS = (
    *("model_id", "init", "task", "prompt", "precision", "effective_batch_size", "gradient_checkpointing"),
    "train_rows",
)
DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")
TECHNIQUE = {"deepspeed", "per_device_eval_batch_size", *DIVISION}
"""Flags that a technique or a number of pods changes by itself; the effective batch size is compared."""
BY_DESIGN = {"seed"}
"""What repeats of a run may differ in."""
DATA = ("dataset_path", "data")
"""What the two scripts call the prepared data; a run's identity has its content key there."""
SHOWN_DIGITS = 12
"""Of the prepared data's content key and of a configuration's digest."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
"""Settings of DeepSpeed that a run without them agrees with: buckets need memory whatever the stage."""

INSTRUCTIONS = "hardware instructions"
"""A setting that runs of before do not tell."""


def settings(config: RunConfig | None) -> Settings:
    """All but technique and pods: model, data, flags, DeepSpeed's keys, hardware, versions, by name; nothing where
    nothing is known.

    Of GPUs the names count: how many are used is the number of processes.
    """
    if config is None:
        return {}
    identity, deepspeed, hardware = config.identity, config.deepspeed or {}, dict(config.hardware)
    if "gpus" in hardware:
        hardware["gpus"] = sorted(set(hardware["gpus"] or ()))
    left = identity.keys() - TECHNIQUE - BY_DESIGN - {*SETTING_FACTS, *DATA}
    data = next((str(identity[name])[:SHOWN_DIGITS] for name in DATA if name in identity), None)
    zero = deepspeed.get("zero_optimization") or {}
    return {
        **{key: getattr(config, key) for key in SETTING_FACTS},
        **({} if data is None else {"data": data}),
        **{key: identity[key] for key in sorted(left)},
        "profiler": is_profiled(config),
        **{name: zero[name] for name in BUCKETS if name in zero},
        **(deepspeed_settings(deepspeed) if deepspeed else {}),
        **{f"hardware {key}": value for key, value in hardware.items()},
        **{f"versions {key}": value for key, value in config.versions.items()},
    }


def is_profiled(config: RunConfig | None) -> bool:
    """Whether DeepSpeed's flops profiler was on, which takes time of its own."""
    return bool(config and lookup(config.deepspeed or {}, "flops_profiler.enabled"))


def arrangement(config: RunConfig | None) -> Settings:
    """Technique, pods and what goes with them: equal, with equal settings, in repeats of one run."""
    identity = config.identity if config else {}
    asked = identity.get("deepspeed")
    return {
        **{key: getattr(config, key, None) for key in ("technique", "pods", "slots", *DIVISION)},
        "deepspeed": None if asked is None else hashlib.sha256(as_key(asked).encode()).hexdigest()[:SHOWN_DIGITS],
        "per_device_eval_batch_size": identity.get("per_device_eval_batch_size"),
        "machines": machines(config) if isinstance(config, Record) and config.ranks else None,
    }


def unequal(one: Settings, other: Settings) -> list[str]:
    """Names of the settings in which two runs differ."""
    names = dict.fromkeys([*one, *other])
    return [name for name in names if is_of(name, one) and is_of(name, other) and one.get(name) != other.get(name)]


def is_of(name: str, of_run: Settings) -> bool:
    """Whether a run has such a setting at all, be it by default: no ZeRO, no buckets; no DeepSpeed, no keys of it."""
    if name in of_run:
        return True
    if name.startswith(ONLY_WITH) or name == INSTRUCTIONS:
        return False
    return name not in BUCKETS and (not name.startswith(PREFIX) or f"{PREFIX}optimizer.type" in of_run)


def required(compared: Settings) -> str:
    """Equal where rows may be comparable: the settings that every run has."""
    return as_key({name: value for name, value in compared.items() if is_of(name, {})})


def as_key(*parts: Settings) -> str:
    """Equal for equal settings."""
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


# The keys of an effective DeepSpeed configuration, as it stands.

PREFIX = "deepspeed "
"""Before the name of each key."""
FROM_FLAGS = "from the flags"
"""An optimizer or a schedule that the configuration leaves to the flags, which are compared by themselves."""
ZERO = "zero_optimization"
ON_BY_DEFAULT = (
    *(f"{ZERO}.{name}" for name in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions")),
    *(f"{ZERO}.{name}" for name in ("use_multi_rank_bucket_allreduce", "compute_grad_norm", "load_from_fp32_weights")),
    *(f"{ZERO}.{name}" for name in ("ignore_unused_parameters", "memory_efficient_linear", "override_module_apply")),
    *("zero_force_ds_cpu_optimizer", "bf16.check_grad_overflow"),
)
"""Keys of which off says something; of others it is as good as absent, unless only some techniques have them. DeepSpeed
0.19.8, runtime/zero/config.py, runtime/constants.py, runtime/precision_config.py."""
ONLY_WITH = tuple(f"{PREFIX}{ZERO}.{name}" for name in ("stage3_", "sub_group_size", "offload_"))
"""Beginnings of keys that only some techniques have: they are compared where both runs have them."""
LEFT_OUT = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "bf16.enabled", "fp16.enabled"),
    *("optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay"),
    *("scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
    *(f"{ZERO}.stage", f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device"),
    *(f"{ZERO}.{name}" for name in BUCKETS),
    *("tensorboard.output_path", "tensorboard.job_name", "csv_monitor.output_path", "csv_monitor.job_name"),
)
"""Beside the profiler's: what the flags say too (a run whose configuration contradicts them does not begin), what the
technique or the number of pods changes by itself, and what lies in the run folder."""


def deepspeed_settings(config: Mapping[str, Any]) -> Settings:
    """The keys of an effective configuration that are compared, as `deepspeed BLOCK.KEY`."""
    found = {"optimizer.type": FROM_FLAGS, "scheduler.type": FROM_FLAGS, **dict(_flat(config, ""))}
    compared = (key for key in sorted(found) if key not in LEFT_OUT and not key.startswith("flops_profiler."))
    said = {f"{PREFIX}{key}": found[key] for key in compared if found[key] != "auto"}
    off_counts = (*ONLY_WITH, *(f"{PREFIX}{key}" for key in ON_BY_DEFAULT))
    return {key: value for key, value in said.items() if value or key.startswith(off_counts)}


def _flat(block: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
