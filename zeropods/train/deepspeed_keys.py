"""The keys that DeepSpeed 0.19 knows, so that a misspelt one is found before anything is launched.

Importing deepspeed imports torch and takes seconds; a test compares this table with deepspeed's own models.
"""

from __future__ import annotations

import difflib
from typing import Any


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
