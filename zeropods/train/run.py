"""One run of a training script, from its flags to its record.

It trains, evaluates and saves, and writes down how it ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback, IntervalStrategy, PreTrainedModel, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.mlflow_runs import MLFLOW, Points, points_sent
from zeropods.measure.record import (
    RankMeasurement,
    Record,
    closing_line,
    compose_record,
    lost_connection,
    write_record,
)
from zeropods.measure.run_folder import Opening, locked
from zeropods.programs import variable_set
from zeropods.tables import GIB, SampleRate, progress
from zeropods.techniques import SAVED_WHOLE
from zeropods.train import processes
from zeropods.train.checkpoints import MANIFEST, Origin, digest
from zeropods.train.device import choose_attention, compile_model, matmul_rates, suit_cpu
from zeropods.train.early_exit import exit_call
from zeropods.train.flags import RunArguments
from zeropods.train.job import Task, open_folder, training_arguments
from zeropods.train.meter import Curves, LiveBytesRecorder, Meter
from zeropods.train.precision import PrecisionRecorder
from zeropods.train.pretrained import configuration_of
from zeropods.train.processes import SavedOnSignalError, SaveOnSignal, heard_while_waiting
from zeropods.train.save_and_resume import Checkpoints, Resumption, resumption
from zeropods.train.trainer import MeasuredTrainer, ShownSteps

OTHERS_SECONDS = 3.0
"""Seconds that rank 0 waits for other ranks' measurements where it composes the record."""
LOOK_SECONDS = 0.1
"""Seconds between two looks for these measurements."""


def fine_tune(task: Task, argv: list[str], age_seconds: float = 0.0) -> None:
    """Train, evaluate, save, and leave a record.

    A run that fails or is interrupted leaves one too, once its folder is open.

    Args:
        argv: the call, for `config.json`.
        age_seconds: seconds since the run's own process began; 0 where several runs share one
            process.

    Raises:
        UserError: the call is wrong, or the run has failed; a `SharedError` where every rank knows.
    """
    began = time.monotonic() - age_seconds
    save_signal = SaveOnSignal()
    with save_signal.listening(), _threads(task.arguments.threads):
        task.check()
        choose_attention()
        if task.arguments.tf32:
            torch.set_float32_matmul_precision("high")
        settings = training_arguments(task)
        try:
            _fine_tune_in_folder(task, argv, settings, began, save_signal)
        except processes.SharedError:
            # Every rank has this error. After any other one this rank would wait in vain for the
            # others, so it does not leave the group.
            processes.leave()
            raise
        processes.leave()


@contextlib.contextmanager
def _threads(threads: int) -> Iterator[None]:
    """Let torch use this number of threads in this process; 0 leaves its number as it is."""
    if not threads:
        yield
        return
    torch.set_num_threads(threads)
    # Without the variable, accelerate sets a number of its own, under DeepSpeed and for several
    # processes.
    with variable_set("OMP_NUM_THREADS", str(threads)):
        yield


def _fine_tune_in_folder(
    task: Task,
    argv: list[str],
    settings: TrainingArguments,
    began: float,
    save_signal: SaveOnSignal,
) -> None:
    """Prepare the data, open the run folder and train, unless its run is finished.

    The folder stays locked until training ends.

    Args:
        settings: transformers' arguments; evaluation is switched off in them without a dev split.
        began: when the process began, by the monotonic clock.
    """
    with contextlib.ExitStack() as stack:
        processes.on_rank_zero(lambda: stack.enter_context(locked(task.folder)))
        processes.on_rank_zero(task.prepare)
        # A rank that cannot read the rows tells the others, which would otherwise wait for it.
        lacks_dev = processes.on_every_rank(lambda: task.data.dev is None)
        if any(lacks_dev):
            settings.eval_strategy = IntervalStrategy.NO
        # Each pod once, in the order of ranks.
        hosts = list(dict.fromkeys(processes.gathered(environment.host())))
        opening = processes.on_rank_zero(
            lambda: open_folder(task, argv, hosts, settings.device.type)
        )
        if not opening.finished:
            train_and_record(task, settings, opening, time.monotonic() - began, save_signal)
        elif processes.rank() == 0:
            print(f"{task.folder}: this run is finished; nothing to do", file=sys.stderr)


def train_and_record(
    task: Task,
    settings: TrainingArguments,
    opening: Opening,
    age_seconds: float,
    save_signal: SaveOnSignal,
) -> None:
    """Train; whatever happens, write this rank's measurement and, on rank 0, the record.

    Where a supervisor started the ranks (`ZEROPODS_RUN` is set), the supervisor composes the
    record: it knows of pods that are gone.

    Args:
        age_seconds: seconds since the process began.
        save_signal: tells whether the run is to save and end.

    Raises:
        UserError: memory was not enough; or this rank has ended well, but another one has not.
        BaseException: any other error that ended the training, after all has been written.
    """
    measured = RankMeasurement(
        rank=processes.rank(), host=environment.host(), warmup_steps=task.engine.warmup_steps
    )
    with train_log(task.folder), contextlib.ExitStack() as ending:
        meter = _meter_of(task, measured, age_seconds)
        attempt = Attempt(task, settings, opening, save_signal, measured, meter)
        score = ""
        all_ranks_end_here = False
        try:
            score = attempt.train()
            measured.status = "ok"
            all_ranks_end_here = True
        except BaseException as error:
            # No signal may end this rank until the record is written, although the error goes on.
            ending.enter_context(processes.undisturbed())
            measured.status, measured.reason = outcome(error, meter)
            # All ranks save at the same step, and end after it.
            all_ranks_end_here = isinstance(error, SavedOnSignalError)
            if measured.status == "oom":
                remedy = _remedy_for_memory(meter)
                raise UserError(f"{task.folder}: oom: {measured.reason}; {remedy}") from error
            raise
        finally:
            record = _write_down(task, measured, meter, score, all_ranks_end_here)
    if record is not None and record.status != "ok":
        # This rank has ended well, but another one has not.
        raise UserError(f"{task.folder}: {record.status}: {record.reason}")


def _meter_of(task: Task, measured: RankMeasurement, age_seconds: float) -> Meter:
    """The meter of this rank's attempt; arguments as those of `train_and_record`."""
    return Meter(
        task.folder,
        measured,
        interval=task.arguments.memory_interval,
        age_seconds=age_seconds,
        is_one_text=task.is_one_text,
    )


def _write_down(
    task: Task, measured: RankMeasurement, meter: Meter, score: str, all_ranks_end_here: bool
) -> Record | None:
    """Write this rank's measurement and, on rank 0 without a supervisor, the record.

    Args:
        score: what the run has scored in words; empty where it was not scored.
        all_ranks_end_here: whether rank 0 may wait for the others before it composes the record: a
            rank that has failed would never come.

    Returns:
        The record where this rank has written it; None where another rank or a supervisor does.
    """
    with processes.undisturbed():
        meter.write(measured)
    if all_ranks_end_here and processes.world_size() > 1:
        # Behind it, every rank has written its measurement.
        torch.distributed.barrier()
    has_supervisor = bool(os.environ.get("ZEROPODS_RUN"))
    if processes.rank() != 0 or has_supervisor:
        return None
    with processes.undisturbed():
        return _write_record_and_report(task, measured, score)


def _remedy_for_memory(meter: Meter) -> str:
    """What helps where memory was not enough, by the phase in which it ran out."""
    phase = meter.failed_in or meter.phases.phase
    if phase == "load":
        return "use a smaller model, or more memory"
    return "use fewer rows, or a technique that partitions more"


def _write_record_and_report(task: Task, measured: RankMeasurement, score: str) -> Record:
    """Write the record of an attempt without a supervisor, call `on_end`, print how it ended.

    Args:
        measured: what rank 0, this one, has measured.
        score: what the run has scored in words; empty where it was not scored.
    """
    # Written at once: this process may be ended while it waits for others.
    record = compose_record(task.folder)
    write_record(task.folder, record)
    # A rank loses a connection where another one has failed, and the other one's measurement, which
    # may still come, says more about the reason.
    if lost_connection(measured.reason) and await_others(task.folder, processes.world_size()):
        record = compose_record(task.folder)
        write_record(task.folder, record)
    if task.on_end is not None:
        task.on_end(task.folder)
    if record.status == "ok":
        print(closing_line(task.folder, record, score))
    has_checkpoint = any(task.folder.glob(f"checkpoints/*/{MANIFEST}"))
    is_resumable = has_checkpoint and task.arguments.resume == "auto"
    if record.status == "interrupted" and is_resumable:
        print(f"{task.folder}: the same command resumes from the last checkpoint", file=sys.stderr)
    return record


def await_others(folder: Path, world_size: int) -> bool:
    """Wait until all ranks have written their measurements, `OTHERS_SECONDS` at most.

    Returns:
        Whether any measurement has come meanwhile.
    """
    deadline = time.monotonic() + OTHERS_SECONDS

    def number_written() -> int:
        return len(list((folder / "ranks").glob("*.json")))

    number_before = number_written()
    while number_written() < world_size and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return number_written() > number_before


def outcome(error: BaseException, meter: Meter) -> tuple[str, str]:
    """Status and reason of an attempt that ended with an exception.

    Returns:
        `interrupted`, `oom` or `failed`, and the reason in one line. The reason for a lack of
        memory has the phase in which it was lacking, and the peak.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UserError):
        text = str(error)
    # An error without a message is its type's name alone.
    first_line = text.split("\n")[0].removesuffix(": ")
    if isinstance(error, SavedOnSignalError | KeyboardInterrupt):
        # Only the interrupt that Python raises itself, on Ctrl-C, does not name its signal.
        return "interrupted", str(error) or "SIGINT"
    if isinstance(error, SystemExit):
        return "failed", exit_call(error)
    # The CPU's allocator has no exception of its own.
    is_of_cpu = "DefaultCPUAllocator: can't allocate" in text
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or is_of_cpu:
        phase = meter.failed_in or meter.phases.phase
        progress_text = f"phase {phase}, {meter.heartbeat.step} steps done"
        return "oom", f"{first_line}; {progress_text}{_peak_text(meter)}"
    return "failed", first_line


def _peak_text(meter: Meter) -> str:
    """The peak of memory as an addition to a reason; empty where none was measured.

    On a GPU it is the peak of torch's allocator, without a GPU that of the process's resident
    memory.
    """
    _, peaks = meter.phases.measured()
    if peaks.peak_allocated_bytes is not None:
        return f", peak allocated {peaks.peak_allocated_bytes / GIB:.2f} GiB"
    if peaks.peak_resident_bytes is not None:
        return f", peak resident {peaks.peak_resident_bytes / GIB:.2f} GiB"
    return ""


@contextlib.contextmanager
def train_log(folder: Path) -> Iterator[None]:
    """Write this package's log lines, from INFO on, to the run's `train.log`; on rank 0 only."""
    if processes.rank() != 0:
        yield
        return
    handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    logger = logging.getLogger("zeropods")
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


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run in this process: what it trains, and what measures it."""

    task: Task
    settings: TrainingArguments
    opening: Opening
    save_signal: SaveOnSignal
    """Tells whether the run is to save and end."""
    measured: RankMeasurement
    """What this rank has measured so far."""
    meter: Meter

    def train(self) -> str:
        """Train while the meter measures, and while a thread listens for signals that end the run.

        Returns:
            How good the model is, in words; empty where it is not scored.
        """

        def write_interrupted(signal_name: str) -> None:
            """Write what was measured so far, for a main thread that cannot."""
            reason = f"{signal_name} while waiting for other ranks"
            self.meter.write(replace(self.measured, status="interrupted", reason=reason))

        wants_mlflow = self.task.arguments.report_to == MLFLOW
        is_reported = wants_mlflow and processes.rank() == 0
        with (
            self.meter,
            heard_while_waiting(write_interrupted, saving=self.save_signal.number),
            points_sent(self.task.folder, is_reported=is_reported) as points,
        ):
            return self._train(points)

    def _train(self, points: Points | None) -> str:
        """Train, evaluate, save and score; the figures of all this go into `measured`.

        Args:
            points: what sends the curves to MLflow; None where nothing does.

        Returns:
            As for `train`.
        """
        task = self.task
        arguments = task.arguments
        measured = self.measured
        is_first = processes.rank() == 0
        has_dev = task.data.dev is not None
        if is_first:
            measured.matmul_flops_per_second = max(matmul_rates(task.precision).values())
        # All wait here: otherwise the other ranks would take cores from what is measured.
        processes.gathered(None)
        trainer = self._trainer(self._model())
        trainer.add_callback(
            LiveBytesRecorder(measured, task.engine, lambda: trainer.model_wrapped)
        )
        precision_recorder = PrecisionRecorder(measured, processes.world_size(), task.engine)
        trainer.add_callback(precision_recorder)
        if is_first:
            folder = task.folder / "tensorboard"
            curves = Curves(folder, self.meter, task.effective_batch_size(), points)
            trainer.add_callback(curves)

        trainer.checkpoints = Checkpoints(
            task.folder / "checkpoints",
            self._origin(),
            task.engine,
            keep=arguments.save_total_limit,
        )
        resumed = resumption(arguments.resume, self.opening, trainer.checkpoints)
        trainer.resumption = resumed
        stopping = _early_stopping(arguments, resumed)
        if stopping is not None:
            trainer.add_callback(stopping)
        trainer.add_callback(self.save_signal)
        # Set only now that it is known what training resumes from; the trainer has these settings.
        self.settings.eval_on_start = arguments.eval_on_start and has_dev and resumed is None

        with precision_recorder, _shown_steps(task, trainer):
            checkpoint = None
            if resumed is not None:
                checkpoint = str(resumed.checkpoint)
            trainer.train(resume_from_checkpoint=checkpoint)

        measured.stopped_by = _stopped_by(trainer, stopping)
        if has_dev and not _is_evaluated(trainer, measured):
            trainer.evaluate()
        if arguments.save_model:
            trainer.save_model(str(task.folder / "model"))
        return task.score(trainer.last_evaluation, trainer.summed_loss)

    def _model(self) -> PreTrainedModel:
        """Load the model, suit it to the device, and note its size and shape in `measured`."""
        task = self.task
        model = task.model()
        # Downloads are over; from now on each saved model would show a progress bar.
        disable_progress_bar()
        if not torch.cuda.is_available():
            suit_cpu(model)
        compile_model(model, task.arguments.compile)
        self.measured.parameters = task.engine.number_of_parameters(model)
        self.measured.shape = configuration_of(model)
        return model

    def _trainer(self, model: PreTrainedModel) -> MeasuredTrainer:
        """The trainer, with the engine's model and optimizer."""
        task = self.task
        task.engine.prepare_model(model, task.precision)
        trainer = MeasuredTrainer(task, self.meter, model=model, args=self.settings)
        trainer.optimizer_cls_and_kwargs = task.engine.optimizer(task.precision)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _origin(self) -> Origin:
        """What a checkpoint of this run says of where it is from."""
        task = self.task
        # Techniques that save whole states can load one another's checkpoints, so none is named.
        technique = None
        if task.technique not in SAVED_WHOLE:
            technique = task.technique
        return Origin(
            run_id=self.opening.run_id,
            settings=digest(task.identity()),
            model={
                "parameters": self.measured.parameters,
                "precision": task.precision,
                "deepspeed": technique,
            },
            world_size=processes.world_size(),
        )


@contextlib.contextmanager
def _shown_steps(task: Task, trainer: MeasuredTrainer) -> Iterator[None]:
    """Show the steps of the training in this block; nothing on any rank but 0."""
    if processes.rank() != 0:
        yield
        return
    with progress("train", "steps") as bar:
        rate = SampleRate(task.effective_batch_size())
        trainer.add_callback(ShownSteps(bar, rate, trainer.time_limit))
        yield


def _is_evaluated(trainer: MeasuredTrainer, measured: RankMeasurement) -> bool:
    """Whether the weights that the model now has are those that were evaluated last."""
    # The best model has taken the place of the last one, which was evaluated.
    has_other_weights = trainer.args.load_best_model_at_end
    if has_other_weights or not measured.eval_losses:
        return False
    return measured.eval_losses[-1].step == trainer.state.global_step


def _early_stopping(
    arguments: RunArguments, resumed: Resumption | None
) -> EarlyStoppingCallback | None:
    """A callback that ends a run whose loss gets no better; None where the flags ask for none."""
    if not arguments.early_stopping_patience:
        return None
    stopping = EarlyStoppingCallback(
        arguments.early_stopping_patience, arguments.early_stopping_threshold
    )
    if resumed is not None:
        # The counter goes on from the checkpoint: otherwise a resumed run would be more patient.
        kept = resumed.kept.get(EarlyStoppingCallback.__name__, {}).get("attributes", {})
        stopping.early_stopping_patience_counter = kept.get("early_stopping_patience_counter", 0)
    return stopping


def _stopped_by(trainer: MeasuredTrainer, stopping: EarlyStoppingCallback | None) -> str:
    """What ended the training: `steps`, `early_stopping` or `time`."""
    if trainer.state.global_step >= trainer.state.max_steps:
        return "steps"
    if stopping is not None:
        evaluations_without_gain = stopping.early_stopping_patience_counter
        if evaluations_without_gain >= stopping.early_stopping_patience:
            return "early_stopping"
    return "time"
