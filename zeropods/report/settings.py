"""What must be equal for the figures of two runs to be compared: everything but technique, pods and seed.

`report.groups` computes a ratio of two rows where `required` is equal and nothing is `unequal`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from zeropods.measure.record import PRECISION_PARTS, Record, RunConfig
from zeropods.report.formulas import machines
from zeropods.techniques import lookup

Settings = dict[str, Any]
"""Values that are compared, by name."""
SETTING_FACTS = (
    *("model_id", "init", "task", "prompt", "precision", "effective_batch_size", "gradient_checkpointing"),
    "train_rows",
)
DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")
TECHNIQUE = {"deepspeed", "per_device_eval_batch_size", *DIVISION}
"""Flags that a technique or a number of pods changes by itself; the effective batch size is compared instead."""
BY_DESIGN = {"seed"}
"""Flags in which repeats of a run may differ."""
DATA = ("dataset_path", "data")
"""Names of the prepared data in the two scripts; a run's identity has the data's content key there."""
SHOWN_DIGITS = 12
"""Number of digits shown of the prepared data's content key and of a configuration's digest."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
"""DeepSpeed settings that are compared where both runs have them: buckets need memory whatever the stage."""

INSTRUCTIONS = "hardware instructions"
"""A setting that older runs do not record."""
MEASURED = "measured precision "
"""Prefix of the name of each number format that the first step ran in; compared where both runs have measured it."""


def settings(config: RunConfig | None) -> Settings:
    """All settings except technique and pods, by name: model, data, flags, DeepSpeed's keys, hardware, versions; empty
    where nothing is known.

    For GPUs, only the names count: the number of GPUs in use is the number of processes.
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
        **measured_settings(config),
    }


def measured_settings(config: RunConfig | None) -> Settings:
    """The number formats that the first step ran in, as far as they were measured."""
    measured = config.measured_precision if isinstance(config, Record) else None
    if measured is None:
        return {}
    values = {part: getattr(measured, part) for part in PRECISION_PARTS}
    return {f"{MEASURED}{part}": value for part, value in values.items() if value is not None}


def is_profiled(config: RunConfig | None) -> bool:
    """Whether DeepSpeed's flops profiler was on, which takes time of its own."""
    return bool(config and lookup(config.deepspeed or {}, "flops_profiler.enabled"))


def arrangement(config: RunConfig | None) -> Settings:
    """Technique, pods and what goes with them: equal, like the settings, for repeats of one run."""
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


def unlike_precision(one: RunConfig, other: RunConfig) -> list[str]:
    """Names of the settings by which two runs computed in different number formats."""
    names = unequal(settings(one), settings(other))
    return [name for name in names if name == "precision" or name in SETS_PRECISION or name.startswith(MEASURED)]


def is_of(name: str, of_run: Settings) -> bool:
    """Whether a run has a setting, even by default: no buckets without ZeRO, no DeepSpeed keys without DeepSpeed.

    A key that sets the precision counts for every run: a run without DeepSpeed computes as if it were not set.
    """
    if name in of_run or name in SETS_PRECISION:
        return True
    if name.startswith((*ONLY_WITH, MEASURED)) or name == INSTRUCTIONS:
        return False
    return name not in BUCKETS and (not name.startswith(PREFIX) or f"{PREFIX}optimizer.type" in of_run)


def required(compared: Settings) -> str:
    """A key that is equal where rows may be comparable: the settings that every run has."""
    return as_key({name: value for name, value in compared.items() if is_of(name, {})})


def as_key(*parts: Settings) -> str:
    """A key that is equal for equal settings."""
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


# The keys of an effective DeepSpeed configuration, as it stands.

PREFIX = "deepspeed "
"""Prefix of the name of each DeepSpeed key."""
FROM_FLAGS = "from the flags"
"""Value for an optimizer or a schedule that the configuration leaves to the flags, which are compared separately."""
ZERO = "zero_optimization"
ON_BY_DEFAULT = (
    *(f"{ZERO}.{name}" for name in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions")),
    *(f"{ZERO}.{name}" for name in ("use_multi_rank_bucket_allreduce", "compute_grad_norm", "load_from_fp32_weights")),
    *(f"{ZERO}.{name}" for name in ("ignore_unused_parameters", "memory_efficient_linear", "override_module_apply")),
    *("zero_force_ds_cpu_optimizer", "bf16.check_grad_overflow", "optimizer.params.fp32_optimizer_states"),
)
"""Keys for which off differs from absent; for others it does not, unless only some techniques have them. DeepSpeed
0.19.8, runtime/zero/config.py, runtime/constants.py, runtime/precision_config.py."""
SETS_PRECISION = tuple(
    f"{PREFIX}{key}"
    for key in (
        "torch_autocast.enabled",
        "communication_data_type",
        "data_types.grad_accum_dtype",
        "data_types.param_dtype",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "fp16.fp16_master_weights_and_grads",
        "optimizer.params.fp32_optimizer_states",
    )
)
"""Keys by which DeepSpeed computes in another precision than `--precision` says. Runs with them are refused; records
from before that have them, and no measured precision."""
ONLY_WITH = tuple(f"{PREFIX}{ZERO}.{name}" for name in ("stage3_", "sub_group_size", "offload_"))
"""Prefixes of keys that only some techniques have: they are compared where both runs have them."""
LEFT_OUT = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "bf16.enabled", "fp16.enabled"),
    *("optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay"),
    *("scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
    *(f"{ZERO}.stage", f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device"),
    *(f"{ZERO}.{name}" for name in BUCKETS),
    *("tensorboard.output_path", "tensorboard.job_name", "csv_monitor.output_path", "csv_monitor.job_name"),
)
"""Keys that are not compared, besides the profiler's: those that flags set too (a run whose configuration contradicts
them does not begin), those that the technique or the number of pods changes, and places in the run folder."""


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
