"""One run of a training script, from its flags to its record: train, evaluate, save, and write down how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback, IntervalStrategy, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.record import (
    RankMeasurement,
    closing_line,
    compose_record,
    lost_connection,
    write_record,
)
from zeropods.measure.run_folder import Opening, locked
from zeropods.programs import variable_set
from zeropods.tables import GIB, progress
from zeropods.train import processes
from zeropods.train.arguments import RunArguments
from zeropods.train.checkpoints import MANIFEST, Origin, digest
from zeropods.train.device import choose_attention, compile_model, matmul_rates, python_seconds, suit_cpu
from zeropods.train.early_exit import exit_call
from zeropods.train.job import Task, open_folder, training_arguments
from zeropods.train.meter import Curves, LiveBytesRecorder, Meter
from zeropods.train.precision import PrecisionRecorder
from zeropods.train.pretrained import configuration_of
from zeropods.train.processes import SavedOnSignalError, SaveOnSignal, heard_while_waiting
from zeropods.train.resume import Checkpoints, resumption
from zeropods.train.trainer import MasterAdamW, MeasuredTrainer, ShownSteps, round_to_bf16

OTHERS_SECONDS, POLL_SECONDS = 3.0, 0.1
"""Seconds that rank 0 waits for others where it composes the record, and between two looks."""


def fine_tune(task: Task, argv: list[str], age_seconds: float = 0.0) -> None:
    """Train, evaluate, save, and leave a record; `UserError` and Ctrl-C leave one too.

    Args:
        argv: the call, for `config.json`.
        age_seconds: seconds since the run's own process began; 0 where several runs share one process.
    """
    began, arguments = time.monotonic() - age_seconds, task.arguments
    save_signal = SaveOnSignal()
    with contextlib.ExitStack() as around:
        around.enter_context(save_signal.listening())
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
            # Without the variable, accelerate sets a number of its own, under DeepSpeed and for several processes.
            around.enter_context(variable_set("OMP_NUM_THREADS", str(arguments.threads)))
        task.check()
        choose_attention()
        if arguments.tf32:
            torch.set_float32_matmul_precision("high")
        settings = training_arguments(task)
        try:
            with contextlib.ExitStack() as stack:
                processes.on_rank_zero(lambda: stack.enter_context(locked(task.folder)))
                processes.on_rank_zero(task.prepare)
                # A rank that cannot read the rows tells the others, which would otherwise wait for it.
                if any(processes.on_every_rank(lambda: task.data.dev is None)):
                    settings.eval_strategy = IntervalStrategy.NO
                hosts = list(dict.fromkeys(processes.gathered(environment.host())))
                opening = processes.on_rank_zero(lambda: open_folder(task, argv, hosts, settings.device.type))
                if not opening.finished:
                    attempt(task, settings, opening, time.monotonic() - began, save_signal)
                elif processes.rank() == 0:
                    print(f"{task.folder}: this run is finished; nothing to do", file=sys.stderr)
        except processes.SharedError:
            processes.leave()
            raise
        processes.leave()


def attempt(
    task: Task, settings: TrainingArguments, opening: Opening, age_seconds: float, save_signal: SaveOnSignal
) -> None:
    """Train; whatever happens, write this rank's measurement and, on rank 0, the record.

    Where a supervisor started the ranks (`ZEROPODS_RUN` is set), the supervisor composes the record: it knows of pods
    that are gone.

    Args:
        age_seconds: seconds since the process began.
        save_signal: tells whether the run is to save and end.
    """
    profiler = (task.deepspeed or {}).get("flops_profiler", {})
    # Rates leave out the first step, and all steps up to and including the profiled one, which is far slower.
    warmup = profiler.get("profile_step", 1) + 1 if profiler.get("enabled") else 1
    measured = RankMeasurement(rank=processes.rank(), host=environment.host(), warmup_steps=warmup)
    with train_log(task.folder):
        interval, joint = task.arguments.memory_interval, task.joint
        meter = Meter(task.folder, measured, interval=interval, age_seconds=age_seconds, joint=joint)

        def write_interrupted(signal_name: str) -> None:
            """Write what was measured so far, for a main thread that cannot."""
            reason = f"{signal_name} while waiting for other ranks"
            meter.write(replace(measured, status="interrupted", reason=reason))

        together, scored, record = False, "", None
        try:
            with meter, heard_while_waiting(write_interrupted, saving=save_signal.number):
                scored = _train(task, settings, opening, measured, meter, save_signal)
            measured.status, together = "ok", True
        except BaseException as error:
            measured.status, measured.reason = outcome(error, meter)
            together = isinstance(error, SavedOnSignalError)
            if measured.status == "oom":
                remedy = "use fewer rows, or a technique that partitions more"
                if (meter.failed_in or meter.phases.phase) == "load":
                    remedy = "use a smaller model, or more memory"
                raise UserError(f"{task.folder}: oom: {measured.reason}; {remedy}") from error
            raise
        finally:
            meter.write(measured)
            # Where all ranks get here, rank 0 waits for what they write.
            if together and processes.world_size() > 1:
                torch.distributed.barrier()
            if processes.rank() == 0 and not os.environ.get("ZEROPODS_RUN"):
                record = compose_record(task.folder)
                write_record(task.folder, record)
                if lost_connection(measured.reason) and await_others(task.folder, processes.world_size()):
                    record = compose_record(task.folder)
                    write_record(task.folder, record)
                if record.status == "ok":
                    print(closing_line(task.folder, record, scored))
                is_saved = any(task.folder.glob(f"checkpoints/*/{MANIFEST}"))
                if record.status == "interrupted" and is_saved and task.arguments.resume == "auto":
                    print(f"{task.folder}: the same command resumes from the last checkpoint", file=sys.stderr)
    if record is not None and record.status != "ok":
        # This rank has ended well, but another one has not.
        raise UserError(f"{task.folder}: {record.status}: {record.reason}")


def await_others(folder: Path, world_size: int) -> bool:
    """Wait a moment for the measurements of ranks that fail at the same time; whether one of them has come."""
    deadline = time.monotonic() + OTHERS_SECONDS
    before = there = len(list((folder / "ranks").glob("*.json")))
    while there < world_size and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        there = len(list((folder / "ranks").glob("*.json")))
    return there > before


def outcome(error: BaseException, meter: Meter) -> tuple[str, str]:
    """Status and reason of an attempt that ended with an exception; for a lack of memory, with phase and peak."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    first = text.split("\n")[0].removesuffix(": ")
    if isinstance(error, SavedOnSignalError | KeyboardInterrupt):
        return "interrupted", str(error) or "SIGINT"
    if isinstance(error, SystemExit):
        return "failed", exit_call(error)
    # The CPU's allocator has no exception of its own.
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        _, most = meter.phases.measured()
        kind = "resident" if most.peak_allocated_bytes is None else "allocated"
        peak = getattr(most, f"peak_{kind}_bytes")
        shown = "" if peak is None else f", peak {kind} {peak / GIB:.2f} GiB"
        phase = meter.failed_in or meter.phases.phase
        return "oom", f"{first}; phase {phase}, {meter.heartbeat.step} steps done{shown}"
    return "failed", first


@contextlib.contextmanager
def train_log(folder: Path) -> Iterator[None]:
    """Write this package's log lines, from INFO on, to the run's `train.log`; on rank 0 only."""
    if processes.rank() != 0:
        yield
        return
    handler, logger = logging.FileHandler(folder / "train.log", encoding="utf-8"), logging.getLogger("zeropods")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


def _train(
    task: Task,
    settings: TrainingArguments,
    opening: Opening,
    measured: RankMeasurement,
    meter: Meter,
    save_signal: SaveOnSignal,
) -> str:
    """Train, evaluate, save and score; returns what the score is in words."""
    arguments, on_gpu, is_first = task.arguments, torch.cuda.is_available(), processes.rank() == 0
    if is_first:
        measured.matmul_flops_per_second = max(matmul_rates(task.precision).values())
        if not on_gpu:
            measured.python_seconds = python_seconds()
            measured.one_core_flops_per_second = max(matmul_rates(task.precision, 1).values())
    processes.gathered(None)  # Otherwise the other ranks would take cores from what is measured.
    model = task.model()
    disable_progress_bar()  # Downloads are over; from now on each saved model would show a progress bar.
    if not on_gpu:
        suit_cpu(model)
    compile_model(model, arguments.compile)
    # Tied parameters count once, and a parameter that ZeRO-3 has divided counts as a whole.
    measured.parameters = sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters())
    measured.shape = configuration_of(model)
    masters = task.precision == "bf16" and task.deepspeed is None
    trainer = MeasuredTrainer(task, meter, model=round_to_bf16(model) if masters else model, args=settings)
    if task.deepspeed is None:
        trainer.optimizer_cls_and_kwargs = (MasterAdamW if masters else torch.optim.AdamW, adamw_settings(arguments))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LiveBytesRecorder(measured, trainer.engine))
    precision_recorder = PrecisionRecorder(measured, processes.world_size())
    trainer.add_callback(precision_recorder)
    if is_first:
        trainer.add_callback(Curves(task.folder / "tensorboard", meter, task.effective_batch_size()))
    origin = Origin(
        run_id=opening.run_id,
        settings=digest(task.identity()),
        model={
            "parameters": measured.parameters,
            "precision": task.precision,
            "deepspeed": task.technique if task.deepspeed else None,
        },
        world_size=processes.world_size(),
    )
    trainer.checkpoints = Checkpoints(task.folder / "checkpoints", origin, keep=arguments.save_total_limit)
    trainer.resumption = resumed = resumption(arguments.resume, opening, trainer.checkpoints)
    stopping, patience = None, arguments.early_stopping_patience
    if patience:
        stopping = EarlyStoppingCallback(patience, arguments.early_stopping_threshold)
        if resumed is not None:
            # The counter goes on from the checkpoint: otherwise a resumed run would be more patient.
            kept = resumed.kept.get(EarlyStoppingCallback.__name__, {}).get("attributes", {})
            stopping.early_stopping_patience_counter = kept.get("early_stopping_patience_counter", 0)
        trainer.add_callback(stopping)
    trainer.add_callback(save_signal)
    dev = task.data.dev
    settings.eval_on_start = arguments.eval_on_start and dev is not None and resumed is None
    with contextlib.ExitStack() as while_training:
        while_training.enter_context(precision_recorder)
        if is_first:
            bar = while_training.enter_context(progress("train", "steps"))
            trainer.add_callback(ShownSteps(bar, ends_by_time=arguments.max_train_seconds > 0))
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed.checkpoint))
    step = trainer.state.global_step
    if step >= trainer.state.max_steps:
        measured.stopped_by = "steps"
    else:
        waited = stopping is not None and stopping.early_stopping_patience_counter >= patience
        measured.stopped_by = "early_stopping" if waited else "time"
    last = measured.eval_losses[-1].step if measured.eval_losses else None
    if dev is not None and (last != step or settings.load_best_model_at_end):
        trainer.evaluate()
    if arguments.save_model:
        trainer.save_model(str(task.folder / "model"))
    return task.score(trainer)


def adamw_settings(arguments: RunArguments) -> dict[str, object]:
    """Arguments of AdamW in runs without DeepSpeed; weight decay comes with the parameter groups."""
    return {"lr": arguments.learning_rate, "betas": (arguments.adam_beta1, arguments.adam_beta2), "fused": True}
