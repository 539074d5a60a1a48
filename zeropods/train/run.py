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

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.record import CONFIG, RankMeasurement, closing_line, compose_record, write_record
from zeropods.measure.run_folder import Opening, locked, open_run
from zeropods.programs import LOADING_BLOCK, map_blocks, variable_set
from zeropods.tables import GIB
from zeropods.train import processes
from zeropods.train.arguments import RunArguments
from zeropods.train.checkpoints import MANIFEST, Origin, digest
from zeropods.train.device import compile_model, matmul_rates, python_seconds, suit_cpu
from zeropods.train.job import Task, TrainingJob, check_call, check_data, check_same_run, run_config, training_arguments
from zeropods.train.meter import Curves, LiveBytesRecorder, Meter
from zeropods.train.pretrained import configuration_of
from zeropods.train.processes import SavedOnSignalError, SaveOnSignal, heard_while_waiting
from zeropods.train.resume import Checkpoints, ResumedPatience, resumption
from zeropods.train.trainer import MasterAdamW, MeasuredTrainer, round_to_bf16


def fine_tune(task: Task, argv: list[str], age_seconds: float = 0.0) -> None:
    """Train, evaluate, save, and leave a record; `UserError` and Ctrl-C leave one too.

    Args:
        argv: the call, for `config.json`.
        age_seconds: how long ago the run's own process began; 0 where it is one among others of a process.
    """
    began, arguments = time.monotonic() - age_seconds, task.arguments
    map_blocks(LOADING_BLOCK)
    save_signal = SaveOnSignal()
    with contextlib.ExitStack() as around:
        around.enter_context(save_signal.listening())
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
            # Without the variable accelerate sets a number of its own, under DeepSpeed and for several processes.
            around.enter_context(variable_set("OMP_NUM_THREADS", str(arguments.threads)))
        job = check_call(task)
        if arguments.tf32:
            torch.set_float32_matmul_precision("high")
        settings = training_arguments(job)
        try:
            with contextlib.ExitStack() as stack:
                processes.on_rank_zero(lambda: stack.enter_context(locked(job.folder)))
                processes.on_rank_zero(task.prepare)
                _opened(job, settings, argv, began, save_signal)
        except processes.SharedError:
            processes.leave()
            raise
        processes.leave()


def _opened(
    job: TrainingJob, settings: TrainingArguments, argv: list[str], began: float, save_signal: SaveOnSignal
) -> None:
    """Open the run folder, and make an attempt unless the run in it is finished."""
    # A rank that cannot read the rows tells the others, which would wait for it.
    if any(processes.on_every_rank(lambda: job.data.dev is None)):
        settings.eval_strategy = IntervalStrategy.NO
    hosts = list(dict.fromkeys(processes.gathered(environment.host())))

    def opened() -> Opening:
        check_data(job)
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


def attempt(
    job: TrainingJob, settings: TrainingArguments, opening: Opening, age_seconds: float, save_signal: SaveOnSignal
) -> None:
    """Train; whatever happens, this rank's measurement is written, and by rank 0 the record.

    Where a supervisor started the ranks (`ZEROPODS_RUN` is set) it composes the record: it knows of pods that
    are gone.

    Args:
        age_seconds: how long ago the process began.
        save_signal: tells whether the run is to save and end.
    """
    profiler = (job.deepspeed or {}).get("flops_profiler", {})
    measured = RankMeasurement(
        rank=processes.rank(),
        host=environment.host(),
        # A rate leaves out the first step, and those up to the profiler's, which is far slower.
        warmup_steps=profiler.get("profile_step", 1) + 1 if profiler.get("enabled") else 1,
    )
    with train_log(job.folder):
        interval, joint = job.arguments.memory_interval, job.task.joint
        meter = Meter(job.folder, measured, interval=interval, age_seconds=age_seconds, joint=joint)

        def write_interrupted(signal_name: str) -> None:
            """Write what was measured so far, for a main thread that cannot."""
            reason = f"{signal_name} while waiting for other ranks"
            meter.write(replace(measured, status="interrupted", reason=reason))

        together, scored = False, ""
        try:
            with meter, heard_while_waiting(write_interrupted, saving=save_signal.number):
                scored = _train(job, settings, opening, measured, meter, save_signal)
            measured.status, together = "ok", True
        except BaseException as error:
            measured.status, measured.reason = outcome(error, meter)
            together = isinstance(error, SavedOnSignalError)
            if measured.status == "oom":
                remedy = "take fewer rows, or a technique that divides more"
                if (meter.failed_in or meter.phases.phase) == "load":
                    remedy = "take a smaller model, or more memory"
                raise UserError(f"{job.folder}: oom: {measured.reason}; {remedy}") from error
            raise
        finally:
            meter.write(measured)
            # Where all ranks have come here, rank 0 waits for what they write.
            if together and processes.world_size() > 1:
                torch.distributed.barrier()
            if processes.rank() == 0 and not os.environ.get("ZEROPODS_RUN"):
                record = compose_record(job.folder)
                write_record(job.folder, record)
                if record.status == "ok":
                    print(closing_line(job.folder, record, scored))
                is_saved = any(job.folder.glob(f"checkpoints/*/{MANIFEST}"))
                if record.status == "interrupted" and is_saved and job.arguments.resume == "auto":
                    print(f"{job.folder}: the same command resumes from the last checkpoint", file=sys.stderr)


def outcome(error: BaseException, meter: Meter) -> tuple[str, str]:
    """Status and reason of an attempt that ended with an exception; out of memory, with the phase and the peak."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    first = text.split("\n")[0]
    if isinstance(error, SavedOnSignalError):
        return "interrupted", str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", str(error) or "SIGINT"
    # The CPU's allocator has no exception of its own.
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        _, most = meter.phases.measured()
        kind = "resident" if most.peak_allocated_bytes is None else "allocated"
        peak = getattr(most, f"peak_{kind}_bytes")
        shown = "" if peak is None else f", peak {kind} {peak / GIB:.2f} GiB"
        return (
            "oom",
            f"{first}; phase {meter.failed_in or meter.phases.phase}, {meter.heartbeat.step} steps done{shown}",
        )
    return "failed", first


@contextlib.contextmanager
def train_log(folder: Path) -> Iterator[None]:
    """Lines of this package and warnings of others go to `train.log` of the run; rank 0 writes it."""
    if processes.rank() != 0:
        yield
        return
    handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("zeropods")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


def _measure_machine(measured: RankMeasurement, precision: str) -> None:
    measured.matmul_flops_per_second = max(matmul_rates(precision).values())
    if not torch.cuda.is_available():
        measured.python_seconds = python_seconds()
        measured.one_core_flops_per_second = max(matmul_rates(precision, 1).values())


def _train(
    job: TrainingJob,
    settings: TrainingArguments,
    opening: Opening,
    measured: RankMeasurement,
    meter: Meter,
    save_signal: SaveOnSignal,
) -> str:
    """Train, evaluate, save and score; returns what the score is in words."""
    processes.on_rank_zero(lambda: _measure_machine(measured, job.precision))
    trainer = make_trainer(job, settings, measured, meter)
    model: dict[str, int | str | bool | None] = {
        "parameters": measured.parameters,
        "precision": job.precision,
        "deepspeed": job.technique if job.deepspeed else None,
    }
    origin = Origin(
        run_id=opening.run_id, settings=digest(job.identity()), model=model, world_size=processes.world_size()
    )
    trainer.checkpoints = Checkpoints(job.folder / "checkpoints", origin, keep=job.arguments.save_total_limit)
    trainer.resumption = resumption(job.arguments.resume, opening, trainer.checkpoints)
    trainer.add_callback(save_signal)
    dev, resumed = job.data.dev, trainer.resumption
    settings.eval_on_start = job.arguments.eval_on_start and dev is not None and resumed is None
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed.checkpoint))
    measured.stopped_by = _stopped_by(trainer)
    last = measured.eval_losses[-1].step if measured.eval_losses else None
    if dev is not None and (last != trainer.state.global_step or settings.load_best_model_at_end):
        trainer.evaluate()
    trainer.save_model(str(job.folder / "model"))
    return job.task.score(trainer, job.data, job.folder)


def make_trainer(
    job: TrainingJob, settings: TrainingArguments, measured: RankMeasurement, meter: Meter
) -> MeasuredTrainer:
    """The trainer of a run, with all that records it; the model's parameters and shape are written down."""
    arguments = job.arguments
    model = job.task.model(job.data)
    disable_progress_bar()  # What was to be fetched is here: from now on it would be one for each model that is saved.
    if not torch.cuda.is_available():
        suit_cpu(model)
    compile_model(model, arguments.compile)
    # Tied parameters count once, and one that ZeRO-3 has divided counts whole.
    measured.parameters = sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters())
    measured.shape = configuration_of(model)
    masters = job.precision == "bf16" and job.deepspeed is None
    trainer = MeasuredTrainer(
        model=round_to_bf16(model) if masters else model,
        args=settings,
        task=job.task,
        data=job.data,
        meter=meter,
    )
    if job.deepspeed is None:
        trainer.optimizer_cls_and_kwargs = (MasterAdamW if masters else torch.optim.AdamW, adamw_settings(arguments))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LiveBytesRecorder(measured, trainer.engine))
    if processes.rank() == 0:
        trainer.add_callback(Curves(job.folder / "tensorboard", meter, job.effective_batch_size()))
    if arguments.early_stopping_patience:
        stopping = EarlyStoppingCallback(arguments.early_stopping_patience, arguments.early_stopping_threshold)
        trainer.add_callback(stopping)
        trainer.add_callback(ResumedPatience(stopping))
    return trainer


def adamw_settings(arguments: RunArguments) -> dict[str, object]:
    """What AdamW is made with where DeepSpeed does not make it; weight decay comes with the groups of parameters."""
    return {"lr": arguments.learning_rate, "betas": (arguments.adam_beta1, arguments.adam_beta2), "fused": True}


def _stopped_by(trainer: MeasuredTrainer) -> str:
    if trainer.state.global_step >= trainer.state.max_steps:
        return "steps"
    stopping = [each for each in trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
    waited = any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in stopping)
    return "early_stopping" if waited else "time"
