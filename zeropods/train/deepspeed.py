"""A DeepSpeed configuration: read, checked against flags that set the same values, and directed into the run folder.

A launch checks it too, before anything starts, so only `check_blocks` and the `spare_` functions here import torch.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.files import read_object
from zeropods.programs import variable_set
from zeropods.techniques import lookup
from zeropods.train.arguments import PASSES, ROWS

Config = dict[str, Any]

_TOP_LEVEL = """
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
    disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown
    optimizer pipeline prescale_gradients scheduler seq_parallel_communication_data_type steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
TOP_LEVEL = frozenset(_TOP_LEVEL.split())
"""Keys that DeepSpeed 0.19 knows; it ignores others. A test compares them with those that it reads."""
OBJECTS = ("zero_optimization", "bf16", "fp16", "flops_profiler", "tensorboard", "optimizer", "scheduler")
STAGES = (0, 1, 2, 3)
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OPTIMIZER, SCHEDULER = "optimizer.params", "scheduler.params"
EPSILON = 1e-8
"""AdamW's epsilon in every run."""
DEFAULTS: dict[str, Any] = {
    "gradient_clipping": 0.0,
    f"{OPTIMIZER}.lr": 1e-3,
    f"{OPTIMIZER}.betas": [0.9, 0.999],
    f"{OPTIMIZER}.eps": EPSILON,
    f"{OPTIMIZER}.weight_decay": 0.0,
    f"{SCHEDULER}.warmup_max_lr": 1e-3,
    f"{SCHEDULER}.warmup_num_steps": 1_000,
    f"{SCHEDULER}.total_num_steps": None,
}
"""Values that DeepSpeed 0.19 silently uses where a key is absent; None: the key must be there."""
SAME = {
    "train_micro_batch_size_per_gpu": [ROWS],
    "gradient_accumulation_steps": [PASSES],
    "gradient_clipping": ["max_grad_norm"],
    f"{OPTIMIZER}.lr": ["learning_rate"],
    f"{OPTIMIZER}.weight_decay": ["weight_decay"],
    f"{SCHEDULER}.warmup_max_lr": ["learning_rate"],
    f"{SCHEDULER}.warmup_num_steps": ["warmup_steps", "num_warmup_steps"],
    f"{SCHEDULER}.total_num_steps": ["max_steps", "max_train_steps"],
}
"""Keys that set the same value as a flag, each with the names that scripts have for that flag."""
FILLED = frozenset({*DEFAULTS, f"{SCHEDULER}.warmup_min_lr"})
"""Keys at which transformers replaces `auto` with a number."""
WARMUP = frozenset({"warmup_num_steps", "warmup_type"})
RATES = WARMUP | {"warmup_min_lr", "warmup_max_lr"}
SCHEDULES = {
    "WarmupLR": ("constant_with_warmup", RATES),
    "WarmupDecayLR": ("linear", RATES | {"total_num_steps"}),
    "WarmupCosineLR": ("cosine", WARMUP | {"total_num_steps", "warmup_min_ratio", "cos_min_ratio"}),
}
"""Schedules by DeepSpeed's name: the name of each for `--lr_scheduler_type`, and its parameters."""


def read_config(path: Path) -> Config:
    """The JSON object in a file; `UserError` if there is no file or no object in it."""
    if not path.is_file():
        raise UserError(f"--deepspeed {path}: no such file; expected one like dsconfig/zero1.json")
    return read_object(path, "correct the file")


def check_config(config: Config, path: str | Path, arguments: Mapping[str, Any], fp16_fault: str | None = None) -> None:
    """Refuse keys that DeepSpeed does not know, settings without effect, and values that contradict the flags.

    Args:
        path: where the configuration was read from, for messages.
        arguments: the script's flags by name, typed; where they are known, also `world_size`, the number of
            processes, and `optimizer_steps`. Missing ones are not compared.
        fp16_fault: why the model does not train in FP16; None where it does.
    """
    fault = next(_faults(config, arguments, fp16_fault), None)
    if fault is not None:
        raise UserError(f"--deepspeed {path}: {fault}")


def check_blocks(config: Config, path: str | Path) -> None:
    """Refuse values that DeepSpeed's own models of its blocks refuse; for a process that will import DeepSpeed."""
    from deepspeed.monitor.config import TensorBoardConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensorboard": TensorBoardConfig,
    }
    for block, model in models.items():
        try:
            model(**_without_auto(config.get(block) or {}))
        except ValidationError as error:
            found = error.errors()[0]
            place = ".".join(map(str, (block, *found["loc"])))
            known = [name for key, field in model.model_fields.items() for name in (key, field.alias) if name]
            fault = found["msg"]
            if found["type"] == "extra_forbidden":
                fault = _unknown(str(found["loc"][-1]), known)
            raise UserError(f"--deepspeed {path}: {place}: {fault}") from None


def effective_config(template: Config, run_folder: Path) -> Config:
    """The template with the profiler's and TensorBoard's output inside the run folder."""
    config = copy.deepcopy(template)
    if lookup(config, "flops_profiler.enabled"):
        config["flops_profiler"]["output_file"] = str(run_folder / "profile.txt")
    if lookup(config, "tensorboard.enabled"):
        config["tensorboard"]["output_path"] = str(run_folder / "tensorboard")
    return config


def _without_auto(block: Config) -> Config:
    """The block without values that transformers fills in later."""
    values = {key: _without_auto(value) if isinstance(value, dict) else value for key, value in block.items()}
    return {key: value for key, value in values.items() if value != "auto"}


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "remove it; see https://www.deepspeed.ai/docs/config-json"
    return f"unknown to DeepSpeed; {remedy}"


def _faults(config: Config, arguments: Mapping[str, Any], fp16_fault: str | None) -> Iterator[str]:
    for key in config:
        if key not in TOP_LEVEL:
            yield f"{key}: {_unknown(key, sorted(TOP_LEVEL))}"
    for block in OBJECTS:
        if not isinstance(config.get(block, {}), dict | None):
            yield f"{block} {config[block]!r}; expected an object"
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        yield f"zero_optimization.stage {stage!r}; expected 0, 1, 2 or 3"
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = lookup(config, f"zero_optimization.{key}.device")
        if device not in (None, "none") and stage < least:
            yield f"zero_optimization.{key} with stage {stage}: has no effect; needs stage {least} or more"
    if lookup(config, "fp16.enabled") is True and fp16_fault is not None:
        yield f'fp16.enabled true: {fp16_fault}; use bf16, and write "auto" here, or leave fp16 out'
    precision = arguments.get("precision")
    for name in ("bf16", "fp16"):
        enabled = lookup(config, f"{name}.enabled")
        if precision in ("fp32", "bf16", "fp16") and enabled != "auto" and bool(enabled) != (precision == name):
            shown = "missing" if enabled is None else json.dumps(enabled)
            yield f'{name}.enabled {shown}, --precision {precision}; write "auto", or give both the same'
    yield from _parameter_faults(config, arguments)


def _parameter_faults(config: Config, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Faults of the optimizer and the schedule, and keys whose value is not that of their flag."""
    for block in (OPTIMIZER, SCHEDULER):
        for name, value in (lookup(config, block) or {}).items():
            if value == "auto" and f"{block}.{name}" not in FILLED:
                yield f'{block}.{name} "auto": nothing fills it in; give a value, or leave it out'
    if "optimizer" in config and arguments.get("scaled_rates"):
        yield "optimizer: overrides --scaled_rates True; remove one of them"
    if "scheduler" in config and arguments.get("max_train_seconds"):
        yield f"scheduler: overrides --max_train_seconds {arguments['max_train_seconds']}; remove one of them"
    kind = lookup(config, "scheduler.type")
    if "scheduler" in config and kind not in SCHEDULES:
        yield f"scheduler.type {kind!r}; expected {', '.join(SCHEDULES)}; without it --lr_scheduler_type decides"
    ours, known = SCHEDULES.get(str(kind), ("", frozenset[str]()))
    for name in lookup(config, SCHEDULER) or {}:
        if ours and name not in known:
            yield f"{SCHEDULER}.{name}: unknown to {kind}; expected {', '.join(sorted(known))}"
    asked = arguments.get("lr_scheduler_type", ours)
    if ours and asked != ours:
        yield f"scheduler.type {kind!r}, --lr_scheduler_type {asked}; give --lr_scheduler_type {ours}"
    for key, (expected, said) in _expected(arguments).items():
        block, _, name = key.rpartition(".")
        if block and (block.split(".")[0] not in config or (block == SCHEDULER and name not in known)):
            continue
        value = lookup(config, key)
        if value is None and key in DEFAULTS and DEFAULTS[key] != expected:
            taken = "but DeepSpeed needs it" if DEFAULTS[key] is None else f"so DeepSpeed would use {DEFAULTS[key]}"
            yield f'{key} missing, {taken}; {said}: write "auto"'
        elif value not in (None, "auto") and value != expected:
            yield f'{key} {value!r}, {said}; write "auto", or give both the same'


def _expected(arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The value that each key must have, and in words what sets it; only for flags that are known."""
    told = {name: (value, f"--{name} {value}") for name, value in arguments.items()}
    expected = {key: told[name] for key, names in SAME.items() for name in names if name in told}
    expected[f"{OPTIMIZER}.eps"] = EPSILON, f"AdamW here uses {EPSILON}"
    warmup, total = f"{SCHEDULER}.warmup_num_steps", f"{SCHEDULER}.total_num_steps"
    if warmup in expected:
        # DeepSpeed does not accept 0.
        expected[warmup] = max(1, expected[warmup][0]), expected[warmup][1]
    if total in expected and expected[total][0] <= 0:
        del expected[total]
    if (steps := arguments.get("optimizer_steps")) is not None:
        expected[total] = steps, f"the run has {steps} optimizer steps"
    if {ROWS, PASSES, "world_size"} <= arguments.keys():
        rows, passes, ranks = (arguments[name] for name in (ROWS, PASSES, "world_size"))
        whole = rows * passes * ranks
        expected["train_batch_size"] = whole, f"{rows} rows x {passes} passes x {ranks} processes = {whole}"
    if "adam_beta2" in arguments:
        betas = [arguments.get("adam_beta1", 0.9), arguments["adam_beta2"]]
        expected[f"{OPTIMIZER}.betas"] = betas, f"the flags give {betas} (--adam_beta2 {betas[1]})"
    return expected


# torch's compiler, which DeepSpeed would load for an optimizer that a run does not have.


def spare_compiler(config: Mapping[str, Any]) -> None:
    """Import DeepSpeed's Muon without torch's compiler, unless the configuration asks for that optimizer.

    DeepSpeed imports Muon to check whether the optimizer of a run is one, and decorates it to be compiled: loading the
    compiler costs each rank more than a second and 40 MB. Other optimizers compile nothing, so results stay the same.
    Source: deepspeed/runtime/zero/utils.py, `is_zero_supported_optimizer`; torch/_dynamo/eval_frame.py, `_optimize`.
    """
    optimizer = config.get("optimizer") or {}
    if str(optimizer.get("type", "")).lower() == "muon":
        return
    # Another version of DeepSpeed may not have this module.
    with variable_set("TORCHDYNAMO_DISABLE", "1"), suppress(ImportError):
        import_module("deepspeed.runtime.zero.muon.original_muon")


# DeepSpeed's operation that adds tensors up in shared memory, which training never calls.
#
# DeepSpeed (0.19.8, comm/torch.py) loads it wherever ranks have no GPU, for tensor-parallel inference. Loading it
# compiles it, or waits for the process that does; each rank then puts a buffer of 66 MiB into `/dev/shm`, which stays
# there however the rank ends, and which a container with the usual 64 MiB has no room for (ops/csrc/cpu/comm/shm.cpp).


def spare_shared_memory() -> None:
    """Let DeepSpeed create its process groups without that operation, in this process."""
    import deepspeed.ops

    # Reading the attribute would first try the compilers of every operation; nothing else is looked up in this dict.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
