"""Our arguments in the words of transformers."""

from __future__ import annotations

import logging
import sys

import torch
from transformers import Seq2SeqTrainingArguments

from zeropods.extension_cache import extension_cache, remove_stale_locks
from zeropods.train import processes
from zeropods.train.job import Job

log = logging.getLogger(__name__)


def training_arguments(job: Job) -> Seq2SeqTrainingArguments:
    """transformers' arguments; making them starts the process group."""
    if job.template is None:
        return _arguments(job)
    processes.be_the_only_rank()
    for lock in remove_stale_locks(extension_cache()):
        log.warning("%s: left by a compilation that was killed; removed", lock)
    settings = _arguments(job)
    # On a CPU transformers leaves this to the trainer, and ZeRO-3 then loads a model as if on one process.
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    return settings


def _arguments(job: Job) -> Seq2SeqTrainingArguments:
    arguments = job.arguments
    return Seq2SeqTrainingArguments(
        output_dir=str(job.folder / "checkpoints"),
        num_train_epochs=arguments.epochs,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.per_device_train_batch_size,
        per_device_eval_batch_size=arguments.per_device_eval_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        activation_checkpointing=arguments.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=arguments.learning_rate,
        lr_scheduler_type=arguments.lr_scheduler_type,
        warmup_steps=arguments.warmup_steps,
        adam_beta2=arguments.adam_beta2,
        weight_decay=arguments.weight_decay,
        max_grad_norm=arguments.max_grad_norm,
        logging_steps=arguments.logging_steps,
        eval_strategy=_strategy(arguments.eval_steps) if job.dev else "no",
        eval_steps=arguments.eval_steps or None,
        save_strategy=_strategy(arguments.save_steps),
        save_steps=arguments.save_steps or 500,
        load_best_model_at_end=arguments.load_best_model or arguments.early_stopping_patience > 0,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        generation_max_length=arguments.generation_max_length,
        generation_num_beams=arguments.generation_num_beams,
        deepspeed=job.deepspeed,
        # Without DeepSpeed, BF16 is our own: FP32 masters and BF16 copies, not autocast.
        bf16=job.precision == "bf16" and job.deepspeed is not None,
        seed=arguments.seed,
        report_to=[],
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        logging_first_step=True,
        # It would wait for the device in each step, and log another number in place of NaN.
        logging_nan_inf_filter=False,
        disable_tqdm=not sys.stderr.isatty(),
    )


def _strategy(steps: int | None) -> str:
    if steps is None:
        return "epoch"
    return "steps" if steps else "no"
