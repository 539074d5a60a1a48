"""A DeepSpeed configuration: read, checked against the flags, pointed into the run folder, named by its technique."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

# The keys that DeepSpeed 0.19 knows, so that a misspelt one is found before anything is launched.
#
# Importing deepspeed imports torch and takes seconds; a test compares this table with deepspeed's own models.


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = _keys("""
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
    disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown
    optimizer pipeline prescale_gradients scheduler seq_parallel_communication_data_type steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
""")
STAGE3 = _keys("""
    allgather_sequential gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance
    model_persistence_threshold module_granularity_threshold param_persistence_threshold prefetch_bucket_size
    use_all_reduce_for_fetch_params
""")
"""Keys of `zero_optimization` that may be written with `stage3_` before them, and without."""
ALL_STAGES = _keys("""
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload cpu_offload_param
    cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear offload_optimizer
    offload_param overlap_comm override_module_apply parameter_alignment pipeline_loading_checkpoint
    reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage
    stage3_gather_fp16_weights_on_model_save sub_group_size use_multi_rank_bucket_allreduce zenflow
    zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
""")
BLOCKS = {
    "zero_optimization": ALL_STAGES | STAGE3 | {f"stage3_{key}" for key in STAGE3},
    "zero_optimization.offload_param": _keys("buffer_count buffer_size device max_in_cpu nvme_path pin_memory"),
    "zero_optimization.offload_optimizer": _keys("""
        buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio
        super_offload
    """),
    "bf16": _keys("""
        bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update
    """),
    "fp16": _keys("""
        auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
        loss_scale loss_scale_window min_loss_scale
    """),
    "flops_profiler": _keys("""
        detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules
    """),
    "tensorboard": _keys("enabled job_name output_path"),
    "optimizer": _keys("legacy_fusion params type"),
    "scheduler": _keys("params type"),
}
"""Known keys of each block that is checked; the others are left to DeepSpeed."""


FEW = 12
"""So many keys fit on the line of a message."""


def lookup(config: dict[str, Any], dotted: str) -> Any:
    """The value at `block.key`; None where it or its block is absent."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def first_fault(config: dict[str, Any]) -> str | None:
    """The first unknown key, or block that is no object, with the remedy; None where there is neither."""
    for key in config:
        if key not in TOP_LEVEL:
            return _unknown("", key, TOP_LEVEL)
    for block, known in BLOCKS.items():
        found = lookup(config, block)
        if found is not None and not isinstance(found, dict):
            return f"{block} {found!r}; expected an object"
        for key in found or ():
            if key not in known:
                return _unknown(f"{block}.", key, known)
    return None


def _unknown(place: str, key: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1)
    if near:
        remedy = f"did you mean {near[0]}?"
    elif len(known) <= FEW:
        remedy = f"expected {', '.join(sorted(known))}"
    else:
        remedy = "take it out; https://www.deepspeed.ai/docs/config-json lists them"
    return f"{place}{key}: unknown to DeepSpeed; {remedy}"


# The optimizer and scheduler blocks of a DeepSpeed configuration, against the flags that say the same.
#
# transformers fills some values that are `auto`, from the flags; what it does not fill, and what is left out,
# DeepSpeed would take from its own defaults without a word.

OPTIMIZER, SCHEDULER = "optimizer.params", "scheduler.params"
EPSILON = 1e-8
"""AdamW's, in every run."""
DEFAULTS: dict[str, Any] = {
    f"{OPTIMIZER}.lr": 1e-3,
    f"{OPTIMIZER}.betas": [0.9, 0.999],
    f"{OPTIMIZER}.eps": EPSILON,
    f"{OPTIMIZER}.weight_decay": 0.0,
    f"{SCHEDULER}.warmup_max_lr": 1e-3,
    f"{SCHEDULER}.warmup_num_steps": 1_000,
    f"{SCHEDULER}.total_num_steps": None,
}
"""What DeepSpeed 0.19 takes where a value is absent; None: it must be there."""
WARMUP = frozenset({"warmup_num_steps", "warmup_type"})
RATES = WARMUP | {"warmup_min_lr", "warmup_max_lr"}
SCHEDULES = {
    "WarmupLR": ("constant_with_warmup", RATES),
    "WarmupDecayLR": ("linear", RATES | {"total_num_steps"}),
    "WarmupCosineLR": ("cosine", WARMUP | {"total_num_steps", "warmup_min_ratio", "cos_min_ratio"}),
}
"""By type: what `--lr_scheduler_type` calls it, and its parameters."""
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Types that DeepSpeed 0.19 builds itself, in whatever case."""
OF_TORCH = ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Others that it takes from `torch.optim`, by their exact names."""
WARMUP_TYPES = ("linear", "log")
SHARES = ("warmup_min_ratio", "cos_min_ratio")
"""Parts of the highest rate."""
FILLED = frozenset({*DEFAULTS, f"{SCHEDULER}.warmup_min_lr"})
"""Where transformers puts a number in the place of `auto`."""


def optimizer_faults(config: dict[str, Any], arguments: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the two blocks, where they are there.

    Args:
        arguments: as `deepspeed_config.check_config` has them.
    """
    yield from _unfilled(config)
    yield from _optimizer(config)
    yield from _schedule(config, arguments)
    kind = lookup(config, "scheduler.type")
    for key, (expected, said) in _expected(arguments).items():
        block, name = key.rsplit(".", 1)
        known = kind in SCHEDULES and name in SCHEDULES[kind][1]
        if block.split(".")[0] not in config or (block == SCHEDULER and not known):
            continue
        value = lookup(config, key)
        if value is None and DEFAULTS[key] != expected:
            taken = "which it needs" if DEFAULTS[key] is None else f"DeepSpeed would take {DEFAULTS[key]}"
            yield f'{key} absent, {taken}; {said}: write "auto"'
        elif value not in (None, "auto") and value != expected:
            yield f'{key} {value!r}, {said}; write "auto", or give both the same'


def _unfilled(config: dict[str, Any]) -> Iterator[str]:
    for block in (OPTIMIZER, SCHEDULER):
        for name, value in (lookup(config, block) or {}).items():
            if value == "auto" and f"{block}.{name}" not in FILLED:
                yield f'{block}.{name} "auto": nothing fills it in; give a value, or leave it out'


def _optimizer(config: dict[str, Any]) -> Iterator[str]:
    kind = lookup(config, "optimizer.type")
    known = {name.lower() for name in OPTIMIZERS}
    if "optimizer" in config and str(kind).lower() not in known and kind not in OF_TORCH:
        yield f"optimizer.type {kind!r}; expected {', '.join([*OPTIMIZERS, *OF_TORCH])}"


def _schedule(config: dict[str, Any], arguments: Mapping[str, Any]) -> Iterator[str]:
    kind = lookup(config, "scheduler.type")
    if "scheduler" not in config:
        return
    if kind not in SCHEDULES:
        yield f"scheduler.type {kind!r}; expected {', '.join(SCHEDULES)}; without it --lr_scheduler_type decides"
        return
    yield from _parameter_faults(lookup(config, SCHEDULER) or {})
    ours, known = SCHEDULES[kind]
    for name in lookup(config, SCHEDULER) or {}:
        if name not in known:
            yield f"{SCHEDULER}.{name}: unknown to {kind}; expected {', '.join(sorted(known))}"
    asked = arguments.get("lr_scheduler_type", ours)
    if asked != ours:
        yield f"scheduler.type {kind!r}, --lr_scheduler_type {asked}; give --lr_scheduler_type {ours}"


def _parameter_faults(parameters: Mapping[str, Any]) -> Iterator[str]:
    kind = parameters.get("warmup_type", "log")
    if kind not in WARMUP_TYPES:
        yield f"{SCHEDULER}.warmup_type {kind!r}; expected {' or '.join(WARMUP_TYPES)}"
    for name in SHARES:
        value = parameters.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            yield f"{SCHEDULER}.{name} {value!r}; expected 0 to 1"


def _expected(arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What each key must be, and by which flag, of those that are known."""
    rate, decay = _said(arguments, "learning_rate"), _said(arguments, "weight_decay")
    warmup = _said(arguments, "warmup_steps", "num_warmup_steps")
    expected: dict[str, tuple[Any, str] | None] = {
        f"{OPTIMIZER}.lr": rate,
        f"{OPTIMIZER}.betas": _betas(arguments),
        f"{OPTIMIZER}.eps": (EPSILON, f"AdamW's here is {EPSILON}"),
        f"{OPTIMIZER}.weight_decay": decay,
        f"{SCHEDULER}.warmup_max_lr": rate,
        # DeepSpeed takes no 0.
        f"{SCHEDULER}.warmup_num_steps": None if warmup is None else (max(1, warmup[0]), warmup[1]),
        f"{SCHEDULER}.total_num_steps": _total_steps(arguments),
    }
    return {key: value for key, value in expected.items() if value is not None}


def _said(arguments: Mapping[str, Any], *names: str) -> tuple[Any, str] | None:
    """The value of the flag that a script has under one of these names."""
    return next(((arguments[name], f"--{name} {arguments[name]}") for name in names if name in arguments), None)


def _betas(arguments: Mapping[str, Any]) -> tuple[Any, str] | None:
    if "adam_beta2" not in arguments:
        return None
    betas = [arguments.get("adam_beta1", 0.9), arguments["adam_beta2"]]
    return betas, f"the flags say {betas} (--adam_beta2 {betas[1]})"


def _total_steps(arguments: Mapping[str, Any]) -> tuple[Any, str] | None:
    if "optimizer_steps" in arguments:
        return arguments["optimizer_steps"], f"the run has {arguments['optimizer_steps']} optimizer steps"
    asked = _said(arguments, "max_steps", "max_train_steps")
    return asked if asked is not None and asked[0] > 0 else None


# A DeepSpeed configuration: read, checked against the flags, pointed into the run folder, named by its technique.

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
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object, parse_constant=_no_number)
    except FileNotFoundError:
        raise UserError(f"--deepspeed {path}: no such file; expected one like dsconfig/zero1.json") from None
    except ValueError as error:
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


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
