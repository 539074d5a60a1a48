"""A checked call of a training script: its task, how transformers is told what to do, and what its run folder says."""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import TrainingArguments

from zeropods.errors import UserError
from zeropods.measure import environment, record
from zeropods.measure.run_folder import Opening, is_claimed
from zeropods.programs import compile_in_turns
from zeropods.techniques import TECHNIQUES, technique_of
from zeropods.train import processes
from zeropods.train.arguments import INITS, PASSES, ROWS, RunArguments, batch_on
from zeropods.train.deepspeed import (
    Config,
    check_blocks,
    check_config,
    effective_config,
    read_config,
    spare_compiler,
    spare_shared_memory,
    without_batch,
)
from zeropods.train.device import resolve_precision
from zeropods.train.sampler import Prepared, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zeropods.train.trainer import MeasuredTrainer

UNDIVIDED = tuple(technique.name for technique in TECHNIQUES if not technique.stage)
"""Techniques that keep the same files."""
UNCHANGED = (
    *(ROWS, PASSES, "per_device_eval_batch_size", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "logging_steps", "seed", "dataloader_num_workers"),
)
"""Flags that transformers has under the same names."""


class Task(ABC):
    """A script's part of a run: data, batches, a model with its loss, and scores. The engine, which is the same for all
    scripts, calls the methods in this order.

    `text2sql.TextToSQL` and `causal.Causal` are tasks; a script names its own, so that a run of one loads nothing of
    the other.
    """

    flags: ClassVar[type[RunArguments]]
    """The kind of `arguments`."""
    joint: ClassVar[bool] = False
    """Whether a row is one text, of which some tokens carry a loss; else it is a source and a target."""
    arguments: RunArguments
    """The flags of the call."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments

    @abstractmethod
    def check(self, precision: str) -> None:
        """Refuse what can be seen to be wrong without the data."""

    def prepare(self) -> None:  # noqa: B027
        """Prepare data that are raw; most are not. Called on rank 0, which holds the lock of the run folder."""

    @abstractmethod
    def data(self) -> Prepared:
        """The rows that the run trains on and evaluates."""

    @abstractmethod
    def settings(self, data: Prepared) -> dict[str, object]:
        """What must be equal for two calls to mean the same run: flags, and what the data say instead of flags."""

    @abstractmethod
    def model(self, data: Prepared) -> PreTrainedModel:
        """The model in FP32, checked against the data.

        Its `forward` returns the sum of the token losses, in nats, divided by `num_items_in_batch`: the label tokens of
        the whole optimizer step, over all ranks.
        """

    @abstractmethod
    def batch(self, data: Prepared, rows: list[Row]) -> dict[str, Tensor]:
        """A batch of rows; `label_positions` are among it."""

    def score(self, trainer: MeasuredTrainer, data: Prepared, folder: Path) -> str:
        """Score the model that is trained and saved in a run folder, and say how good it is; every rank takes part."""
        return ""


@dataclass(frozen=True)
class TrainingJob:
    """A call that has been checked before processes meet."""

    task: Task
    precision: str
    template: Config | None
    """The DeepSpeed configuration as it was read."""

    @cached_property
    def data(self) -> Prepared:
        """The rows that the run trains on and evaluates, once they are prepared."""
        return self.task.data()

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
    def technique(self) -> str:
        """The technique's name; to be asked once processes have met, as all that follows."""
        return technique_of(self.deepspeed, processes.world_size())

    def effective_batch_size(self) -> int:
        """Rows of an optimizer step, over all ranks."""
        rows = self.arguments.per_device_train_batch_size * self.arguments.gradient_accumulation_steps
        return rows * processes.world_size()

    def steps(self) -> int:
        """Optimizer steps of the whole run, if nothing stops it early."""
        if self.arguments.max_steps > 0:
            return self.arguments.max_steps
        return math.ceil(self.arguments.epochs * math.ceil(len(self.data.train) / self.effective_batch_size()))

    def identity(self) -> dict[str, object]:
        """What must be equal for two calls to mean the same run.

        On another number of processes the same rows per step are divided otherwise: that is the same run.
        """
        flags = {key: value for key, value in self.task.settings(self.data).items() if key not in (ROWS, PASSES)}
        # The same folder may hold another run by then.
        run = {} if self.arguments.init in INITS else {"init": record.read_config(Path(self.arguments.init)).run_id}
        return {
            **flags,
            **run,
            "effective_batch_size": self.effective_batch_size(),
            "precision": self.precision,
            "deepspeed": None if self.template is None else without_batch(self.template),
        }


def check_call(task: Task) -> TrainingJob:
    """Read what the flags of a task name, and refuse what contradicts itself."""
    arguments = task.arguments
    precision = resolve_precision(arguments.precision, arguments.model_id)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = None
    if arguments.deepspeed is not None:
        config = read_config(Path(arguments.deepspeed))
        check_config(config, arguments.deepspeed, _flags(arguments, precision, ranks), arguments.fp16_fault)
        check_blocks(config, arguments.deepspeed)
    if arguments.max_train_seconds and ranks > 1:
        raise UserError("--max_train_seconds: clocks of several processes differ; give --max_steps instead")
    arguments.check_inputs()
    task.check(precision)
    return TrainingJob(task, precision, config)


def check_data(job: TrainingJob) -> None:
    """Refuse what only the data show to be wrong."""
    arguments = job.arguments
    if job.data.dev is None and arguments.wants_best_model:
        raise UserError(f"{arguments.dataset_path}: has no dev split, by which the best model would be found")
    if job.template is not None and arguments.deepspeed is not None:
        known = {**_flags(arguments, job.precision, processes.world_size()), "optimizer_steps": job.steps()}
        check_config(job.template, arguments.deepspeed, known, arguments.fp16_fault)


def _flags(arguments: RunArguments, precision: str, ranks: int) -> dict[str, object]:
    """What a DeepSpeed configuration is compared with."""
    return {**asdict(arguments), "adam_beta1": arguments.adam_beta1, "precision": precision, "world_size": ranks}


def check_same_run(job: TrainingJob) -> None:
    """Refuse another technique than that of the run in the folder, and other rows per step.

    Both may be meant for another number of pods. Other differences are `open_run`'s to find.
    """
    if job.arguments.resume == "never" or not is_claimed(job.folder):
        return
    before = record.read_config(job.folder)
    was, now = before.technique, job.technique
    if was != now and not (was in UNDIVIDED and now in UNDIVIDED):
        raise UserError(
            f"{job.folder}: holds a run of technique {was}, this call is of {now}; give the run's own --deepspeed, "
            "or choose another --outputdir"
        )
    rows_before, rows_now, ranks = before.effective_batch_size, job.effective_batch_size(), processes.world_size()
    if rows_before != rows_now:
        rows, passes = job.arguments.per_device_train_batch_size, job.arguments.gradient_accumulation_steps
        # No more rows per pass than were asked for, since memory was enough for these.
        same = batch_on(ranks, rows_before, rows)
        numbers = ", ".join(str(n) for n in range(1, min(rows_before, 64) + 1) if rows_before % n == 0)
        fits = f"{rows_before} does not divide by {ranks}: take {numbers} processes"
        if same is not None:
            fits = f"give --{ROWS} {same.rows} --{PASSES} {same.passes}"
        raise UserError(
            f"{job.folder}: holds a run of {rows_before} rows per step, this call has {rows} rows x {passes} passes x "
            f"{ranks} processes = {rows_now}; {fits}"
        )


def run_config(job: TrainingJob, argv: list[str], opening: Opening, hosts: list[str]) -> dict[str, object]:
    """What `config.json` of the run folder holds.

    Args:
        hosts: the pods, each once, in the order of their ranks.
    """
    arguments, data, ranks, slots = job.arguments, job.data, processes.world_size(), processes.slots()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "schema_version": record.SCHEMA_VERSION,
        "run_id": opening.run_id,
        "attempt": opening.attempt,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": data.manifest.task,
        "model_id": arguments.model_id,
        "init": Path(arguments.init).resolve().name,
        "technique": job.technique,
        "pods": ranks // slots,
        "slots": slots,
        "world_size": ranks,
        "precision": job.precision,
        "prompt": None if data.manifest.task == "lm" else data.manifest.prompt,
        "per_device_train_batch_size": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "effective_batch_size": job.effective_batch_size(),
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "train_rows": len(data.train),
        "dev_rows": None if data.dev is None else len(data.dev),
        "dataset": {"path": arguments.dataset_path, "content_key": data.manifest.content_key},
        "deepspeed": job.deepspeed,
        "identity": job.identity(),
        "argv": argv,
        "hosts": hosts,
        "versions": environment.versions(),
        "git_revision": environment.git_revision(Path(__file__).parent),
        "hardware": environment.hardware() | {"gpus": gpus},
    }


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
    settings = TrainingArguments(
        output_dir=str(job.folder / "checkpoints"),
        num_train_epochs=arguments.epochs,
        **{name: getattr(arguments, name) for name in UNCHANGED},
        activation_checkpointing=arguments.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
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
        report_to=[],
        remove_unused_columns=False,
        label_names=["labels"],
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


def _strategy(steps: int | None) -> str:
    if steps is None:
        return "epoch"
    return "steps" if steps else "no"
