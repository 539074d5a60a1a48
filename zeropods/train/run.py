"""One run of `textsql_train.py`, from its flags to its record."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, EarlyStoppingCallback, Seq2SeqTrainingArguments
from transformers.trainer_callback import PrinterCallback

from zeropods import atomic
from zeropods.data.manifest import Manifest
from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.records import SCHEMA_VERSION, RankMeasurement, compose_record, write_record
from zeropods.measure.run_folder import CONFIG, Opening, checkpoints, locked, open_run
from zeropods.train import processes
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.callbacks import LossCurves, Recorder, TimeLimit
from zeropods.train.dataset import TokenizedSplit, collate, load_prepared
from zeropods.train.deepspeed_config import Config, effective_config, read_config, technique
from zeropods.train.dropout import cheapen_dropout
from zeropods.train.master import MasterAdamW
from zeropods.train.model import load_model
from zeropods.train.precision import resolve_precision
from zeropods.train.trainer import TextToSQLTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A checked call: everything that can be known before processes meet."""

    arguments: TextToSQLArguments
    precision: str
    deepspeed: Config | None
    manifest: Manifest
    train: TokenizedSplit
    dev: TokenizedSplit | None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.arguments.run_folder

    def identity(self) -> dict[str, Any]:
        """What must be equal for two calls to mean the same run."""
        return {
            **self.arguments.comparable(),
            "precision": self.precision,
            "deepspeed": self.deepspeed,
            "dataset_path": self.manifest.content_key,
        }


def fine_tune(arguments: TextToSQLArguments, argv: list[str]) -> None:
    """Train, evaluate, save, and leave a record; `UserError` and Ctrl-C leave one too."""
    began = time.time()
    job = _job(arguments)
    settings = _settings(job)
    try:
        with _rank_zero_lock(job.folder), _terminable():
            opening = processes.on_rank_zero(lambda: _open(job, argv))
            if opening.finished:
                print(f"{job.folder}: this run is finished; nothing to do", file=sys.stderr)
            else:
                _attempt(job, settings, opening, began)
    finally:
        if sys.exc_info()[0] is None:
            processes.leave()


def _job(arguments: TextToSQLArguments) -> Job:
    precision = resolve_precision(arguments.precision)
    config = None
    if arguments.deepspeed is not None:
        config = effective_config(read_config(Path(arguments.deepspeed)), arguments.run_folder)
    if arguments.max_train_seconds and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--max_train_seconds: clocks of several processes differ; give --max_steps instead")
    manifest, train, dev = load_prepared(Path(arguments.dataset_path))
    return Job(arguments, precision, config, manifest, train, dev)


def _settings(job: Job) -> Seq2SeqTrainingArguments:
    """transformers' arguments; making them starts the process group."""
    arguments = job.arguments
    return Seq2SeqTrainingArguments(
        output_dir=str(job.folder / "checkpoints"),
        num_train_epochs=arguments.epochs,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.per_device_train_batch_size,
        per_device_eval_batch_size=arguments.per_device_eval_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        gradient_checkpointing=arguments.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=arguments.learning_rate,
        lr_scheduler_type=arguments.lr_scheduler_type,
        warmup_steps=arguments.warmup_steps,
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
        disable_tqdm=not sys.stderr.isatty(),
    )


def _strategy(steps: int | None) -> str:
    if steps is None:
        return "epoch"
    return "steps" if steps else "no"


@contextlib.contextmanager
def _rank_zero_lock(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        processes.on_rank_zero(lambda: stack.enter_context(locked(folder)))
        yield


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, so that its record is written."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _open(job: Job, argv: list[str]) -> Opening:
    opening = open_run(job.folder, job.identity(), again=job.arguments.resume == "never")
    if not opening.finished:
        atomic.write_json(job.folder / CONFIG, _config(job, argv, opening))
    return opening


def _config(job: Job, argv: list[str], opening: Opening) -> dict[str, Any]:
    arguments, ranks = job.arguments, processes.world_size()
    slots = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": opening.run_id,
        "attempt": opening.attempt,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": job.manifest.task,
        "model_id": arguments.model_id,
        "init": arguments.init,
        "technique": technique(job.deepspeed, ranks),
        "pods": ranks // slots,
        "slots": slots,
        "world_size": ranks,
        "precision": job.precision,
        "prompt": job.manifest.prompt,
        "effective_batch_size": batch,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "train_rows": len(job.train),
        "dataset": {"path": arguments.dataset_path, "content_key": job.manifest.content_key},
        "identity": job.identity(),
        "argv": argv,
        "hosts": [socket.gethostname()],
        "versions": environment.versions(),
        "git_revision": environment.git_revision(Path(__file__).parent),
        "hardware": environment.hardware() | {"gpus": _gpus()},
    }


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _attempt(job: Job, settings: Seq2SeqTrainingArguments, opening: Opening, began: float) -> None:
    measured = RankMeasurement(rank=processes.rank(), host=socket.gethostname())
    with _train_log(job.folder):
        try:
            _train(job, settings, opening, measured, began)
            measured.status = "ok"
        except BaseException as error:
            measured.status, measured.reason = _outcome(error)
            raise
        finally:
            _conclude(job.folder, measured)


def _train(
    job: Job, settings: Seq2SeqTrainingArguments, opening: Opening, measured: RankMeasurement, began: float
) -> None:
    trainer = _trainer(job, settings, measured, began)
    trainer.train(resume_from_checkpoint=_checkpoint(job, opening))
    measured.stopped_by = measured.stopped_by or _stopped_by(trainer)
    last = measured.eval_losses[-1]["step"] if measured.eval_losses else None
    if job.dev is not None and (last != trainer.state.global_step or settings.load_best_model_at_end):
        trainer.evaluate()
    trainer.save_model(str(job.folder / "model"))
    for name, count in trainer.counted_tokens().items():
        setattr(measured, name, count)


def _trainer(
    job: Job, settings: Seq2SeqTrainingArguments, measured: RankMeasurement, began: float
) -> TextToSQLTrainer:
    arguments = job.arguments
    tokenizer = AutoTokenizer.from_pretrained(Path(arguments.dataset_path) / "tokenizer")
    model = cheapen_dropout(load_model(arguments, tokenizer))
    masters = job.precision == "bf16" and job.deepspeed is None
    trainer = TextToSQLTrainer(
        model=model.to(torch.bfloat16) if masters else model,
        args=settings,
        train_dataset=job.train,
        eval_dataset=job.dev,
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[Recorder(measured, began)],
        seconds=arguments.max_train_seconds,
    )
    if job.deepspeed is None:
        trainer.optimizer_cls_and_kwargs = _optimizer(arguments, masters)
    trainer.remove_callback(PrinterCallback)
    for callback in _optional_callbacks(job, trainer, measured):
        trainer.add_callback(callback)
    return trainer


def _optimizer(arguments: TextToSQLArguments, masters: bool) -> tuple[type, dict[str, Any]]:
    return MasterAdamW if masters else torch.optim.AdamW, {"lr": arguments.learning_rate, "fused": True}


def _optional_callbacks(job: Job, trainer: TextToSQLTrainer, measured: RankMeasurement) -> Iterator[Any]:
    arguments = job.arguments
    if processes.rank() == 0:
        yield LossCurves(job.folder / "tensorboard")
    if arguments.max_train_seconds:
        yield TimeLimit(trainer, measured)
    if arguments.early_stopping_patience:
        yield EarlyStoppingCallback(arguments.early_stopping_patience, arguments.early_stopping_threshold)


def _checkpoint(job: Job, opening: Opening) -> str | None:
    asked = job.arguments.resume
    if asked not in ("auto", "never"):
        if not (Path(asked) / "trainer_state.json").is_file():
            raise UserError(f"--resume {asked}: no checkpoint there; expected auto, never or a checkpoint folder")
        return asked
    found = checkpoints(job.folder) if opening.resume else []
    if found:
        log.info("going on from %s", found[0])
    return str(found[0]) if found else None


def _stopped_by(trainer: TextToSQLTrainer) -> str:
    return "steps" if trainer.state.global_step >= trainer.state.max_steps else "early_stopping"


def _outcome(error: BaseException) -> tuple[str, str]:
    """Status and reason of an attempt that ended with an exception."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", str(error) or "SIGINT"
    # The CPU's allocator has no exception of its own.
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return "oom", text.split("\n")[0]
    return "failed", text.split("\n")[0]


def _conclude(folder: Path, measured: RankMeasurement) -> None:
    """Write this rank's measurement; rank 0 waits for the others where all went well, and composes."""
    measured.peak_resident_bytes = environment.peak_resident_bytes()
    if torch.cuda.is_available():
        measured.peak_allocated_bytes = torch.cuda.max_memory_allocated()
        measured.peak_reserved_bytes = torch.cuda.max_memory_reserved()
    measured.write(folder)
    if measured.status == "ok" and processes.world_size() > 1:
        torch.distributed.barrier()
    if processes.rank() == 0:
        write_record(folder, compose_record(folder))


@contextlib.contextmanager
def _train_log(folder: Path) -> Iterator[None]:
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
