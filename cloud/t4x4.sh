#!/usr/bin/env bash
# One machine with four T4 (16 GB each): a quick test of the set-up, or the template's full training.
#
#     cloud/t4x4.sh quick        20 steps, a check of everything that can go wrong
#     cloud/t4x4.sh full         distilgpt2 on WikiText-2, one epoch
#
# A T4 has no BF16 and no FlashAttention. Costs: docs/cloud.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. cloud/machine.sh

: "${MODEL:=distilbert/distilgpt2}"

main() {
    local what flags
    what=$(kind "$@")
    need_gpus 4
    set_up
    flags=(--model_name_or_path "$MODEL" --max_seq_length 128 --per_device_train_batch_size 8
        --per_device_eval_batch_size 8 --gradient_accumulation_steps 1 --precision fp16 --attn_implementation sdpa
        --deepspeed dsconfig/causal_zero2_offload.json --lr_scheduler_type cosine
        --generation_prompt "The history of")
    case $what in
        quick) flags+=(--max_train_steps 20 --num_warmup_steps 2 --max_eval_steps 5) ;;
        full) flags+=(--num_train_epochs 1 --num_warmup_steps 100 --save_steps 200 --save_total_limit 2) ;;
    esac
    train "t4x4-$what" "${flags[@]}"
}

main "$@"
