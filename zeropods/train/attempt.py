"""One attempt of a run: train, evaluate, save, and write down how it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from zeropods.checkpoints.origin import Origin, digest
from zeropods.measure import environment
from zeropods.measure.rank import RankMeasurement
from zeropods.measure.run_folder import Opening
from zeropods.train import processes
from zeropods.train.callbacks import TimeLimit
from zeropods.train.checkpoints import Checkpoints
from zeropods.train.compiled import compile_model
from zeropods.train.curves import Curves
from zeropods.train.deepspeed_config import technique
from zeropods.train.interrupt import heard_while_waiting
from zeropods.train.job import Job
from zeropods.train.master import MasterAdamW, round_to_bf16
from zeropods.train.matmul_peak import matmul_flops_per_second
from zeropods.train.meter import Meter
from zeropods.train.model import parameters_of
from zeropods.train.on_cpu import suit_cpu
from zeropods.train.outcome import conclude, outcome, write_interrupted
from zeropods.train.recorder import LiveBytesRecorder, Recorder
from zeropods.train.resumption import SamePatience, has_waited, resumption
from zeropods.train.run_arguments import RunArguments
from zeropods.train.save_signal import SavedOnSignalError, SaveSignal, save_on_signal
from zeropods.train.train_log import train_log
from zeropods.train.trainer import MeasuredTrainer

log = logging.getLogger(__name__)


def attempt(job: Job, settings: TrainingArguments, opening: Opening, age_seconds: float, asked: SaveSignal) -> None:
    """Train; whatever happens, this rank's measurement is written, and by rank 0 the record.

    Where a supervisor started the ranks (`ZEROPODS_RUN` is set) it composes the record: it knows of pods that
    are gone.

    Args:
        age_seconds: how long ago the process began.
        asked: whether the run shall save and end.
    """
    measured = RankMeasurement(rank=processes.rank(), host=environment.host(), warmup_steps=_warmup_steps(job))
    interval = job.arguments.memory_interval
    with train_log(job.folder):
        meter = Meter(job.folder, measured, interval=interval, age_seconds=age_seconds)
        together = False
        try:
            unheard = partial(write_interrupted, job.folder, measured, meter)
            with meter, heard_while_waiting(unheard, saving=asked.number):
                _train(job, settings, opening, measured, meter, asked)
            measured.status, together = "ok", True
        except BaseException as error:
            measured.status, measured.reason = outcome(error, meter)
            together = isinstance(error, SavedOnSignalError)
            raise
        finally:
            conclude(job.folder, measured, meter, together=together)


def _warmup_steps(job: Job) -> int:
    """Steps that a rate leaves out: the first, and those up to the profiler's, which is far slower."""
    profiler = (job.deepspeed or {}).get("flops_profiler", {})
    return profiler.get("profile_step", 1) + 1 if profiler.get("enabled") else 1


def _train(
    job: Job,
    settings: TrainingArguments,
    opening: Opening,
    measured: RankMeasurement,
    meter: Meter,
    asked: SaveSignal,
) -> None:
    measured.matmul_flops_per_second = processes.alone_on_rank_zero(lambda: matmul_flops_per_second(job.precision))
    trainer = _trainer(job, settings, measured, meter)
    origin = _origin(job, opening, measured)
    trainer.checkpoints = Checkpoints(job.folder / "checkpoints", origin, keep=job.arguments.save_total_limit)
    trainer.resumption = resumption(job.arguments.resume, opening, trainer.checkpoints)
    saving = save_on_signal(asked)
    if saving is not None:
        trainer.add_callback(saving)
    settings.eval_on_start = job.arguments.eval_on_start and job.dev is not None and not trainer.resumption.checkpoint
    trainer.train(resume_from_checkpoint=trainer.resumption.checkpoint)
    measured.stopped_by = measured.stopped_by or _stopped_by(trainer)
    last = measured.eval_losses[-1].step if measured.eval_losses else None
    if job.dev is not None and (last != trainer.state.global_step or settings.load_best_model_at_end):
        trainer.evaluate()
    trainer.save_model(str(job.folder / "model"))
    job.recipe.conclude(trainer, job.prepared, job.folder)


def _trainer(job: Job, settings: TrainingArguments, measured: RankMeasurement, meter: Meter) -> MeasuredTrainer:
    arguments = job.arguments
    model = job.recipe.model(job.prepared, job.precision)
    if not torch.cuda.is_available():
        suit_cpu(model)
    compile_model(model, arguments.compile)
    measured.parameters, measured.shape = parameters_of(model), job.recipe.shape(model)
    masters = job.precision == "bf16" and job.deepspeed is None
    trainer = MeasuredTrainer(
        model=round_to_bf16(model) if masters else model,
        args=settings,
        recipe=job.recipe,
        data=job.prepared,
        recorder=Recorder(measured, meter),
        seconds=arguments.max_train_seconds,
        scaled_rates=arguments.scaled_rates,
        compiled=arguments.compile,
    )
    if job.deepspeed is None:
        trainer.optimizer_cls_and_kwargs = _optimizer(arguments, masters)
    trainer.remove_callback(PrinterCallback)
    for callback in _callbacks(job, trainer, measured, meter):
        trainer.add_callback(callback)
    return trainer


def _optimizer(arguments: RunArguments, masters: bool) -> tuple[type, dict[str, Any]]:
    return MasterAdamW if masters else torch.optim.AdamW, _adamw(arguments)


def _adamw(arguments: RunArguments) -> dict[str, Any]:
    return {"lr": arguments.learning_rate, "betas": (arguments.adam_beta1, arguments.adam_beta2), "fused": True}


def _callbacks(job: Job, trainer: MeasuredTrainer, measured: RankMeasurement, meter: Meter) -> Iterator[Any]:
    arguments = job.arguments
    yield LiveBytesRecorder(measured, trainer.engine)
    if processes.rank() == 0:
        yield Curves(job.folder / "tensorboard", meter, job.effective_batch_size(), joint=job.recipe.joint)
    if arguments.max_train_seconds:
        yield TimeLimit(trainer, measured)
    if arguments.early_stopping_patience:
        stopping = EarlyStoppingCallback(arguments.early_stopping_patience, arguments.early_stopping_threshold)
        yield from (stopping, SamePatience(stopping))


def _origin(job: Job, opening: Opening, measured: RankMeasurement) -> Origin:
    ranks = processes.world_size()
    model: dict[str, Any] = {
        **(measured.shape or {}),
        "parameters": measured.parameters,
        "precision": job.precision,
        "deepspeed": technique(job.deepspeed, ranks) if job.deepspeed else None,
    }
    return Origin(run_id=opening.run_id, settings=digest(job.identity()), model=model, world_size=ranks)


def _stopped_by(trainer: MeasuredTrainer) -> str:
    if trainer.state.global_step >= trainer.state.max_steps:
        return "steps"
    return "early_stopping" if has_waited(trainer.callback_handler.callbacks) else "time"
