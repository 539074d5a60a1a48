#!/usr/bin/env bash
# One machine with eight A100 (80 GB, or 40): a quick test of the set-up, or the full training of a 7B model.
#
#     cloud/a100x8.sh quick      20 steps of a small model, a check of everything that can go wrong
#     cloud/a100x8.sh full       Mistral-7B at 4,096 tokens on some 100 M tokens of C4, ZeRO-3, global batch 1,024
#
# The published recipe offloads (DSCONFIG=dsconfig/causal_zero3_offload.json); eight cards do not need it.
# Costs: docs/cloud.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. cloud/machine.sh

: "${MODEL:=mistralai/Mistral-7B-v0.1}"
: "${QUICK_MODEL:=distilbert/distilgpt2}"
: "${DSCONFIG:=dsconfig/zero3.json}"
: "${ATTENTION:=}"     # flash_attention_2 where the package flash-attn is installed, otherwise sdpa

best_attention() {
    if has_module flash_attn; then
        echo flash_attention_2
    else
        echo "a100x8.sh: flash-attn is not installed: --attn_implementation sdpa; see docs/cloud.md#flashattention-2" >&2
        echo sdpa
    fi
}

main() {
    local what flags
    what=$(kind "$@")
    need_gpus 8
    set_up
    flags=(--precision bf16 --deepspeed "$DSCONFIG" --learning_rate 1e-5 --logging_steps 10 --seed 42
        --generation_prompt "The history of")
    case $what in
        quick)
            flags+=(--model_name_or_path "$QUICK_MODEL" --max_seq_length 512 --per_device_train_batch_size 2
                --gradient_accumulation_steps 1 --attn_implementation sdpa --max_train_steps 20 --num_warmup_steps 2
                --max_eval_steps 5)
            ;;
        full)
            if [ -z "$ATTENTION" ]; then ATTENTION=$(best_attention); fi
            if [ "$DATA" = "$WIKITEXT" ]; then
                DATA=allenai/c4
                flags+=(--dataset_config en --subset 200000)
            fi
            flags+=(--model_name_or_path "$MODEL" --max_seq_length 4096 --per_device_train_batch_size 2
                --gradient_accumulation_steps 64 --attn_implementation "$ATTENTION" --gradient_checkpointing True
                --num_train_epochs 1 --num_warmup_steps 5 --save_steps 10 --save_total_limit 2)
            ;;
    esac
    train "a100x8-$what" "${flags[@]}"
}

main "$@"
