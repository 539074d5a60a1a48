"""One attempt of a run: train, evaluate, save, and write down how it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, EarlyStoppingCallback, Seq2SeqTrainingArguments
from transformers.trainer_callback import PrinterCallback

from zeropods.checkpoints.origin import Origin, digest
from zeropods.measure import environment
from zeropods.measure.rank import RankMeasurement
from zeropods.measure.run_folder import Opening
from zeropods.train import processes
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.callbacks import TimeLimit
from zeropods.train.checkpoints import Checkpoints
from zeropods.train.curves import Curves
from zeropods.train.dataset import collate
from zeropods.train.deepspeed_config import technique
from zeropods.train.dropout import cheapen_dropout
from zeropods.train.interrupt import heard_while_waiting
from zeropods.train.job import Job
from zeropods.train.master import MasterAdamW
from zeropods.train.matmul_peak import matmul_flops_per_second
from zeropods.train.meter import Meter
from zeropods.train.model import load_model, parameters_of
from zeropods.train.outcome import conclude, outcome, write_interrupted
from zeropods.train.recorder import LiveBytesRecorder, Recorder
from zeropods.train.t5 import shape_of
from zeropods.train.train_log import train_log
from zeropods.train.trainer import TextToSQLTrainer

log = logging.getLogger(__name__)


def attempt(job: Job, settings: Seq2SeqTrainingArguments, opening: Opening, age_seconds: float) -> None:
    """Train; whatever happens, this rank's measurement is written, and by rank 0 the record.

    Where a supervisor started the ranks (`ZEROPODS_RUN` is set) it composes the record: it knows of pods that
    are gone.

    Args:
        age_seconds: how long ago the process began.
    """
    measured = RankMeasurement(rank=processes.rank(), host=environment.host(), warmup_steps=_warmup_steps(job))
    interval = job.arguments.memory_interval
    with train_log(job.folder):
        meter = Meter(job.folder, measured, interval=interval, age_seconds=age_seconds)
        try:
            with meter, heard_while_waiting(lambda name: write_interrupted(job.folder, measured, meter, name)):
                _train(job, settings, opening, measured, meter)
            measured.status = "ok"
        except BaseException as error:
            measured.status, measured.reason = outcome(error)
            raise
        finally:
            conclude(job.folder, measured, meter)


def _warmup_steps(job: Job) -> int:
    """Steps that a rate leaves out: the first, and those up to the profiler's, which is far slower."""
    profiler = (job.deepspeed or {}).get("flops_profiler", {})
    return profiler.get("profile_step", 1) + 1 if profiler.get("enabled") else 1


def _train(
    job: Job, settings: Seq2SeqTrainingArguments, opening: Opening, measured: RankMeasurement, meter: Meter
) -> None:
    measured.matmul_flops_per_second = processes.alone_on_rank_zero(lambda: matmul_flops_per_second(job.precision))
    trainer = _trainer(job, settings, measured, meter)
    trainer.checkpoints = Checkpoints(job.folder / "checkpoints", _origin(job, opening, measured))
    trainer.train(resume_from_checkpoint=_checkpoint(job, opening, trainer.checkpoints))
    measured.stopped_by = measured.stopped_by or _stopped_by(trainer)
    last = measured.eval_losses[-1].step if measured.eval_losses else None
    if job.dev is not None and (last != trainer.state.global_step or settings.load_best_model_at_end):
        trainer.evaluate()
    trainer.save_model(str(job.folder / "model"))


def _trainer(job: Job, settings: Seq2SeqTrainingArguments, measured: RankMeasurement, meter: Meter) -> TextToSQLTrainer:
    arguments = job.arguments
    tokenizer = AutoTokenizer.from_pretrained(Path(arguments.dataset_path) / "tokenizer")
    model = cheapen_dropout(load_model(arguments, tokenizer, job.manifest.prompt))
    measured.parameters, measured.shape = parameters_of(model), shape_of(model.config)
    masters = job.precision == "bf16" and job.deepspeed is None
    trainer = TextToSQLTrainer(
        model=model.to(torch.bfloat16) if masters else model,
        args=settings,
        train_dataset=job.train,
        eval_dataset=job.dev,
        data_collator=collate,
        processing_class=tokenizer,
        recorder=Recorder(measured, meter),
        seconds=arguments.max_train_seconds,
        scaled_rates=arguments.scaled_rates,
    )
    if job.deepspeed is None:
        trainer.optimizer_cls_and_kwargs = _optimizer(arguments, masters)
    trainer.remove_callback(PrinterCallback)
    for callback in _callbacks(job, trainer, measured, meter):
        trainer.add_callback(callback)
    return trainer


def _optimizer(arguments: TextToSQLArguments, masters: bool) -> tuple[type, dict[str, Any]]:
    return MasterAdamW if masters else torch.optim.AdamW, _adamw(arguments)


def _adamw(arguments: TextToSQLArguments) -> dict[str, Any]:
    return {"lr": arguments.learning_rate, "betas": (0.9, arguments.adam_beta2), "fused": True}


def _callbacks(job: Job, trainer: TextToSQLTrainer, measured: RankMeasurement, meter: Meter) -> Iterator[Any]:
    arguments = job.arguments
    yield LiveBytesRecorder(measured, trainer.engine)
    if processes.rank() == 0:
        yield Curves(job.folder / "tensorboard", meter, job.effective_batch_size())
    if arguments.max_train_seconds:
        yield TimeLimit(trainer, measured)
    if arguments.early_stopping_patience:
        yield EarlyStoppingCallback(arguments.early_stopping_patience, arguments.early_stopping_threshold)


def _origin(job: Job, opening: Opening, measured: RankMeasurement) -> Origin:
    ranks = processes.world_size()
    model: dict[str, int | str | None] = {
        **(measured.shape or {}),
        "parameters": measured.parameters,
        "precision": job.precision,
        "deepspeed": technique(job.deepspeed, ranks) if job.deepspeed else None,
    }
    return Origin(run_id=opening.run_id, settings=digest(job.identity()), model=model, world_size=ranks)


def _checkpoint(job: Job, opening: Opening, checkpoints: Checkpoints) -> str | None:
    asked = job.arguments.resume
    if asked not in ("auto", "never"):
        checkpoints.check(Path(asked), f"--resume {asked}", "give auto, never or the folder of a whole checkpoint")
        return asked
    found = checkpoints.newest() if opening.resume else None
    return str(found) if found else None


def _stopped_by(trainer: TextToSQLTrainer) -> str:
    return "steps" if trainer.state.global_step >= trainer.state.max_steps else "early_stopping"
