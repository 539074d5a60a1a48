"""One attempt of a run: train, evaluate, save, and write down how it ended."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from zeropods.data.manifest import Manifest
from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.record import SCHEMA_VERSION, RankMeasurement, compose_record, write_record
from zeropods.measure.run_folder import Opening
from zeropods.techniques import technique_of
from zeropods.train import processes
from zeropods.train.arguments import RunArguments
from zeropods.train.checkpoint_files import Origin, digest
from zeropods.train.checkpoints import Checkpoints, SamePatience, has_waited, resumption
from zeropods.train.compiled import compile_model
from zeropods.train.cpu import suit_cpu
from zeropods.train.deepspeed import Config, check_blocks, check_config, effective_config, read_config, without_batch
from zeropods.train.device import matmul_flops_per_second, resolve_precision
from zeropods.train.meter import Curves, LiveBytesRecorder, Meter, Recorder
from zeropods.train.optimizer import MasterAdamW, round_to_bf16
from zeropods.train.sampler import TokenizedSplit
from zeropods.train.signals import SavedOnSignalError, SaveSignal, heard_while_waiting, save_on_signal
from zeropods.train.tasks import Prepared, Task
from zeropods.train.text2sql import parameters_of
from zeropods.train.trainer import MeasuredTrainer, TimeLimit

# How an attempt ended: a rank's status, its measurement on disk, and the record.

GIB = 2**30


def outcome(error: BaseException, meter: Meter) -> tuple[str, str]:
    """Status and reason of an attempt that ended with an exception; out of memory, with the phase and the peak."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SavedOnSignalError):
        return "interrupted", str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", str(error) or "SIGINT"
    # The CPU's allocator has no exception of its own.
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return "oom", f"{text.split(chr(10))[0]}; {_when_it_was_full(meter)}"
    return "failed", text.split("\n")[0]


def _when_it_was_full(meter: Meter) -> str:
    _, most = meter.phases.measured()
    peak, where = (most.resident, "resident") if most.allocated is None else (most.allocated, "allocated")
    sized = "" if peak is None else f", peak {where} {peak / GIB:.2f} GiB"
    return f"phase {meter.failed_in or meter.phases.phase}, {meter.beating.step} steps done{sized}"


def conclude(folder: Path, measured: RankMeasurement, meter: Meter, *, together: bool) -> None:
    """Write this rank's measurement; rank 0 composes.

    Args:
        together: whether all ranks have come here, so that rank 0 can wait for what they write.
    """
    _measure_end(measured, meter)
    measured.write(folder)
    if together and processes.world_size() > 1:
        torch.distributed.barrier()
    if processes.rank() == 0 and not os.environ.get("ZEROPODS_RUN"):
        write_record(folder, compose_record(folder))


def write_interrupted(folder: Path, measured: RankMeasurement, meter: Meter, signal_name: str) -> None:
    """Write what was measured so far, for a main thread that cannot."""
    waiting = replace(measured, status="interrupted", reason=f"{signal_name} while waiting for other ranks")
    _measure_end(waiting, meter)
    waiting.write(folder)


def _measure_end(measured: RankMeasurement, meter: Meter) -> None:
    meter.fill(measured)
    measured.ended_unix_seconds = time.time()


# The log of a run: `train.log` in its folder.


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


# A checked call, and what its run folder says about it.

DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Flags that divide the rows of a step over processes and passes."""


@dataclass(frozen=True)
class Job:
    """A checked call: everything that can be known before processes meet."""

    task: Task
    precision: str
    template: Config | None
    """The DeepSpeed configuration as it was read."""
    data: Prepared | None
    """None for raw data that the run itself is going to prepare."""

    @property
    def arguments(self) -> RunArguments:
        """The flags of the call."""
        return self.task.arguments

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.arguments.run_folder

    @property
    def deepspeed(self) -> Config | None:
        """The configuration that is in effect: its output goes into the run folder."""
        return None if self.template is None else effective_config(self.template, self.folder)

    @property
    def prepared(self) -> Prepared:
        """The data, once they are prepared."""
        assert self.data is not None
        return self.data

    @property
    def manifest(self) -> Manifest:
        """Of the data."""
        return self.prepared.manifest

    @property
    def train(self) -> TokenizedSplit:
        """The rows to train on."""
        return self.prepared.train

    @property
    def dev(self) -> TokenizedSplit | None:
        """The rows to evaluate."""
        return self.prepared.dev

    def effective_batch_size(self) -> int:
        """Rows of an optimizer step, over all ranks; to be asked once processes have met."""
        rows = self.arguments.per_device_train_batch_size * self.arguments.gradient_accumulation_steps
        return rows * processes.world_size()

    def steps(self) -> int:
        """Optimizer steps of the whole run, if nothing stops it early; to be asked once processes have met."""
        if self.arguments.max_steps > 0:
            return self.arguments.max_steps
        return math.ceil(self.arguments.epochs * math.ceil(len(self.train) / self.effective_batch_size()))

    def identity(self) -> dict[str, Any]:
        """What must be equal for two calls to mean the same run; to be asked once processes have met.

        On another number of processes the same rows a step are divided otherwise: that is the same run.
        """
        flags = {key: value for key, value in self.task.settings(self.prepared).items() if key not in DIVISION}
        return {
            **flags,
            "effective_batch_size": self.effective_batch_size(),
            "precision": self.precision,
            "deepspeed": None if self.template is None else without_batch(self.template),
        }

    def with_data(self) -> Job:
        """The call with its data, prepared by rank 0 where they are raw, and checked against the flags."""
        job = self
        if job.data is None:
            processes.on_rank_zero(self.task.prepare)
            job = replace(self, data=self.task.data())
        processes.on_rank_zero(lambda: _check_data(job))
        return job


def check_call(task: Task) -> Job:
    """Read what the flags of a task name, and refuse what contradicts itself."""
    arguments = task.arguments
    precision = resolve_precision(arguments.precision, arguments.fp16_fault, arguments.model_id)
    processes_asked = int(os.environ.get("WORLD_SIZE", "1"))
    config = None
    if arguments.deepspeed is not None:
        config = read_config(Path(arguments.deepspeed))
        check_config(config, arguments.deepspeed, _flags(arguments, precision, processes_asked), arguments.fp16_fault)
        check_blocks(config, arguments.deepspeed)
    if arguments.max_train_seconds and processes_asked > 1:
        raise UserError("--max_train_seconds: clocks of several processes differ; give --max_steps instead")
    task.check(precision)
    return Job(task, precision, config, task.data() if task.is_prepared else None)


def _flags(arguments: RunArguments, precision: str, ranks: int) -> dict[str, Any]:
    """What a DeepSpeed configuration is compared with."""
    return {**asdict(arguments), "adam_beta1": arguments.adam_beta1, "precision": precision, "world_size": ranks}


def _check_data(job: Job) -> None:
    """Refuse what only the data show to be wrong."""
    arguments = job.arguments
    if job.dev is None and arguments.wants_best_model:
        raise UserError(f"{arguments.dataset_path}: has no dev split, by which the best model would be found")
    if job.template is not None and arguments.deepspeed is not None:
        known = {**_flags(arguments, job.precision, processes.world_size()), "optimizer_steps": job.steps()}
        check_config(job.template, arguments.deepspeed, known, arguments.fp16_fault)


def run_config(job: Job, argv: list[str], opening: Opening, hosts: list[str]) -> dict[str, Any]:
    """What `config.json` of the run folder holds.

    Args:
        hosts: the pods, each once, in the order of their ranks.
    """
    arguments, ranks = job.arguments, processes.world_size()
    slots = processes.slots()
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": opening.run_id,
        "attempt": opening.attempt,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": job.manifest.task,
        "model_id": arguments.model_id,
        "init": arguments.init,
        "technique": technique_of(job.deepspeed, ranks),
        "pods": ranks // slots,
        "slots": slots,
        "world_size": ranks,
        "precision": job.precision,
        "prompt": None if job.manifest.task == "lm" else job.manifest.prompt,
        "per_device_train_batch_size": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "effective_batch_size": job.effective_batch_size(),
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "train_rows": len(job.train),
        "dev_rows": None if job.dev is None else len(job.dev),
        "dataset": {"path": arguments.dataset_path, "content_key": job.manifest.content_key},
        "deepspeed": job.deepspeed,
        "identity": job.identity(),
        "argv": argv,
        "hosts": hosts,
        "versions": environment.versions(),
        "git_revision": environment.git_revision(Path(__file__).parent),
        "hardware": environment.hardware() | {"gpus": _gpus()},
    }


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


# One attempt of a run: train, evaluate, save, and write down how it ended.

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
    job.task.score(trainer, job.prepared, job.folder)


def _trainer(job: Job, settings: TrainingArguments, measured: RankMeasurement, meter: Meter) -> MeasuredTrainer:
    arguments = job.arguments
    model = job.task.model(job.prepared, job.precision)
    if not torch.cuda.is_available():
        suit_cpu(model)
    compile_model(model, arguments.compile)
    measured.parameters, measured.shape = parameters_of(model), job.task.shape(model)
    masters = job.precision == "bf16" and job.deepspeed is None
    trainer = MeasuredTrainer(
        model=round_to_bf16(model) if masters else model,
        args=settings,
        task=job.task,
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
        yield Curves(job.folder / "tensorboard", meter, job.effective_batch_size(), joint=job.task.joint)
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
        "deepspeed": technique_of(job.deepspeed, ranks) if job.deepspeed else None,
    }
    return Origin(run_id=opening.run_id, settings=digest(job.identity()), model=model, world_size=ranks)


def _stopped_by(trainer: MeasuredTrainer) -> str:
    if trainer.state.global_step >= trainer.state.max_steps:
        return "steps"
    return "early_stopping" if has_waited(trainer.callback_handler.callbacks) else "time"
