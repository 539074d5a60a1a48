"""What must be equal for the figures of two runs to be compared: everything but technique, pods and
seed.

`report.groups` computes a ratio of two rows where `required` is equal and nothing is `unequal`.
Settings are of two kinds: those that every run has, which `required` takes, and those that only
some runs have, such as the keys of stage 3, which are compared where both runs have them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from zeropods.measure.record import PRECISION_PARTS, Record, RunConfig
from zeropods.report.formulas import machines
from zeropods.techniques import TECHNIQUES, flags_of_techniques, lookup

Settings = dict[str, Any]
"""Values that are compared, by name: of flags, of facts, of DeepSpeed's keys, of hardware."""
SETTING_FACTS = (
    "model_id",
    "init",
    "task",
    "prompt",
    "precision",
    "effective_batch_size",
    "gradient_checkpointing",
    "train_rows",
)
"""Fields of a run's configuration that are compared."""
DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Flags by which the effective batch size is divided into ranks and passes."""
TECHNIQUE = {*flags_of_techniques(), "per_device_eval_batch_size", *DIVISION}
"""Flags that a technique or a number of pods changes by itself; the effective batch size is
compared instead."""
BY_DESIGN = {"seed"}
"""Flags in which repeats of a run may differ."""
DATA = ("dataset_path", "data")
"""Names of the prepared data in the two scripts; a run's identity has the data's content key
there."""
SHOWN_DIGITS = 12
"""Number of digits shown of the prepared data's content key and of a configuration's digest."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
"""DeepSpeed settings that are compared under their own names, where both runs have them: buckets
need memory whatever the stage."""

PRECISION_PREFIX = "measured precision "
"""Prefix of the name of each number format that the first step ran in; compared where both runs
have measured it."""


def settings(config: RunConfig | None) -> Settings:
    """All settings except technique and pods, by name: model, data, flags, DeepSpeed's keys,
    hardware, versions; empty where nothing is known.

    A run that has no record yet has no measured formats among them.
    """
    if config is None:
        return {}
    compared: Settings = {key: getattr(config, key) for key in SETTING_FACTS}
    identity = config.identity
    data_flag = next((name for name in DATA if name in identity), None)
    if data_flag is not None:
        compared["data"] = str(identity[data_flag])[:SHOWN_DIGITS]
    for flag in sorted(identity.keys() - TECHNIQUE - BY_DESIGN - {*SETTING_FACTS, *DATA}):
        compared[flag] = identity[flag]
    compared["profiler"] = is_profiled(config)

    if config.deepspeed:
        zero = config.deepspeed.get("zero_optimization") or {}
        for name in BUCKETS:
            if name in zero:
                compared[name] = zero[name]
        compared.update(deepspeed_settings(config.deepspeed))

    for key, value in config.hardware.items():
        compared[f"hardware {key}"] = value
    if "gpus" in config.hardware:
        # Only the names count: the number of GPUs in use is the number of processes.
        compared["hardware gpus"] = sorted(set(config.hardware["gpus"] or ()))
    for key, value in config.versions.items():
        compared[f"versions {key}"] = value
    compared.update(measured_settings(config))
    return compared


def measured_settings(config: RunConfig | None) -> Settings:
    """The number formats that the first step ran in, as far as they were measured; empty for a run
    without a record, or without a first step."""
    measured = config.measured_precision if isinstance(config, Record) else None
    if measured is None:
        return {}
    formats: Settings = {}
    for part in PRECISION_PARTS:
        value = getattr(measured, part)
        if value is not None:
            formats[f"{PRECISION_PREFIX}{part}"] = value
    return formats


def is_profiled(config: RunConfig | None) -> bool:
    """Whether DeepSpeed's flops profiler was on, which takes time of its own."""
    return bool(config and lookup(config.deepspeed or {}, "flops_profiler.enabled"))


def arrangement(config: RunConfig | None) -> Settings:
    """Technique, pods and what goes with them: equal, like the settings, for repeats of one run.
    All values are None without a configuration."""
    identity = config.identity if config else {}
    deepspeed = identity.get("deepspeed")
    digest = None
    if deepspeed is not None:
        digest = hashlib.sha256(as_key(deepspeed).encode()).hexdigest()[:SHOWN_DIGITS]
    number_of_machines = None
    if isinstance(config, Record) and config.ranks:
        number_of_machines = machines(config)
    return {
        **{key: getattr(config, key, None) for key in ("technique", "pods", "slots", *DIVISION)},
        "deepspeed": digest,
        "per_device_eval_batch_size": identity.get("per_device_eval_batch_size"),
        "machines": number_of_machines,
    }


def unequal(one: Settings, other: Settings) -> list[str]:
    """Names of the settings in which two runs differ, among those that both have, even by default;
    in the order of the first run, then of the other."""
    names = []
    for name in dict.fromkeys([*one, *other]):
        are_comparable = is_of(name, one) and is_of(name, other)
        if are_comparable and one.get(name) != other.get(name):
            names.append(name)
    return names


def unlike_precision(one: RunConfig, other: RunConfig) -> list[str]:
    """Names of the settings by which two runs computed in different number formats."""
    return [name for name in unequal(settings(one), settings(other)) if _is_of_precision(name)]


def _is_of_precision(name: str) -> bool:
    """Whether a setting is the precision that was asked for, or a format that was measured."""
    return name == "precision" or name.startswith(PRECISION_PREFIX)


def is_of(name: str, settings_of_run: Settings) -> bool:
    """Whether a run has a setting, even by default.

    A run without ZeRO has no buckets, one without DeepSpeed none of its keys, and one whose first
    step was not measured no number formats. What every run has, but this one has not recorded,
    counts as had.
    """
    if name in settings_of_run:
        return True
    if name.startswith((*ONLY_WITH, PRECISION_PREFIX)) or name in BUCKETS:
        return False
    if name.startswith(DEEPSPEED_PREFIX):
        # With DeepSpeed, a run has every key, by default those that its configuration lacks.
        # `deepspeed_settings` gives the type of the optimizer even where the flags say it.
        return f"{DEEPSPEED_PREFIX}optimizer.type" in settings_of_run
    return True


def required(compared: Settings) -> str:
    """A key that is equal where rows may be comparable: the settings that every run has.

    Args:
        compared: the settings of a row.
    """
    of_every_run = {}
    for name, value in compared.items():
        # Even a run that has recorded nothing has this setting.
        if is_of(name, {}):
            of_every_run[name] = value
    return as_key(of_every_run)


def as_key(*parts: Settings) -> str:
    """A key that is equal for equal settings."""
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


# The keys of an effective DeepSpeed configuration, as it stands.

DEEPSPEED_PREFIX = "deepspeed "
"""Prefix of the name of each DeepSpeed key."""
FROM_FLAGS = "from the flags"
"""Value for an optimizer or a schedule that the configuration leaves to the flags, which are
compared separately."""
ON_BY_DEFAULT = (
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.compute_grad_norm",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.ignore_unused_parameters",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.override_module_apply",
    "zero_force_ds_cpu_optimizer",
    "bf16.check_grad_overflow",
    "optimizer.params.fp32_optimizer_states",
)
"""Keys for which off differs from absent; for others it does not, unless only some techniques have
them. DeepSpeed 0.19.8, runtime/zero/config.py, runtime/constants.py,
runtime/precision_config.py."""
ONLY_WITH = (
    "deepspeed zero_optimization.stage3_",
    "deepspeed zero_optimization.sub_group_size",
    "deepspeed zero_optimization.offload_",
)
"""Prefixes of settings that only some techniques have: they are compared where both runs have
them."""
LEFT_OUT = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    *chain.from_iterable(technique.keys for technique in TECHNIQUES),
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "tensorboard.output_path",
    "tensorboard.job_name",
    "csv_monitor.output_path",
    "csv_monitor.job_name",
)
"""Keys that are not compared, besides the profiler's: those that flags set too (a run whose
configuration contradicts them does not begin), those that the technique or the number of pods
changes, and places in the run folder. `BUCKETS` are compared under names of their own."""


def deepspeed_settings(config: Mapping[str, Any]) -> Settings:
    """The keys of an effective configuration that are compared, with their values, by name:
    `deepspeed BLOCK.KEY`.

    A key that is off counts as absent, unless it is on by default or only some techniques have it.
    """
    values = {
        "optimizer.type": FROM_FLAGS,
        "scheduler.type": FROM_FLAGS,
        **dict(_dotted_items(config)),
    }
    compared: Settings = {}
    for key in sorted(values):
        value = values[key]
        is_left_out = key in LEFT_OUT or key.startswith("flops_profiler.")
        if is_left_out or value == "auto":
            continue
        name = f"{DEEPSPEED_PREFIX}{key}"
        off_counts = name.startswith(ONLY_WITH) or key.startswith(ON_BY_DEFAULT)
        if value or off_counts:
            compared[name] = value
    return compared


def _dotted_items(block: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of a configuration as `BLOCK.KEY`, with its value.

    Args:
        before: what is put before each key: the names of the outer blocks, with a dot after each.
    """
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _dotted_items(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
