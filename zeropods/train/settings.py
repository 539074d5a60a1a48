"""Our arguments in the words of transformers."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import torch
from transformers import IntervalStrategy, SchedulerType, TrainingArguments

from zeropods.errors import UserError
from zeropods.extension_turns import compile_in_turns
from zeropods.train import processes
from zeropods.train.compiler import spare_compiler
from zeropods.train.job import Job
from zeropods.train.shared_memory import spare_shared_memory

WITH_SETTINGS = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy")
"""Schedules that need settings of their own, for which there is no flag."""


def training_arguments(job: Job) -> TrainingArguments:
    """transformers' arguments; making them starts the process group."""
    if job.template is None:
        return _arguments(job)
    processes.be_the_only_rank()
    compile_in_turns()
    spare_shared_memory()
    settings = _arguments(job)
    # On a CPU transformers leaves this to the trainer, and ZeRO-3 then loads a model as if on one process.
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    spare_compiler(job.template)
    return settings


def _arguments(job: Job) -> TrainingArguments:
    arguments = job.arguments
    _check_schedule(arguments.lr_scheduler_type)
    settings = TrainingArguments(
        output_dir=str(job.folder / "checkpoints"),
        num_train_epochs=arguments.epochs,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.per_device_train_batch_size,
        per_device_eval_batch_size=arguments.per_device_eval_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        **checkpointing(arguments.gradient_checkpointing),
        learning_rate=arguments.learning_rate,
        lr_scheduler_type=arguments.lr_scheduler_type,
        warmup_steps=arguments.warmup_steps,
        adam_beta1=arguments.adam_beta1,
        adam_beta2=arguments.adam_beta2,
        weight_decay=arguments.weight_decay,
        max_grad_norm=arguments.max_grad_norm,
        logging_steps=arguments.logging_steps,
        eval_strategy=_strategy(arguments.eval_steps),
        eval_steps=arguments.eval_steps or None,
        save_strategy=_strategy(arguments.save_steps),
        save_steps=arguments.save_steps or 500,
        load_best_model_at_end=arguments.wants_best_model,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        deepspeed=job.deepspeed,
        # Without DeepSpeed, BF16 is our own: FP32 masters and BF16 copies, not autocast.
        bf16=job.precision == "bf16" and job.deepspeed is not None,
        fp16=job.precision == "fp16",
        seed=arguments.seed,
        report_to=[],
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_num_workers=arguments.dataloader_num_workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        # A copy that blocks waits for all that the GPU still has to do.
        accelerator_config={"non_blocking": True} if torch.cuda.is_available() else None,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        logging_first_step=True,
        # It would wait for the device in each step, and log another number in place of NaN.
        logging_nan_inf_filter=False,
        disable_tqdm=not sys.stderr.isatty(),
    )
    if settings.n_gpu > 1:
        # A process trains on one GPU. transformers would divide its model over all that it sees, by `DataParallel`, and
        # give each of them a whole batch.
        settings._n_gpu = 1
    return settings


def checkpointing(asked: bool) -> dict[str, Any]:
    """Recomputing activations, by the name that this transformers has for it; 5.17 still had the older one."""
    new = any(field.name == "activation_checkpointing" for field in fields(TrainingArguments))
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    return {name: asked, f"{name}_kwargs": {"use_reentrant": False}}


def suited_to(settings: TrainingArguments, job: Job) -> None:
    """Switch evaluation off where the data have no dev split."""
    if job.dev is None:
        settings.eval_strategy = IntervalStrategy.NO


def _check_schedule(asked: str) -> None:
    known = [kind.value for kind in SchedulerType if kind.value not in WITH_SETTINGS]
    if asked not in known:
        raise UserError(f"--lr_scheduler_type {asked!r}; expected {', '.join(known)}")


def _strategy(steps: int | None) -> str:
    if steps is None:
        return "epoch"
    return "steps" if steps else "no"
