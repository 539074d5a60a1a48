"""One run of a training script, from its flags to its record."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import fields
from typing import Any

import torch
from transformers import IntervalStrategy, SchedulerType, TrainingArguments

from zeropods import files
from zeropods.errors import UserError, terminable
from zeropods.measure import environment
from zeropods.measure.run_folder import CONFIG, Opening, locked, open_run
from zeropods.programs import compile_in_turns
from zeropods.train import processes
from zeropods.train.attempt import attempt
from zeropods.train.compiled import spare_compiler, spare_shared_memory
from zeropods.train.device import choose_tf32
from zeropods.train.job import TrainingJob, check_call, check_same_run, run_config
from zeropods.train.signals import SaveSignal
from zeropods.train.tasks import Task

WITH_SETTINGS = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy")
"""Schedules that need settings of their own, for which there is no flag."""


def fine_tune(task: Task, argv: list[str], age_seconds: float = 0.0) -> None:
    """Train, evaluate, save, and leave a record; `UserError` and Ctrl-C leave one too.

    Args:
        argv: the call, for `config.json`.
        age_seconds: how long ago the run's own process began; 0 where it is one among others of a process.
    """
    began, arguments = time.monotonic() - age_seconds, task.arguments
    save_signal = SaveSignal()
    with save_signal.listening():
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        job = check_call(task)
        choose_tf32(arguments.tf32)
        settings = training_arguments(job)
        try:
            with contextlib.ExitStack() as stack, terminable(saving=save_signal.number):
                processes.on_rank_zero(lambda: stack.enter_context(locked(job.folder)))
                _train(job.with_data(), settings, argv, began, save_signal)
        except processes.SharedError:
            processes.leave()
            raise
        processes.leave()


def _train(
    job: TrainingJob, settings: TrainingArguments, argv: list[str], began: float, save_signal: SaveSignal
) -> None:
    if job.prepared.dev is None:
        settings.eval_strategy = IntervalStrategy.NO
    hosts = list(dict.fromkeys(processes.gathered(environment.host())))

    def opened() -> Opening:
        check_same_run(job)
        opening = open_run(job.folder, job.identity(), again=job.arguments.resume == "never")
        if not opening.finished:
            files.write_json(job.folder / CONFIG, run_config(job, argv, opening, hosts))
        return opening

    opening = processes.on_rank_zero(opened)
    if not opening.finished:
        attempt(job, settings, opening, time.monotonic() - began, save_signal)
    elif processes.rank() == 0:
        print(f"{job.folder}: this run is finished; nothing to do", file=sys.stderr)


def training_arguments(job: TrainingJob) -> TrainingArguments:
    """transformers' arguments; making them starts the process group."""
    if job.template is None:
        return _transformers_arguments(job)
    processes.be_the_only_rank()
    compile_in_turns()
    spare_shared_memory()
    settings = _transformers_arguments(job)
    # On a CPU transformers leaves this to the trainer, and ZeRO-3 then loads a model as if on one process.
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    spare_compiler(job.template)
    return settings


def _transformers_arguments(job: TrainingJob) -> TrainingArguments:
    arguments, on_gpu = job.arguments, torch.cuda.is_available()
    schedules = [kind.value for kind in SchedulerType if kind.value not in WITH_SETTINGS]
    if arguments.lr_scheduler_type not in schedules:
        raise UserError(f"--lr_scheduler_type {arguments.lr_scheduler_type!r}; expected {', '.join(schedules)}")
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
        dataloader_pin_memory=on_gpu,
        # A copy that blocks waits for all that the GPU still has to do.
        accelerator_config={"non_blocking": True} if on_gpu else None,
        ddp_find_unused_parameters=False,
        use_cpu=not on_gpu,
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


def _strategy(steps: int | None) -> str:
    if steps is None:
        return "epoch"
    return "steps" if steps else "no"
