"""What a DeepSpeed configuration may say: every fault is told at once, each in a few words and with what to do."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.train.deepspeed_config import check_operation, effective_config, operation_of, read_config
from zeropods.train.deepspeed_config_check import BLOCKS, check_config
from zeropods.train.deepspeed_keys import KEYS, REMOVED
from zeropods.train.flags import PROJECT, CausalArguments, TextToSQLArguments

FLAGS = {**asdict(TextToSQLArguments(precision="fp32", max_steps=3)), "world_size": 2}
CAUSAL = {**asdict(CausalArguments(precision="fp32")), "world_size": 2, "gradient_accumulation_steps": 1}
PLAIN = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
}
ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
THIRD = {"stage": 3}


def zero(**keys: Any) -> dict[str, Any]:
    """A change of ZeRO's block, at stage 3 unless it names another."""
    return {"zero_optimization": {**THIRD, **keys}}


def adamw(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {**ADAMW, **params}}}


def profiler(**keys: Any) -> dict[str, Any]:
    return {"flops_profiler": {"enabled": True, **keys}}


def message(changes: dict[str, Any], **flags: Any) -> str:
    """What is said to a run with a changed configuration; a key that is None is taken out."""
    config = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    with pytest.raises(UserError) as refused:
        check_config(config, "some.json", {**FLAGS, **flags}, TextToSQLArguments.fp16_fault)
    return str(refused.value)


WRONG: list[tuple[dict[str, Any], str]] = [
    # Names that DeepSpeed does not know, in any block.
    ({"zero_optimisation": {}}, "zero_optimisation: unknown to DeepSpeed; did you mean zero_optimization?"),
    ({"comms_config": {"verbose": False}}, "comms_config: unknown to DeepSpeed; remove it"),
    ({"monitor_config": {}}, "monitor_config: unknown to DeepSpeed; remove it"),
    ({"_comment": "mine"}, "_comment: taken for a key, since JSON has no comments; remove it"),
    ({"//": "mine"}, "//: taken for a key, since JSON has no comments; remove it"),
    ({"reduce_bucket_size": 1}, "unknown to DeepSpeed here; its place is zero_optimization.reduce_bucket_size"),
    (profiler(profile_steps=2), "flops_profiler.profile_steps: unknown to DeepSpeed; did you mean profile_step?"),
    (zero(reduce_bucket_sise=1), "zero_optimization.reduce_bucket_sise: unknown to DeepSpeed; did you mean reduce_b"),
    (zero(offload_param={"pinned": True}), "zero_optimization.offload_param.pinned: unknown to DeepSpeed; remove it"),
    ({"bf16": {"enable": True}}, "bf16.enable: unknown to DeepSpeed; did you mean enabled?"),
    ({"aio": {"blocksize": 1}}, "aio.blocksize: unknown to DeepSpeed; did you mean block_size?"),
    ({"timers": {"throughput": {"on": True}}}, "timers.throughput.on: unknown to DeepSpeed; remove it"),
    ({"wandb": {"enabled": False, "grup": "x"}}, "wandb.grup: unknown to DeepSpeed; did you mean group?"),
    ({"hybrid_engine": {"enabled": False, "tp": 1}}, "hybrid_engine.tp: unknown to DeepSpeed; remove it"),
    (adamw(learning_rate=1), "optimizer.params.learning_rate: unknown to DeepSpeed; remove it"),
    # Values of another type.
    ({"gradient_clipping": "1.0"}, 'gradient_clipping "1.0"; expected a number, at least 0'),
    ({"train_batch_size": 1.5}, "train_batch_size 1.5; expected a whole number, at least 1"),
    ({"wall_clock_breakdown": "yes"}, 'wall_clock_breakdown "yes"; expected true or false'),
    ({"zero_optimization": True}, "zero_optimization true; expected an object"),
    ({"bf16": [True]}, "bf16 [true]; expected an object"),
    (zero(stage="3"), 'zero_optimization.stage "3"; expected 0, 1, 2 or 3'),
    (zero(stage=True), "zero_optimization.stage true; expected 0, 1, 2 or 3"),
    (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size 0; expected a whole number, at least 1"),
    (zero(overlap_comm=1), "zero_optimization.overlap_comm 1; expected true or false or null"),
    (zero(offload_optimizer=None), "zero_optimization.offload_optimizer null; expected an object"),
    (zero(offload_param={"device": "gpu"}), 'offload_param.device "gpu"; expected "none", "cpu" or "nvme"'),
    (zero(offload_optimizer={"ratio": 2}), "zero_optimization.offload_optimizer.ratio 2; expected a number from 0 to"),
    (profiler(profile_step=-1), "flops_profiler.profile_step -1; expected a whole number, at least 0"),
    ({"log_level": "loud"}, 'log_level "loud"; expected "debug", "info", "warning", "error" or "critical"'),
    (adamw(betas=0.9), "optimizer.params.betas 0.9; expected a list of two numbers from 0 to less than 1"),
    # `auto` where nothing fills it in.
    (zero(overlap_comm="auto"), 'zero_optimization.overlap_comm "auto": nothing fills it in; give a value, or leave'),
    (zero(stage="auto"), 'zero_optimization.stage "auto": nothing fills it in'),
    (zero(offload_param={"device": "auto"}), 'zero_optimization.offload_param.device "auto": nothing fills it in'),
    ({"fp16": {"loss_scale": "auto"}}, 'fp16.loss_scale "auto": nothing fills it in'),
    ({"expert_parallel": {"top_k": "auto"}}, 'expert_parallel.top_k "auto": nothing fills it in'),
    # What the next layers do not begin without.
    ({"zero_optimization": None}, 'zero_optimization missing; write "zero_optimization": {"stage": 1}, or leave out'),
    (
        {"train_batch_size": None, "train_micro_batch_size_per_gpu": None},
        'train_micro_batch_size_per_gpu missing; write "auto"',
    ),
    ({"optimizer": {"params": ADAMW}}, 'optimizer.type missing; write "AdamW", or leave optimizer out'),
    # Parallelism that divides otherwise than ZeRO does.
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: divides model or rows otherwise than ZeRO;"),
    ({"pipeline": {"stages": 2}}, "pipeline: divides model or rows otherwise than ZeRO;"),
    ({"expert_parallel": {"enabled": True}}, "expert_parallel: divides model or rows otherwise than ZeRO;"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size 2: divides model or rows otherwise than ZeRO;"),
    ({"hybrid_engine": {"enabled": True}}, "hybrid_engine: is for models that generate while they train; remove it"),
    (zero(zero_quantized_nontrainable_weights=True), "nontrainable_weights true: every weight is trained here; remo"),
    (zero(zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow: ZenFlow is not one of this project's techniques"),
    (zero(mics_shard_size=-1), "zero_optimization.mics_shard_size -1: DeepSpeed has removed this feature"),
    (zero(offload_param={"device": "nvme"}), 'offload_param.device "nvme": nobody has tried offload to NVMe with th'),
    # Precision that is set anywhere but in `bf16` and `fp16`.
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast: would set the precision behind --p"),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, 'data_types.grad_accum_dtype "fp32": would set the precision'),
    ({"communication_data_type": "bf16"}, 'communication_data_type "bf16": would set the precision behind --precisio'),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states true: the optimizer's states would be BF"),
    ({"fp16": {"enabled": True}}, "fp16.enabled true: T5's activations overflow FP16 and the loss becomes NaN; use bf"),
    ({"weight_quantization": {"num_bits": 8}}, "weight_quantization: the record's precision would not be that of the"),
    # What would end a run, change its checkpoints, or do nothing.
    ({"autotuning": {"enabled": True}}, "autotuning: ends each run after a few steps, without a model; remove it"),
    ({"data_efficiency": {"data_routing": {"enabled": True}}}, "data_efficiency: rows and their order are this proj"),
    ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal true: this project verifies and resumes"),
    ({"checkpoint": {"writer": {"type": "python"}}}, "checkpoint.writer: this project verifies and resumes what De"),
    ({"datastates_ckpt": {}}, "datastates_ckpt: this project verifies and resumes what DeepSpeed's usual writer"),
    (zero(elastic_checkpoint=True), "zero_optimization.elastic_checkpoint true: such checkpoints cannot be resumed"),
    ({"memory_breakdown": True}, "memory_breakdown true: resets the peaks of GPU memory that the record shows"),
    ({"activation_checkpointing": {"profile": True}}, "activation_checkpointing: has no effect on the models here"),
    ({"compile": {"deepcompile": True}}, "compile: has no effect, since DeepSpeed's compiler is not called here"),
    ({"wandb": {"enabled": True}}, "wandb.enabled true: writes outside the run folder; remove it; the run folder ha"),
    (zero(cpu_offload=True), 'cpu_offload true: is DeepSpeed\'s old name; write "offload_optimizer": {"device": "c'),
    # Keys that do not go together.
    (zero(max_live_parameters=1, stage3_max_live_parameters=1), "stage3_max_live_parameters is the same key; remove"),
    (zero(compute_grad_norm=False), "compute_grad_norm false: needs stage 1 or 2, --max_grad_norm 0 and no offload"),
    (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio with stage 2: needs stage 3; remove it"),
    ({"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}, 'optimizer.type "Lamb": other runs have AdamW; wri'),
    (adamw(max_grad_norm=1.0), "max_grad_norm 1.0: DeepSpeed does not accept it there; remove it, and write"),
    (adamw(bias_correction=False), "optimizer.params.bias_correction false: AdamW corrects its bias in other runs"),
    (adamw(torch_adam=True, bias_correction=True), "bias_correction: unknown to PyTorch's AdamW, which torch_adam"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
        "weight_decay missing, so DeepSpeed would use 0.01; --weight_decay 0.0",
    ),
    # Values that are not the flag's, and a step that the run does not have.
    ({"gradient_clipping": 0.5}, 'gradient_clipping 0.5, --max_grad_norm 1.0; write "auto", or give both the same'),
    ({"bf16": {"enabled": True}}, 'bf16.enabled true, --precision fp32; write "auto", or give both the same'),
    (profiler(profile_step=50), "flops_profiler.profile_step 50, the run has 3 optimizer steps; there would be no"),
    (profiler(profile_step=3), "profile_step 3, the run has 3 optimizer steps; there would be no profile: give 1 or"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_a_wrong_configuration_is_refused_with_its_one_fault(changes: dict[str, Any], said: str) -> None:
    refusal = message(changes)
    assert refusal.startswith("--deepspeed some.json: ") and said in refusal
    # Nothing else is blamed.
    assert "\n" not in refusal and " faults: " not in refusal


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("value", [None, False, {"enabled": False}])
def test_what_deepspeed_has_removed_is_refused_whatever_its_value(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name}.*DeepSpeed has removed this feature, .*; remove it"):
        check_config({**PLAIN, name: value}, "some.json", FLAGS)


TOGETHER = [
    # Of the kind of files that are around: each has what must be changed, and nothing more.
    (
        {"_comment": "", "comms_config": {}, "monitor_config": {}, "tensor_parallel": {"autotp_size": 2}},
        ["_comment: ", "comms_config: unknown", "monitor_config: unknown", "tensor_parallel: divides"],
    ),
    (
        {
            "train_batch_size": 24, "train_micro_batch_size_per_gpu": 6, "zero_optimization": None,
            "fp16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0}},
        },
        [
            "optimizer.params.max_grad_norm 1.0: ", "zero_optimization missing; ", "fp16.enabled true: ",
            "train_micro_batch_size_per_gpu 6, ", "optimizer.params.lr 3e-05, ", "train_batch_size 24, ",
        ],
    ),
    (
        {"bf16": {"enabled": True}, **zero(reduce_bucket_size=0, stage3_gather_fp16_weights_on_model_save=True)},
        ["reduce_bucket_size 0; ", "stage3_gather_fp16_weights_on_model_save true: ", "bf16.enabled true, "],
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}, "optimizer": {"type": "OneBitAdam"}},
        ["optimizer.type \"OneBitAdam\": ", "scheduler.type 'OneCycle'; ", "optimizer.params.lr missing, "],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), TOGETHER)
def test_all_faults_are_told_at_once(changes: dict[str, Any], said: list[str]) -> None:
    refusal = message(changes)
    assert refusal.startswith(f"--deepspeed some.json: {len(said)} faults: (1) ") and "\n" not in refusal
    assert all(fault in refusal for fault in said), refusal


RIGHT: list[dict[str, Any]] = [
    {},
    # What does nothing: switched off, at the value that DeepSpeed takes by itself, or for features that are off.
    {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "expert_parallel": {"enabled": False}},
    {"autotuning": {"enabled": False, "fast": True}, "hybrid_engine": {"enabled": False, "max_out_tokens": 8}},
    {"torch_autocast": {"enabled": False}, "data_types": {}, "communication_data_type": None, "compile": {}},
    {"wandb": {"enabled": False, "team": None}, "csv_monitor": {"enabled": False}, "comms_logger": {"verbose": True}},
    {"activation_checkpointing": {"partition_activations": False}, "gradient_allreduce_op": "mean"},
    {"data_efficiency": {"enabled": False}, "checkpoint": {"tag_validation": "Warn"}, "aio": {"block_size": 1e6}},
    zero(zero_hpz_partition_size=1, zero_quantized_weights=False, elastic_checkpoint=False),
    zero(stage=1, zero_hpz_partition_size=0, zero_quantized_gradients=False),
    # Sizes as people write them, names with and without `stage3_`, and what the libraries fill in.
    zero(sub_group_size=1e14, max_live_parameters=0, stage3_max_reuse_distance=1e9, overlap_comm=None),
    zero(reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto"),
    # A batch that DeepSpeed completes, and clipping at its own norm.
    {"train_batch_size": None, "gradient_accumulation_steps": None, "gradient_clipping": None},
    # A file without `bf16`, with PyTorch's Adam in main memory and DeepSpeed's schedule.
    {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 15, "min_loss_scale": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
        **zero(stage=2, offload_optimizer={"device": "cpu", "pin_memory": True}, allgather_bucket_size=2e8),
    },
    profiler(profile_step=2, module_depth=-1, output_file=None),
]
CONSTANT = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
"""A schedule that takes the optimizer's rate."""


@pytest.mark.parametrize("changes", RIGHT)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "auto"])
def test_what_is_right_passes_with_any_precision(changes: dict[str, Any], precision: str) -> None:
    config = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    check_config(config, "some.json", {**FLAGS, "precision": precision}, TextToSQLArguments.fp16_fault)


HPZ = "zero_optimization.zero_hpz_partition_size"
OFFLOADED = {"device": "cpu"}


@pytest.mark.parametrize(
    ("keys", "known", "said"),
    [
        ({"zero_hpz_partition_size": 3}, {"pod_slots": (2, 2)}, f"{HPZ} 3: does not divide the 2 slots of a pod; wr"),
        # It would go beyond a pod, though it divides all processes.
        ({"zero_hpz_partition_size": 4}, {"pod_slots": (2, 2)}, f"{HPZ} 4: does not divide the 2 slots of a pod; wr"),
        ({"zero_hpz_partition_size": 2}, {"pod_slots": (1, 1)}, f"{HPZ} 2: a pod of 1 slot has nothing to divide; use"),
        ({"zero_hpz_partition_size": "auto"}, {"pod_slots": (1,)}, f'{HPZ} "auto": a pod of 1 slot has nothing to di'),
        ({"zero_hpz_partition_size": "auto"}, {"pod_slots": (4, 2)}, f'{HPZ} "auto": pods have 2 and 4 slots; give a'),
        ({"zero_hpz_partition_size": 4}, {"pod_slots": (4, 2)}, f"{HPZ} 4: does not divide the 2 slots of a pod; wri"),
        ({"zero_hpz_partition_size": -2}, {"pod_slots": (2,)}, f"{HPZ} -2; expected a whole number, at least 0"),
        ({"zero_hpz_partition_size": "all"}, {"pod_slots": (2,)}, f'{HPZ} "all"; expected a whole number, at least 0'),
        ({"zero_hpz_partition_size": "auto", "stage": 2}, {}, f'{HPZ} "auto" with stage 2: has no effect; needs stag'),
        (
            {"zero_hpz_partition_size": 2, "offload_param": OFFLOADED},
            {},
            f"{HPZ} 2 with offload_param: nobody has tried them together; remove one of them",
        ),
        (
            {"zero_quantized_weights": True},
            {"has_no_gpu": True},
            "zero_quantized_weights true: DeepSpeed quantizes by operations of CUDA, and there is no GPU here; remove",
        ),
        (
            {"zero_quantized_gradients": True},
            {"has_no_gpu": True},
            "zero_quantized_gradients true: DeepSpeed quantizes by operations of CUDA, and there is no GPU here; remov",
        ),
        ({"zero_quantized_weights": True, "stage": 1}, {}, "zero_quantized_weights true with stage 1: has no effect;"),
        (
            {"zero_quantized_gradients": True, "reduce_scatter": False},
            {},
            "zero_quantized_gradients true with reduce_scatter false: DeepSpeed ends there; remove reduce_scatter",
        ),
        (
            {"zero_quantized_gradients": True, "offload_optimizer": OFFLOADED},
            {},
            "zero_quantized_gradients true with offload_optimizer: nobody has tried them together; remove one of them",
        ),
    ],
)
def test_zeropp_that_does_not_fit_the_pods_the_machine_or_the_other_keys_is_refused(
    keys: dict[str, Any], known: dict[str, Any], said: str
) -> None:
    refusal = message(zero(**keys), **known)
    assert said in refusal and "faults: " not in refusal and "\n" not in refusal


@pytest.mark.parametrize(
    ("size", "pod_slots"), [("auto", (2, 2)), (2, (2, 2)), (2.0, (4, 4)), (4, (4,)), (2, (4, 2)), (1, (1, 1))]
)
def test_zeropp_that_fits_the_pods_passes(size: object, pod_slots: tuple[int, ...]) -> None:
    config = {**PLAIN, **zero(zero_hpz_partition_size=size)}
    check_config(config, "some.json", {**FLAGS, "pod_slots": pod_slots, "has_no_gpu": True})


def test_quantized_weights_and_gradients_pass_where_there_may_be_a_gpu() -> None:
    config = {**PLAIN, **zero(zero_quantized_weights=True, zero_quantized_gradients=True)}
    check_config(config, "some.json", {**FLAGS, "pod_slots": (8, 8), "has_no_gpu": False})


def test_a_second_division_that_is_left_to_the_launch_is_among_the_slots_of_a_pod(tmp_path: Path) -> None:
    config = effective_config({**PLAIN, **zero(zero_hpz_partition_size="auto")}, tmp_path, slots=8)
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 8
    config = effective_config({**PLAIN, **zero(zero_hpz_partition_size=2)}, tmp_path, slots=8)
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 2
    config = effective_config({**PLAIN, **zero()}, tmp_path, slots=8)
    assert "zero_hpz_partition_size" not in config["zero_optimization"]


def test_a_schedule_without_a_rate_has_that_of_the_optimizer_or_a_default_that_is_reported() -> None:
    check_config({**PLAIN, **CONSTANT}, "some.json", {**FLAGS, "lr_scheduler_type": "constant_with_warmup"})
    decay = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}}
    assert message(decay).endswith(
        'warmup_max_lr missing, so DeepSpeed would use 0.001; --learning_rate 0.0003: write "auto"'
    )


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        # What `auto` comes to depends on the machine, which nobody knows before a launch.
        ({"bf16": {"enabled": True}}, {"precision": "auto"}, 'write "auto", or give --precision bf16'),
        ({"bf16": {"enabled": False}}, {"precision": "auto"}, 'write "auto", or give --precision fp32'),
        ({"fp16": {"enabled": True}}, {"precision": "auto"}, 'fp16.enabled true, --precision auto; write "auto", or'),
        ({"fp16": {"enabled": False}}, {"precision": "fp16"}, "fp16.enabled false, --precision fp16; write"),
        ({"zero_optimization": {"stage": 0}}, {"precision": "bf16"}, "stage 0, --precision bf16: is right in FP32 on"),
        ({"zero_optimization": {}}, {"precision": "auto"}, "stage 0, --precision auto: is right in FP32 only"),
        (
            {"gradient_accumulation_steps": None},
            {"gradient_accumulation_steps": 4},
            "missing, so DeepSpeed would use 1",
        ),
        ({"gradient_clipping": None}, {"max_grad_norm": 0.5}, "gradient_clipping missing, so DeepSpeed would use 1.0"),
        (profiler(), {"max_train_steps": 1}, "profile_step 1, the run has 1 optimizer steps; there would be no profi"),
        (profiler(profile_step=9), {"max_train_steps": 20, "optimizer_steps": 9}, "the run has 9 optimizer steps; the"),
    ],
)
def test_a_value_is_held_against_the_flags(changes: dict[str, Any], flags: dict[str, Any], said: str) -> None:
    config = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    with pytest.raises(UserError) as refused:
        check_config(config, "some.json", {**CAUSAL, **flags})
    assert said in str(refused.value) and "faults: " not in str(refused.value)


def test_of_another_s_script_only_names_types_and_contradictions_are_checked() -> None:
    theirs = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1, "overlap_comm": "auto"}}
    check_config(theirs, "some.json", {}, ours=False)
    with pytest.raises(
        UserError, match=r"2 faults: \(1\) zero_optimization.stage 7; .* \(2\) train_batch_size 5, 2 rows"
    ):
        wrong = {"train_batch_size": 5, "zero_optimization": {"stage": 7}}
        batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "world_size": 2}
        check_config(wrong, "some.json", batch, ours=False)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["auto", "cpu", "", "AdamW"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["enabled", "x"]), inner)),
    max_leaves=3,
)
NAMES = sorted({name for place in KEYS for name in place.split(".")} | {"", "_", "x"})


A_NAME = st.one_of(st.sampled_from(NAMES), st.text(max_size=3))


@given(st.dictionaries(A_NAME, st.one_of(JSON, st.dictionaries(A_NAME, JSON, max_size=4)), max_size=6))
def test_whatever_stands_in_a_file_is_answered_in_one_line(config: dict[str, Any]) -> None:
    for flags in (FLAGS, CAUSAL, {}):
        try:
            check_config(config, "some.json", flags, TextToSQLArguments.fp16_fault)
        except UserError as refused:
            assert re.fullmatch(r"--deepspeed some\.json: [^\n]+", str(refused))


def test_every_key_lies_in_a_block_that_is_known_and_says_what_to_do() -> None:
    assert all(block in KEYS for block in BLOCKS)
    for place, key in KEYS.items():
        assert bool(key.because) == (key.verdict == "refused"), place
        assert key.remedy and not key.because.endswith((".", ";"))


# Files


def test_a_key_that_occurs_twice_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"zero_optimization": {"stage": 1, "stage": 2}, "bf16": {}, "bf16": {}}')
    with pytest.raises(UserError) as refused:
        read_config(path)
    assert str(refused.value) == f"{path}: bf16, zero_optimization.stage: there twice; keep one of each"


def test_a_precision_that_a_file_leaves_out_is_left_to_the_flag(tmp_path: Path) -> None:
    config = effective_config({**PLAIN, "bf16": {"check_grad_overflow": True}}, tmp_path, 1)
    assert (config["bf16"], config["fp16"]) == ({"check_grad_overflow": True, "enabled": "auto"}, {"enabled": "auto"})
    assert effective_config({**PLAIN, "fp16": {"enabled": False}}, tmp_path, 1)["fp16"] == {"enabled": False}


@pytest.mark.parametrize("words", ["--launcher none", "--launcher none --dry-run", "--launcher slurm --dry-run"])
def test_a_launch_tells_all_faults_before_anything_starts(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Raw data, which a run would prepare itself.
    (tmp_path / "raw").mkdir()
    (tmp_path / "mine.json").write_text(json.dumps({**PLAIN, "_": "", **profiler(profile_step=9)}))
    flags = ["--init", "random", "--model_name_or_path", "gpt-tiny", "--data", "raw", "--max_train_steps", "5"]
    argv = ["launch", *words.split(), "--", "causal_train.py", *flags, "--deepspeed", "mine.json"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert (
        err.startswith("zeropods: --deepspeed mine.json: 2 faults: (1) _: taken for a key, ") and err.count("\n") == 1
    )
    assert "(2) flops_profiler.profile_step 9, the run has 5 optimizer steps" in err and out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"raw", "mine.json"}


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_script_tells_all_faults_before_it_imports_torch(rank: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**PLAIN, "train_batch_size": 5, "_": ""}))
    script = str(PROJECT / "textsql_train.py")
    code = (
        "import runpy, sys\n"
        f"sys.argv = {[script, '--deepspeed', str(path)]!r}\n"
        "try:\n"
        f"    runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    print(ended.code, 'torch' in sys.modules)\n"
    )
    environment = {**os.environ, **({} if rank is None else {"RANK": rank, "WORLD_SIZE": "3"})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    rows = 32 if rank is None else 96
    assert done.stdout == "1 False\n" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"zeropods: --deepspeed {path}: 2 faults: (1) _: taken for a key, ")
    assert f"processes = {rows}; write" in done.stderr


# What DeepSpeed compiles for the optimizer's step


@pytest.mark.parametrize(
    ("changes", "operation"),
    [
        ({}, None),
        (zero(offload_param={"device": "cpu"}), None),
        (zero(offload_optimizer={"device": "none"}), None),
        (zero(offload_optimizer={"device": "cpu"}), "cpu_adam"),
        ({**zero(offload_optimizer={"device": "cpu"}), **adamw()}, "cpu_adam"),
        ({**zero(offload_optimizer={"device": "cpu"}), **adamw(torch_adam=True)}, None),
        ({**zero(offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False}, None),
        (adamw(), "fused_adam"),
        (adamw(torch_adam=True), None),
    ],
)
def test_it_is_known_which_operation_a_configuration_needs(changes: dict[str, Any], operation: str | None) -> None:
    assert operation_of({**PLAIN, **changes}) == operation


def test_offload_without_a_compiler_is_refused_with_the_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(command, "own_gpus", lambda: 0)
    (tmp_path / "raw").mkdir()
    flags = ["--init", "random", "--model_name_or_path", "gpt-tiny", "--data", str(tmp_path / "raw")]
    path = PROJECT / "dsconfig" / "zero3_offload.json"
    argv = ["launch", "--launcher", "none", "--dry-run", "--", "causal_train.py", *flags, "--deepspeed", str(path)]
    assert main(argv) == 1
    assert capsys.readouterr().err == (
        f"zeropods: --deepspeed {path}: DeepSpeed must compile cpu_adam for its optimizer, and here is no C++ compiler "
        "(apt-get install g++); install it\n"
    )
    # What is compiled already needs no compiler.
    (tmp_path / "extensions" / "cpu_adam").mkdir(parents=True)
    (tmp_path / "extensions" / "cpu_adam" / "cpu_adam.so").touch()
    assert main(argv) == 0


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_what_is_sent_quantized_on_a_gpu_needs_an_operation_that_cuda_s_compiler_compiles(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-toolkit"))
    monkeypatch.setenv("PATH", str(tmp_path))
    config = {**PLAIN, **zero(**{key: True})}
    with pytest.raises(UserError, match=r"must compile quantizer for what it sends quantized, .* no nvcc \("):
        check_operation(config, "some.json", on_gpu=True)
    (tmp_path / "extensions" / "quantizer").mkdir(parents=True)
    (tmp_path / "extensions" / "quantizer" / "quantizer.so").touch()
    check_operation(config, "some.json", on_gpu=True)
