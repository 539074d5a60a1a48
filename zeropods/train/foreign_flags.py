"""Flags that a script does not have: what other projects' flags are called here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

SETTINGS = {
    "model_name": "model_id",
    "model_name_or_path": "model_id",
    "model": "model_id",
    "dataset_name": "dataset_path",
    "dataset": "dataset_path",
    "data": "dataset_path",
    "data_path": "dataset_path",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_train_steps": "max_steps",
    "num_warmup_steps": "warmup_steps",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "output_dir": "outputdir",
    "deepspeed_config": "deepspeed",
    "resume_from_checkpoint": "resume",
    "checkpoint_freq": "save_steps",
    "lr": "learning_rate",
    "bf16": "precision",
    "fp16": "precision",
    "load_best_model_at_end": "load_best_model",
    "evaluation_strategy": "eval_steps",
    "eval_strategy": "eval_steps",
    "save_strategy": "save_steps",
    "dataset_config_name": "dataset_config",
    "max_length": "max_seq_length",
    "block_size": "max_seq_length",
    "model_max_length": "max_seq_length",
    "use_flash_attention": "attn_implementation",
    "attention": "attn_implementation",
    "tokenizer": "tokenizer_name",
    "max_source_length": "max_seq_length",
    "max_target_length": "max_seq_length",
    "logging_dir": "report_to",
    "use_wandb": "report_to",
    "hub_model_id": "push_to_hub",
    "optimizer": "optim",
    "lora_r": "use_lora",
    "lora_rank": "use_lora",
    "lora_alpha": "use_lora",
    "use_peft": "use_lora",
    "load_in_8bit": "load_in_4bit",
    "quantization": "load_in_4bit",
    "do_eval": "do_train",
    "do_predict": "do_train",
    "predict_with_generate": "do_train",
    "num_beams": "generation_num_beams",
    "num_workers": "dataloader_num_workers",
}
"""Names that other projects have for a setting, and the name of the setting here."""
WAYS = {
    "save_checkpoint": (
        "checkpoints are saved every epoch; --save_steps N saves every N steps, 0 never"
    ),
    "max_seq_length": (
        "rows are cut when they are prepared, by zeropods prepare --max-source-tokens N"
    ),
    "tokenizer_name": (
        "the prepared set brings its tokenizer, which zeropods prepare --tokenizer NAME chooses"
    ),
    "dataset_config": "it is for a text at the hub, on which causal_train.py trains",
    "attn_implementation": "T5 has one kind of attention",
    "subset": "the rows are limited when they are prepared, by zeropods prepare --limit N",
    "max_eval_steps": "the rows are limited when they are prepared, by zeropods prepare --limit N",
    "optim": "every run trains with AdamW",
    "push_to_hub": "zeropods export RUN --out DIR makes a model folder that can be uploaded",
    "use_lora": "all weights are trained; there are no adapters",
    "load_in_4bit": "all weights are trained, in the type that --precision names",
    "do_train": "a run trains and evaluates; zeropods predict answers a split",
    "generation_num_beams": "zeropods predict answers, with --num-beams N",
    "dataloader_num_workers": "each rank reads its rows by itself",
    "overwrite_output_dir": "a finished run is never overwritten; choose another --outputdir",
    "group_by_length": "rows come in a random order that --seed decides",
    "run_name": "a run is named by its folder, --outputdir",
    "label_smoothing_factor": "the loss is the plain cross entropy",
    **dict.fromkeys(
        (
            "hostfile",
            "name",
            "num_pods",
            "num_nodes",
            "num_gpus",
            "slots",
            "launcher",
            "restarts",
            "min_pods",
            "timeout",
            "step_timeout",
            "dry_run",
        ),
        "zeropods launch has such a flag, which goes before the script",
    ),
    "generation_prompt": "ask a trained T5 with zeropods predict or zeropods demo",
}
"""What takes the place of a flag for which a script has no flag of its own."""
BARE_DEEPSPEED = (
    "--deepspeed: needs a file; give dsconfig/TECHNIQUE.json, as in --deepspeed dsconfig/zero2.json"
)


def faults_of(
    words: Sequence[str], flags: Collection[str], names_here: Mapping[str, str], script: str
) -> list[str]:
    """What is wrong with the flags of a call: a line for each that the script does not have.

    There is also a line for `--deepspeed` without its file.

    Args:
        words: the call's arguments, with flags in the form `--some_name` or `--some_name=value`.
        flags: names of the script's flags.
        names_here: the script's own name for each setting of another name.
        script: name of the script.
    """
    faults = []
    # The last word has none behind it: `--` stands for that, since it is no value either. A call
    # without words has one next word too many.
    next_words = [*words[1:], "--"]
    for word, next_word in zip(words, next_words, strict=False):
        name = word.removeprefix("--").partition("=")[0]
        is_flag = word.startswith("--") and name != ""
        has_no_value = next_word.startswith("--")
        if word == "--deepspeed" and has_no_value:
            faults.append(BARE_DEEPSPEED)
        elif is_flag and name not in (*flags, "help"):
            remedy = _remedy(name, flags, names_here)
            faults.append(f"--{name}: not a flag of {script}; {remedy}")
    # Each fault is named once, in the order of the words.
    return list(dict.fromkeys(faults))


def _remedy(name: str, flags: Collection[str], names_here: Mapping[str, str]) -> str:
    """What to give in place of a flag that a script does not have; arguments as of `faults_of`."""
    flag_by_name = {flag: flag for flag in flags}
    for other_name, setting in {**SETTINGS, **names_here}.items():
        name_here = names_here.get(setting, setting)
        if name_here in flags:
            flag_by_name.setdefault(other_name, name_here)
    if name in flag_by_name:
        return f"did you mean --{flag_by_name[name]}?"
    setting = SETTINGS.get(name, name)
    if setting in WAYS:
        return WAYS[setting]
    near = get_close_matches(name, flag_by_name, 1)
    if near:
        return f"did you mean --{flag_by_name[near[0]]}?"
    return "see --help"
