"""One run of a training script, from its flags to its record."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import IntervalStrategy, SchedulerType, TrainingArguments

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.record import read_json
from zeropods.measure.run_folder import CONFIG, Opening, locked, open_run
from zeropods.programs import compile_in_turns, own_programs_first, use_own_cache, wait_passively
from zeropods.techniques import TECHNIQUES, technique_of
from zeropods.train import processes
from zeropods.train.attempt import Job, attempt, check_call, run_config
from zeropods.train.compiled import spare_compiler, spare_shared_memory
from zeropods.train.device import choose_tf32
from zeropods.train.signals import SaveSignal, save_signal_heard, terminable
from zeropods.train.tasks import Task

# Our arguments in the words of transformers.

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


# Whether a call may go on with the run in its folder on this number of processes.

UNDIVIDED = tuple(technique.name for technique in TECHNIQUES if not technique.stage)
"""Techniques that keep the same files."""


def check_same_run(job: Job) -> None:
    """Refuse another technique than the run's, and other rows a step; both may be meant for another number of pods.

    Other differences are `open_run`'s to find.
    """
    if job.arguments.resume == "never" or not (job.folder / CONFIG).is_file():
        return
    before = read_json(job.folder / CONFIG)
    _check_technique_of(job, before)
    _check_batch(job, before)


def _check_technique_of(job: Job, before: dict[str, Any]) -> None:
    was, now = before["technique"], technique_of(job.deepspeed, processes.world_size())
    if was != now and not (was in UNDIVIDED and now in UNDIVIDED):
        raise UserError(
            f"{job.folder}: holds a run of technique {was}, this call is of {now}; give the run's own --deepspeed, "
            "or choose another --outputdir"
        )


def _check_batch(job: Job, before: dict[str, Any]) -> None:
    was, now = before["effective_batch_size"], job.effective_batch_size()
    if was == now:
        return
    arguments, ranks = job.arguments, processes.world_size()
    rows, passes = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    said = f"{rows} rows x {passes} passes x {ranks} processes = {now}"
    raise UserError(
        f"{job.folder}: holds a run of {was} rows a step, this call has {said}; {fitting(was, rows, ranks)}"
    )


def fitting(effective: int, rows: int, ranks: int) -> str:
    """The flags by which so many processes train on an effective batch, or which numbers of them would do.

    Args:
        effective: rows of a step.
        rows: of a process and pass, as asked for; no more are proposed, since memory was enough for these.
    """
    share, rest = divmod(effective, ranks)
    if rest:
        numbers = ", ".join(str(n) for n in range(1, min(effective, 64) + 1) if effective % n == 0)
        return f"{effective} does not divide by {ranks}: take {numbers} processes"
    most = max(n for n in range(1, min(rows, share) + 1) if share % n == 0)
    return f"give --per_device_train_batch_size {most} --gradient_accumulation_steps {share // most}"


# One run of a training script, from its flags to its record.


def fine_tune(task: Task, argv: list[str], age_seconds: float = 0.0) -> None:
    """Train, evaluate, save, and leave a record; `UserError` and Ctrl-C leave one too.

    Args:
        argv: the call, for `config.json`.
        age_seconds: how long ago the run's own process began; 0 where it is one among others of a process.
    """
    with save_signal_heard() as asked:
        _fine_tune(task, argv, age_seconds, asked)


def _fine_tune(task: Task, argv: list[str], age_seconds: float, asked: SaveSignal) -> None:
    began, arguments = time.monotonic() - age_seconds, task.arguments
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    job = check_call(task)
    choose_tf32(arguments.tf32)
    settings = training_arguments(job)
    try:
        with _rank_zero_lock(job.folder), terminable(saving=asked.number):
            job = job.with_data()
            suited_to(settings, job)
            hosts = list(dict.fromkeys(processes.gathered(environment.host())))
            opening = processes.on_rank_zero(lambda: _open(job, argv, hosts))
            if not opening.finished:
                attempt(job, settings, opening, time.monotonic() - began, asked)
            elif processes.rank() == 0:
                print(f"{job.folder}: this run is finished; nothing to do", file=sys.stderr)
    except processes.SharedError:
        processes.leave()
        raise
    processes.leave()


@contextlib.contextmanager
def _rank_zero_lock(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        processes.on_rank_zero(lambda: stack.enter_context(locked(folder)))
        yield


def _open(job: Job, argv: list[str], hosts: list[str]) -> Opening:
    check_same_run(job)
    opening = open_run(job.folder, job.identity(), again=job.arguments.resume == "never")
    if not opening.finished:
        files.write_json(job.folder / CONFIG, run_config(job, argv, opening, hosts))
    return opening


# What a training script does: parse the flags, run, and say nothing more.


def run_script(task: type[Task]) -> int:
    """Run a script of the project with this process's arguments; returns the exit status."""
    wait_passively()
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    from zeropods.measure.environment import process_age_seconds

    return run_parsed(task, sys.argv, process_age_seconds)


def run_parsed(task: type[Task], argv: Sequence[str], age_seconds: Callable[[], float] = lambda: 0.0) -> int:
    """Train as `argv` says, the script's name first; an error that all ranks share is said by one of them.

    Args:
        age_seconds: how long ago the run's own process began.
    """
    from zeropods.train.arguments import parse_flags
    from zeropods.train.processes import SharedError

    try:
        fine_tune(task(parse_flags(task.flags, argv[1:])), list(argv), age_seconds())
    except SharedError as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        return error.exit_status
    return 0
