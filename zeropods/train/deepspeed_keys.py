"""The keys of a DeepSpeed configuration, one a line: what values each takes, and whether this
project is right with it.

The names and types are those of DeepSpeed 0.19.8 (runtime/config.py and the models of its blocks).
They are kept here since a launch and a plan check configurations without loading DeepSpeed;
`tests/full/train/test_deepspeed_keys.py` compares them with the installed version and names every
key that was added, removed, or changed.

A verdict says whether a run trains, counts rows and precision, saves, resumes and exports rightly
with a key:

* `works`: a test trains, resumes and saves with it;
* `unproven`: it runs on GPUs only, where no test has trained with it yet; without a GPU it is
  refused;
* `harmless`: it changes nothing of that;
* `refused`: it would, or nobody has shown that it does not. The reason is part of the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

# What values a key may have


@dataclass(frozen=True)
class Kind:
    """A set of JSON values."""

    words: str
    """The values in words, after `expected`."""
    holds: Callable[[object], bool]
    """Whether a value is one of them."""


def one_of(*values: object) -> Kind:
    """The values that are listed, without any others that Python takes for equal (`True` and 1, 1
    and 1.0)."""
    listed = [(type(value), value) for value in values]
    words = [_shown(value) for value in values]
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return Kind(text, lambda value: (type(value), value) in listed)


def either(first: Kind, second: Kind) -> Kind:
    """The values of the first kind and those of the second."""
    return Kind(
        f"{first.words} or {second.words}", lambda value: first.holds(value) or second.holds(value)
    )


def _shown(value: object) -> str:
    """A value as JSON writes it."""
    if value is None:
        return "null"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_whole(value: object) -> TypeGuard[int | float]:
    """Whether a number is whole; people write large ones as 5e8."""
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


def number(words: str, *, least: float = -math.inf, below: float = math.inf) -> Kind:
    """The numbers from `least` on that are less than `below`."""
    return Kind(words, lambda value: _is_number(value) and least <= value < below)


def whole_number(words: str, *, least: float = -math.inf, most: float = math.inf) -> Kind:
    """The whole numbers from `least` to `most`."""
    return Kind(words, lambda value: _is_whole(value) and least <= value <= most)


def words_of(*words: str) -> Kind:
    """Words that may be written with small or capital letters."""
    return Kind(
        one_of(*words).words, lambda value: isinstance(value, str) and value.lower() in words
    )


def _is_off(value: object) -> bool:
    """Whether nothing in a block, or in the blocks within it, is `enabled`."""
    if not isinstance(value, dict):
        return True
    return value.get("enabled", False) is False and all(_is_off(inner) for inner in value.values())


ANYTHING = Kind("anything", lambda value: True)
NOTHING = Kind("nothing", lambda value: False)
NULL = one_of(None)
FALSE = one_of(False)
TRUE = one_of(True)
BOOLEAN = one_of(True, False)
TEXT = Kind("text", lambda value: isinstance(value, str))
NAMES = Kind(
    "a list of names",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
DTYPE = words_of("fp32", "fp16", "bf16")
TORCH_DTYPE = one_of("float32", "float16", "bfloat16", "fp32", "fp16", "bf16", "float", "half")
DEVICE = one_of("none", "cpu", "nvme")
NUMBER = number("a number")
NOT_NEGATIVE = number("a number, at least 0", least=0)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
DECAY = number("a number from 0 to less than 1", least=0, below=1)
DECAYS = Kind(
    "a list of two numbers from 0 to less than 1",
    lambda value: (
        isinstance(value, list) and len(value) == 2 and all(DECAY.holds(decay) for decay in value)
    ),
)
WHOLE = whole_number("a whole number")
COUNT = whole_number("a whole number, at least 0", least=0)
POSITIVE = whole_number("a whole number, at least 1", least=1)
STEPS = Kind(
    "a whole number, at least 1, without a point or an exponent",
    lambda value: type(value) is int and value >= 1,
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
EMPTY = one_of({})
OFF = Kind(
    "an object without anything enabled", lambda value: isinstance(value, dict) and _is_off(value)
)
IDLE = Kind(
    "an object in which nothing is true",
    lambda value: isinstance(value, dict) and not any(value.values()),
)
ONE_RANK = Kind(
    "an autotp_size of 0 or 1", lambda value: value in ({}, {"autotp_size": 0}, {"autotp_size": 1})
)

# What is known of a key

REMOVE = "remove it"


@dataclass(frozen=True)
class Key:
    """What is known of one key of a configuration."""

    kind: Kind
    """The values that DeepSpeed accepts."""
    verdict: Literal["works", "unproven", "harmless", "refused"]
    because: str = ""
    """Why it is refused."""
    remedy: str = REMOVE
    """What to do where it is refused."""
    unless: Kind = NOTHING
    """The values with which a refused key does nothing, so that it is not refused."""
    fills: bool = False
    """Whether transformers, accelerate or this project replace `auto` with a value; the libraries
    fail at any other."""


def works(kind: Kind, *, auto: bool = False) -> Key:
    """A key with which a test has trained to the end; `auto` where a library or this project fills
    that in."""
    return Key(kind, "works", fills=auto)


def unproven(kind: Kind) -> Key:
    """A key for GPUs only, with which no test has trained yet."""
    return Key(kind, "unproven")


def harmless(kind: Kind) -> Key:
    """A key that changes nothing that a run is judged by."""
    return Key(kind, "harmless")


def refused(kind: Kind, because: str, *, unless: Kind = NOTHING, remedy: str = REMOVE) -> Key:
    """A key that is refused, but for values that do nothing."""
    return Key(kind, "refused", because, remedy, unless)


# Reasons and remedies that several keys share

GONE = "DeepSpeed has removed this feature, and ends where it finds the key"
OLD_NAME = "is DeepSpeed's old name"
PRECISION = "would set the precision behind --precision and the record"
BY_FLAG = "remove it; --precision decides"
DIVIDES = "divides model or rows otherwise than ZeRO; the run would be counted and saved wrongly"
NVME = "nobody has tried offload to NVMe with this project"
CPU = 'write "cpu"'
CHECKPOINTS = "this project verifies and resumes what DeepSpeed's usual writer makes"
ELSEWHERE = "writes outside the run folder"
LOGS = "remove it; the run folder has tensorboard/ and record.json"
NO_COMPILER = "has no effect, since DeepSpeed's compiler is not called here"
COMPILE = "remove it; --compile blocks compiles a T5"

REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)
"""Blocks of earlier versions that DeepSpeed refuses by itself."""

KEYS: dict[str, Key] = {
    # The batch. Each of the three must be the flag's value, or "auto".
    "train_batch_size": works(POSITIVE, auto=True),
    "train_micro_batch_size_per_gpu": works(POSITIVE, auto=True),
    "gradient_accumulation_steps": works(POSITIVE, auto=True),
    "managed_gradient_accumulation": refused(
        BOOLEAN, "transformers counts the passes of a step", unless=TRUE
    ),
    "dataloader_drop_last": harmless(BOOLEAN),
    # Gradients.
    "gradient_clipping": works(NOT_NEGATIVE, auto=True),
    "gradient_allreduce_op": refused(
        TEXT,
        "gradients would be the sum over ranks, and grow with their number",
        unless=one_of("mean"),
    ),
    "prescale_gradients": refused(BOOLEAN, "ZeRO-2 and ZeRO-3 do not support it", unless=FALSE),
    "gradient_predivide_factor": refused(
        NUMBER, "ZeRO-2 does not support it", unless=one_of(1, 1.0)
    ),
    "communication_data_type": refused(DTYPE, PRECISION, unless=NULL, remedy=BY_FLAG),
    "seq_parallel_communication_data_type": harmless(either(DTYPE, NULL)),
    "disable_allgather": harmless(BOOLEAN),
    # Precision.
    "bf16": works(OBJECT),
    "bf16.enabled": works(BOOLEAN, auto=True),
    "bf16.check_grad_overflow": works(BOOLEAN),
    "bf16.immediate_grad_update": harmless(BOOLEAN),
    "bf16.bf16_master_weights_and_grads": refused(
        BOOLEAN, "the masters would be BF16", unless=FALSE
    ),
    "bf16.bf16_optimizer_states": refused(
        BOOLEAN, "the optimizer's states would be BF16", unless=FALSE
    ),
    "bfloat16": refused(
        OBJECT, OLD_NAME, remedy="write bf16, which is the name that transformers reads"
    ),
    "fp16": works(OBJECT),
    "fp16.enabled": works(BOOLEAN, auto=True),
    "fp16.auto_cast": harmless(BOOLEAN),
    # The scale of losses in FP16, which CPUs do not train in: the test trains with these keys while
    # FP16 is off.
    "fp16.loss_scale": works(NOT_NEGATIVE),
    "fp16.initial_scale_power": works(COUNT),
    "fp16.loss_scale_window": works(POSITIVE),
    "fp16.hysteresis": works(COUNT),
    "fp16.consecutive_hysteresis": works(BOOLEAN),
    "fp16.min_loss_scale": works(POSITIVE),
    "fp16.fp16_master_weights_and_grads": refused(
        BOOLEAN, "the masters would be FP16", unless=FALSE
    ),
    "torch_autocast": refused(OBJECT, PRECISION, unless=OFF, remedy=BY_FLAG),
    "torch_autocast.enabled": harmless(BOOLEAN),
    "torch_autocast.dtype": harmless(TORCH_DTYPE),
    "torch_autocast.lower_precision_safe_modules": harmless(NAMES),
    "data_types": harmless(OBJECT),
    "data_types.grad_accum_dtype": refused(TEXT, PRECISION, unless=NULL, remedy=BY_FLAG),
    "data_types.param_dtype": refused(TEXT, PRECISION, unless=NULL, remedy=BY_FLAG),
    "data_types.buffer_dtype": refused(TEXT, PRECISION, unless=NULL, remedy=BY_FLAG),
    "data_types.keep_in_fp32_modules": refused(NAMES, PRECISION, remedy=BY_FLAG),
    # The optimizer and the schedule; keys of the schedule depend on its type
    # (`deepspeed_config_check.SCHEDULES`).
    "optimizer": works(OBJECT),
    "optimizer.type": works(TEXT),
    "optimizer.legacy_fusion": harmless(BOOLEAN),
    "optimizer.params": works(OBJECT),
    "optimizer.params.lr": works(NOT_NEGATIVE, auto=True),
    "optimizer.params.betas": works(DECAYS, auto=True),
    "optimizer.params.eps": works(NOT_NEGATIVE, auto=True),
    "optimizer.params.weight_decay": works(NOT_NEGATIVE, auto=True),
    "optimizer.params.torch_adam": works(BOOLEAN),
    "optimizer.params.adam_w_mode": refused(
        BOOLEAN, "would be Adam; other runs have AdamW", unless=TRUE
    ),
    "optimizer.params.bias_correction": refused(
        BOOLEAN, "AdamW corrects its bias in other runs", unless=TRUE
    ),
    "optimizer.params.amsgrad": refused(
        BOOLEAN, "DeepSpeed's AdamW does not have it", unless=FALSE
    ),
    "optimizer.params.fp32_optimizer_states": refused(
        BOOLEAN, "the optimizer's states would not be FP32", unless=TRUE
    ),
    "optimizer.params.max_grad_norm": refused(
        NOT_NEGATIVE,
        "DeepSpeed does not accept it there",
        remedy='remove it, and write "gradient_clipping": "auto"',
    ),
    "scheduler": works(OBJECT),
    "scheduler.type": works(TEXT),
    "scheduler.params": works(OBJECT),
    "scheduler.params.warmup_min_lr": works(NOT_NEGATIVE, auto=True),
    "scheduler.params.warmup_max_lr": works(NOT_NEGATIVE, auto=True),
    "scheduler.params.warmup_num_steps": works(STEPS, auto=True),
    "scheduler.params.warmup_type": works(one_of("log", "linear")),
    "scheduler.params.total_num_steps": works(STEPS, auto=True),
    "scheduler.params.warmup_min_ratio": works(SHARE),
    "scheduler.params.cos_min_ratio": works(SHARE),
    "zero_allow_untested_optimizer": harmless(BOOLEAN),
    "zero_force_ds_cpu_optimizer": works(BOOLEAN),
    # ZeRO.
    "zero_optimization": works(OBJECT),
    "zero_optimization.stage": works(one_of(0, 1, 2, 3)),
    "zero_optimization.contiguous_gradients": works(BOOLEAN),
    "zero_optimization.reduce_scatter": works(BOOLEAN),
    "zero_optimization.reduce_bucket_size": works(POSITIVE, auto=True),
    "zero_optimization.use_multi_rank_bucket_allreduce": works(BOOLEAN),
    "zero_optimization.allgather_partitions": works(BOOLEAN),
    "zero_optimization.allgather_bucket_size": works(COUNT),
    "zero_optimization.overlap_comm": works(either(BOOLEAN, NULL)),
    "zero_optimization.compute_grad_norm": works(BOOLEAN),
    "zero_optimization.load_from_fp32_weights": refused(
        BOOLEAN, "a resumed run would lose the low bits of its weights", unless=TRUE
    ),
    "zero_optimization.elastic_checkpoint": refused(
        BOOLEAN,
        "such checkpoints cannot be resumed",
        unless=FALSE,
        remedy="remove it; --resume fits other numbers",
    ),
    "zero_optimization.sub_group_size": works(COUNT),
    "zero_optimization.stage3_prefetch_bucket_size": works(COUNT, auto=True),
    "zero_optimization.stage3_param_persistence_threshold": works(COUNT, auto=True),
    "zero_optimization.stage3_model_persistence_threshold": works(COUNT),
    "zero_optimization.stage3_max_live_parameters": works(COUNT),
    "zero_optimization.stage3_max_reuse_distance": works(COUNT),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": works(BOOLEAN, auto=True),
    "zero_optimization.stage3_module_granularity_threshold": refused(
        WHOLE, "a trial with it failed in its first step", unless=whole_number("0 or less", most=0)
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": works(BOOLEAN),
    "zero_optimization.stage3_allgather_sequential": works(BOOLEAN),
    "zero_optimization.ignore_unused_parameters": works(BOOLEAN),
    "zero_optimization.round_robin_gradients": refused(
        BOOLEAN,
        "resumed on another number of ranks, a run would go on with other weights",
        unless=FALSE,
    ),
    "zero_optimization.parameter_alignment": works(BOOLEAN),
    "zero_optimization.memory_efficient_linear": works(BOOLEAN),
    "zero_optimization.override_module_apply": works(BOOLEAN),
    "zero_optimization.log_trace_cache_warnings": works(BOOLEAN),
    "zero_optimization.enable_sanity_checks": works(BOOLEAN),
    "zero_optimization.save_muon_momentum_buffer_in_memory": harmless(BOOLEAN),
    "zero_optimization.pipeline_loading_checkpoint": works(BOOLEAN),
    "zero_optimization.leaf_module": works(OBJECT),
    "zero_optimization.leaf_module.classes": works(either(NAMES, TEXT)),
    "zero_optimization.leaf_module.names": works(either(NAMES, TEXT)),
    "zero_optimization.leaf_module.name_suffixes": works(either(NAMES, TEXT)),
    "zero_optimization.legacy_stage1": refused(BOOLEAN, "DeepSpeed has removed it", unless=FALSE),
    # ZeRO++. Which sizes fit the pods, and what needs a GPU, is said by `deepspeed_config_check`.
    "zero_optimization.zero_hpz_partition_size": works(COUNT, auto=True),
    "zero_optimization.zero_quantized_weights": unproven(BOOLEAN),
    "zero_optimization.zero_quantized_gradients": unproven(BOOLEAN),
    "zero_optimization.zero_quantized_nontrainable_weights": refused(
        BOOLEAN, "every weight is trained here", unless=FALSE
    ),
    "zero_optimization.zeropp_loco_param": refused(ANYTHING, GONE),
    "zero_optimization.mics_shard_size": refused(ANYTHING, GONE),
    "zero_optimization.mics_hierarchical_params_gather": refused(ANYTHING, GONE),
    "zero_optimization.cpu_offload": refused(
        either(BOOLEAN, NULL), OLD_NAME, remedy='write "offload_optimizer": {"device": "cpu"}'
    ),
    "zero_optimization.cpu_offload_param": refused(
        either(BOOLEAN, NULL), OLD_NAME, remedy='write "offload_param": {"device": "cpu"}'
    ),
    "zero_optimization.cpu_offload_use_pin_memory": refused(
        either(BOOLEAN, NULL), OLD_NAME, remedy="write pin_memory within the offload's object"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": refused(
        BOOLEAN, OLD_NAME, remedy="write stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.zenflow": refused(
        OBJECT, "ZenFlow is not one of this project's techniques", unless=NULL
    ),
    # Offload.
    "zero_optimization.offload_optimizer": works(OBJECT),
    "zero_optimization.offload_optimizer.device": refused(
        DEVICE, NVME, unless=one_of("none", "cpu"), remedy=CPU
    ),
    "zero_optimization.offload_optimizer.pin_memory": works(BOOLEAN),
    "zero_optimization.offload_optimizer.ratio": works(SHARE),
    "zero_optimization.offload_optimizer.nvme_path": harmless(either(TEXT, NULL)),
    "zero_optimization.offload_optimizer.buffer_count": harmless(COUNT),
    "zero_optimization.offload_optimizer.pipeline_read": harmless(BOOLEAN),
    "zero_optimization.offload_optimizer.pipeline_write": harmless(BOOLEAN),
    "zero_optimization.offload_optimizer.fast_init": harmless(BOOLEAN),
    "zero_optimization.offload_optimizer.super_offload": refused(
        BOOLEAN, "SuperOffload is not one of this project's techniques", unless=FALSE
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": harmless(SHARE),
    "zero_optimization.offload_param": works(OBJECT),
    "zero_optimization.offload_param.device": refused(
        DEVICE, NVME, unless=one_of("none", "cpu"), remedy=CPU
    ),
    "zero_optimization.offload_param.pin_memory": works(BOOLEAN),
    "zero_optimization.offload_param.nvme_path": harmless(either(TEXT, NULL)),
    "zero_optimization.offload_param.buffer_count": harmless(COUNT),
    "zero_optimization.offload_param.buffer_size": harmless(COUNT),
    "zero_optimization.offload_param.max_in_cpu": harmless(COUNT),
    "aio": harmless(OBJECT),
    "aio.block_size": harmless(POSITIVE),
    "aio.queue_depth": harmless(POSITIVE),
    "aio.intra_op_parallelism": harmless(POSITIVE),
    "aio.single_submit": harmless(BOOLEAN),
    "aio.overlap_events": harmless(BOOLEAN),
    "aio.use_gds": harmless(FALSE),
    # Measurements and logs.
    "flops_profiler": works(OBJECT),
    "flops_profiler.enabled": works(BOOLEAN),
    "flops_profiler.profile_step": works(COUNT),
    "flops_profiler.module_depth": works(WHOLE),
    "flops_profiler.top_modules": works(POSITIVE),
    "flops_profiler.detailed": works(BOOLEAN),
    "flops_profiler.recompute_fwd_factor": works(NOT_NEGATIVE),
    "flops_profiler.output_file": harmless(either(TEXT, NULL)),
    "tensorboard": works(OBJECT),
    "tensorboard.enabled": works(BOOLEAN),
    "tensorboard.output_path": harmless(TEXT),
    "tensorboard.job_name": works(TEXT),
    "csv_monitor": harmless(OBJECT),
    "csv_monitor.enabled": refused(BOOLEAN, ELSEWHERE, unless=FALSE, remedy=LOGS),
    "csv_monitor.output_path": harmless(TEXT),
    "csv_monitor.job_name": harmless(TEXT),
    "wandb": harmless(OBJECT),
    "wandb.enabled": refused(BOOLEAN, ELSEWHERE, unless=FALSE, remedy=LOGS),
    "wandb.group": harmless(either(TEXT, NULL)),
    "wandb.team": harmless(either(TEXT, NULL)),
    "wandb.project": harmless(TEXT),
    "comet": harmless(OBJECT),
    "comet.enabled": refused(BOOLEAN, ELSEWHERE, unless=FALSE, remedy=LOGS),
    "comet.samples_log_interval": harmless(WHOLE),
    "comet.project": harmless(either(TEXT, NULL)),
    "comet.workspace": harmless(either(TEXT, NULL)),
    "comet.api_key": harmless(either(TEXT, NULL)),
    "comet.experiment_name": harmless(either(TEXT, NULL)),
    "comet.experiment_key": harmless(either(TEXT, NULL)),
    "comet.online": harmless(either(BOOLEAN, NULL)),
    "comet.mode": harmless(either(TEXT, NULL)),
    "comms_logger": harmless(OBJECT),
    "comms_logger.enabled": refused(
        BOOLEAN, "times every message, and nothing here prints its summary", unless=FALSE
    ),
    "comms_logger.verbose": harmless(BOOLEAN),
    "comms_logger.prof_all": harmless(BOOLEAN),
    "comms_logger.prof_ops": harmless(NAMES),
    "comms_logger.debug": harmless(BOOLEAN),
    "wall_clock_breakdown": works(BOOLEAN),
    "memory_breakdown": refused(
        BOOLEAN, "resets the peaks of GPU memory that the record shows", unless=FALSE
    ),
    "timers": works(OBJECT),
    "timers.throughput": works(OBJECT),
    "timers.throughput.enabled": works(BOOLEAN),
    "timers.throughput.synchronized": works(BOOLEAN),
    "steps_per_print": harmless(either(POSITIVE, NULL)),
    "dump_state": harmless(BOOLEAN),
    "log_level": harmless(words_of("debug", "info", "warning", "error", "critical")),
    "vocabulary_size": harmless(either(COUNT, NULL)),
    "disable_python_gc": works(BOOLEAN),
    # Checkpoints.
    "checkpoint": harmless(OBJECT),
    "checkpoint.tag_validation": harmless(words_of("ignore", "warn", "fail")),
    "checkpoint.load_universal": refused(
        BOOLEAN, CHECKPOINTS, unless=FALSE, remedy="remove it; --resume decides"
    ),
    "checkpoint.use_node_local_storage": refused(BOOLEAN, CHECKPOINTS, unless=FALSE),
    "checkpoint.parallel_write": harmless(OBJECT),
    "checkpoint.parallel_write.pipeline_stage": harmless(BOOLEAN),
    "checkpoint.checkpoint_serialization": refused(BOOLEAN, CHECKPOINTS, unless=TRUE),
    "checkpoint.writer": refused(OBJECT, CHECKPOINTS, unless=NULL),
    "datastates_ckpt": refused(ANYTHING, CHECKPOINTS, unless=FALSE),
    "activation_checkpointing": refused(
        OBJECT,
        "has no effect on the models here",
        unless=IDLE,
        remedy="remove it; --gradient_checkpointing True",
    ),
    "activation_checkpointing.partition_activations": harmless(BOOLEAN),
    "activation_checkpointing.contiguous_memory_optimization": harmless(BOOLEAN),
    "activation_checkpointing.cpu_checkpointing": harmless(BOOLEAN),
    "activation_checkpointing.number_checkpoints": harmless(NULL),
    "activation_checkpointing.synchronize_checkpoint_boundary": harmless(BOOLEAN),
    "activation_checkpointing.profile": harmless(BOOLEAN),
    # What trains otherwise than by ZeRO, or elsewhere than here. The keys within are looked into
    # only where DeepSpeed looks into them though the feature is off.
    "tensor_parallel": refused(OBJECT, DIVIDES, unless=ONE_RANK),
    "pipeline": refused(OBJECT, DIVIDES, unless=EMPTY),
    "expert_parallel": refused(OBJECT, DIVIDES, unless=OFF),
    "sequence_parallel_size": refused(POSITIVE, DIVIDES, unless=one_of(1)),
    "use_data_before_expert_parallelism": refused(BOOLEAN, DIVIDES, unless=FALSE),
    "hybrid_engine": refused(OBJECT, "is for models that generate while they train", unless=OFF),
    "hybrid_engine.enabled": harmless(BOOLEAN),
    "hybrid_engine.max_out_tokens": harmless(POSITIVE),
    "hybrid_engine.inference_tp_size": harmless(WHOLE),
    "hybrid_engine.release_inference_cache": harmless(BOOLEAN),
    "hybrid_engine.pin_parameters": harmless(BOOLEAN),
    "hybrid_engine.tp_gather_partition_size": harmless(WHOLE),
    "hybrid_engine.enable_cuda_graph": harmless(BOOLEAN),
    "autotuning": refused(
        OBJECT,
        "ends each run after a few steps, without a model",
        unless=OFF,
        remedy="remove it; zeropods plan compares techniques and batch sizes",
    ),
    "data_efficiency": refused(OBJECT, "rows and their order are this project's own", unless=OFF),
    "weight_quantization": refused(
        OBJECT, "the record's precision would not be that of the weights", unless=EMPTY
    ),
    "compile": refused(OBJECT, NO_COMPILER, unless=EMPTY, remedy=COMPILE),
    # What DeepSpeed has removed.
    **dict.fromkeys(REMOVED, refused(ANYTHING, GONE)),
}
"""Every key that DeepSpeed knows, by its place."""

NAMED_WITHOUT = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Keys of `zero_optimization` whose names DeepSpeed also takes without `stage3_`; libraries fill in
no `auto` there."""
KEYS |= {
    f"zero_optimization.{name}": replace(KEYS[f"zero_optimization.stage3_{name}"], fills=False)
    for name in NAMED_WITHOUT
}
