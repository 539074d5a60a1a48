"""A checked call of a training script.

Its task, the arguments that transformers gets, and what its run folder says.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import TrainingArguments

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure import environment, record
from zeropods.measure.run_folder import Opening, is_claimed, open_run
from zeropods.tasks import task_or_unknown
from zeropods.techniques import SAVED_WHOLE
from zeropods.train import processes
from zeropods.train.deepspeed_config import slots_of_pod
from zeropods.train.device import resolve_precision
from zeropods.train.engines.base import Engine
from zeropods.train.flags import INITS, PASSES, ROWS, RunArguments, batch_on
from zeropods.train.sampler import Prepared, Row, TokenizedSplit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_PROCESSES_OFFERED = 64
"""Largest number of processes that a remedy names."""
UNCHANGED = (
    ROWS,
    PASSES,
    "per_device_eval_batch_size",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "max_grad_norm",
    "logging_steps",
    "seed",
    "dataloader_num_workers",
)
"""Flags that transformers has under the same names."""
STRATEGIES = {None: "epoch", 0: "no"}
"""Strategies of transformers for `--eval_steps` and `--save_steps`.

The first is for a flag that is not given, the second for one that is 0. For any other number of
steps it is `steps`.
"""
UNUSED_SAVE_STEPS = 500
"""`save_steps` where no checkpoint is saved by steps: transformers' own default."""


class SummedLoss(NamedTuple):
    """The loss of some rows, over all ranks."""

    nats: float
    """Sum of the losses of all label tokens."""
    tokens: int
    """Number of label tokens."""


class Task(ABC):
    """A call of a script, and its part of a run: data, batches, a model with its loss, and scores.

    A run (`run.py`), which is the same for all scripts, calls the methods in this order.
    `text2sql.TextToSQL` and `causal.Causal` are tasks.
    """

    is_one_text: ClassVar[bool] = False
    """Whether a row is one text in which some tokens carry a loss.

    Otherwise it is a source and a target.
    """
    precision: str
    """Precision of the run, `fp32`, `bf16` or `fp16`; known once the call has been checked."""
    arguments: RunArguments
    """The flags of the call."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.folder = Path(self.arguments.outputdir)
        """The run folder."""
        self.on_end: Callable[[Path], object] | None = None
        """Called with the run folder once a run without a supervisor has its record."""

    @cached_property
    def engine(self) -> Engine:
        """The engine that the flags ask for."""
        engine: Engine = resolve_name(self.arguments.engine_class)(self.arguments)
        return engine

    def check(self) -> None:
        """Check the flags and what they name, before processes connect; set `precision`.

        Raises:
            UserError: the flags contradict one another, or name something that is missing or
                unusable.
        """
        arguments = self.arguments
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.precision = resolve_precision(arguments.precision, arguments.model_id)
        self.engine.check(ranks)
        if arguments.max_train_seconds and ranks > 1:
            raise UserError(
                "--max_train_seconds: clocks of several processes differ; give --max_steps instead"
            )
        arguments.check_inputs()
        self.check_model()

    @abstractmethod
    def check_model(self) -> None:
        """Refuse a model that is missing, or that cannot run here as the flags ask."""

    def prepare(self) -> None:  # noqa: B027
        """Prepare raw data; a task whose data are always prepared has nothing to do.

        Called on rank 0, which holds the run folder's lock.
        """

    @cached_property
    @abstractmethod
    def data(self) -> Prepared:
        """The rows that the run trains on and evaluates, once they are prepared."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """The task's part of `identity`: the flags that two calls of the same run share.

        Facts of the data stand in place of flags that name the data.
        """

    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The model in FP32, checked against the data.

        Its `forward` returns the sum of the token losses, in nats, divided by
        `num_items_in_batch`: the number of label tokens of the whole optimizer step, over all
        ranks.
        """

    @abstractmethod
    def batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """The tensors of a batch of rows, including `label_positions`."""

    def score(
        self, dev_loss: SummedLoss | None, summed_loss: Callable[[TokenizedSplit], SummedLoss]
    ) -> str:
        """Score the model that was trained, and return in words how good it is; here an empty
        text, for a task without a score of its own.

        Every rank takes part.

        Args:
            dev_loss: the model's loss on the dev split; None where the run has none.
            summed_loss: measures the model's loss on other rows; every rank must call it.
        """
        return ""

    # These may be used only after the processes have connected.

    @property
    def technique(self) -> str:
        """Name of the run's technique, which may depend on the number of processes."""
        return self.arguments.technique(self.engine.configuration, processes.world_size())

    def effective_batch_size(self) -> int:
        """Number of rows of an optimizer step, over all ranks."""
        rows_per_pass = self.arguments.per_device_train_batch_size * processes.world_size()
        return rows_per_pass * self.arguments.gradient_accumulation_steps

    def identity(self) -> dict[str, object]:
        """What must be equal for two calls to mean the same run.

        On another number of processes the same rows per step are divided differently: that is still
        the same run. So only their product is part of it, the effective batch size.
        """
        identity = dict(self.settings())
        for key in (ROWS, PASSES):
            identity.pop(key, None)
        if self.arguments.init not in INITS:
            # `--init` names a run's folder, which may hold another run later: its id stays true.
            identity["init"] = record.read_config(Path(self.arguments.init)).run_id
        identity["effective_batch_size"] = self.effective_batch_size()
        identity["precision"] = self.precision
        identity["deepspeed"] = self.engine.template_for_any_batch()
        return identity


def open_folder(task: Task, argv: list[str], hosts: list[str], device: str) -> Opening:
    """Open the run folder, on rank 0, and say how the run begins.

    Unless the run in the folder is finished, `config.json` is written, and the record of an earlier
    attempt is put aside.

    Args:
        hosts: the pods, each once, in the order of their ranks.
        device: what the ranks train on, `cuda` or `cpu`.

    Raises:
        UserError: the flags or the DeepSpeed configuration do not fit the data, or the folder holds
            another run.
    """
    arguments = task.arguments
    if task.data.dev is None and arguments.wants_best_model:
        raise UserError(
            f"{arguments.dataset_path}: has no dev split, which is needed to choose the best model"
        )
    task.engine.check_steps(processes.world_size(), _optimizer_steps(task))
    _check_same_run(task)
    opening = open_run(task.folder, task.identity(), again=arguments.resume == "never")
    if not opening.finished:
        config = _config(task, opening, argv, hosts, device)
        files.write_json(task.folder / record.CONFIG, config)
    return opening


def _optimizer_steps(task: Task) -> int:
    """Number of optimizer steps of the run: that of the flags, or as many as the epochs take."""
    arguments = task.arguments
    if arguments.max_steps > 0:
        return arguments.max_steps
    steps_per_epoch = math.ceil(len(task.data.train) / task.effective_batch_size())
    return math.ceil(arguments.epochs * steps_per_epoch)


def _config(
    task: Task, opening: Opening, argv: list[str], hosts: list[str], device: str
) -> dict[str, Any]:
    """What `config.json` says of a run; the other arguments are those of `open_folder`."""
    arguments = task.arguments
    data = task.data
    manifest = data.manifest
    ranks = processes.world_size()
    slots = slots_of_pod(ranks)
    prompt = None
    if task_or_unknown(manifest.task).has_answers:
        prompt = manifest.prompt
    dev_rows = None
    if data.dev is not None:
        dev_rows = len(data.dev)
    place = _place_of(arguments.dataset_path, task.folder)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "schema_version": record.SCHEMA_VERSION,
        "run_id": opening.run_id,
        "attempt": opening.attempt,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": manifest.task,
        "model_id": arguments.model_id,
        "init": _name_of_start(arguments.init),
        "technique": task.technique,
        "pods": ranks // slots,
        "slots": slots,
        "world_size": ranks,
        "precision": task.precision,
        "prompt": prompt,
        "per_device_train_batch_size": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "effective_batch_size": task.effective_batch_size(),
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "train_rows": len(data.train),
        "dev_rows": dev_rows,
        "dataset": {**place, "content_key": manifest.content_key},
        "deepspeed": task.engine.configuration,
        "identity": task.identity(),
        "argv": argv,
        "hosts": hosts,
        "versions": environment.versions(),
        "git_revision": environment.git_revision(Path(__file__).parent),
        "hardware": {**environment.hardware(), "gpus": gpus},
        "device": device,
    }


def _name_of_start(init: str) -> str:
    """What a record calls the weights that a run began with: `random`, `pretrained`, or the name of
    a run's folder.

    Args:
        init: the value of `--init`.
    """
    start = Path(init).resolve()
    if start.name.isdigit():
        # A run of a sweep, whose folder has a number for a name and its cell's folder around it.
        return f"{start.parent.name}/{start.name}"
    return start.name


def _place_of(data: str, folder: Path) -> dict[str, str]:
    """Where a run's data are, for its record.

    `path` is absolute. `relative_path` starts from the run folder: by it the data are found where
    both were moved together. A name that is no path here, such as a hub id, is `path` alone.

    Args:
        data: the data as the flag names them.
        folder: the run folder.
    """
    if not Path(data).exists():
        return {"path": data}
    absolute = Path(data).absolute()
    relative = os.path.relpath(absolute, folder.absolute())
    return {"path": str(absolute), "relative_path": relative}


def _check_same_run(task: Task) -> None:
    """Refuse a technique, or a number of rows per step, that is not that of the run in the folder.

    They are looked for before `open_run` looks for all other differences, since as a rule they come
    of another number of pods, and have a remedy of their own.
    """
    if task.arguments.resume == "never" or not is_claimed(task.folder):
        return
    before = record.read_config(task.folder)
    # Of these techniques each goes on from the checkpoints of the others.
    are_both_saved_whole = before.technique in SAVED_WHOLE and task.technique in SAVED_WHOLE
    if before.technique != task.technique and not are_both_saved_whole:
        raise UserError(
            f"{task.folder}: holds a run with technique {before.technique}, "
            f"but this call uses {task.technique}; "
            "give the run's own --deepspeed, or choose another --outputdir"
        )
    if before.effective_batch_size != task.effective_batch_size():
        rows = task.arguments.per_device_train_batch_size
        passes = task.arguments.gradient_accumulation_steps
        ranks = processes.world_size()
        remedy = _remedy_for_batch(before.effective_batch_size, ranks, rows)
        raise UserError(
            f"{task.folder}: holds a run with {before.effective_batch_size} rows per step, "
            f"but this call has {rows} rows x {passes} passes x {ranks} processes "
            f"= {task.effective_batch_size()}; {remedy}"
        )


def _remedy_for_batch(rows_per_step: int, ranks: int, rows: int) -> str:
    """The flags that give a number of rows per step on a number of processes; where there are
    none, the numbers of processes that divide it.

    Args:
        rows_per_step: rows of all processes in an optimizer step.
        rows: rows per pass of one process, as the flags have them. The remedy never exceeds them,
            since memory may not suffice for more.
    """
    batch = batch_on(ranks, rows_per_step, rows)
    if batch is not None:
        return f"give --{ROWS} {batch.rows} --{PASSES} {batch.passes}"
    divisors = []
    for number in range(1, min(rows_per_step, MOST_PROCESSES_OFFERED) + 1):
        if rows_per_step % number == 0:
            divisors.append(str(number))
    return (
        f"{rows_per_step} is not divisible by {ranks}; "
        f"use one of these numbers of processes: {', '.join(divisors)}"
    )


# The arguments that transformers gets.


def training_arguments(task: Task) -> TrainingArguments:
    """Make transformers' arguments, and connect the processes.

    Making the arguments may itself start the process group, so the engine prepares the process
    before, and connects the processes afterwards where the arguments have not.
    """
    arguments = task.arguments
    task.engine.prepare_process()
    settings = TrainingArguments(
        output_dir=str(task.folder / "checkpoints"),
        num_train_epochs=arguments.epochs,
        **{name: getattr(arguments, name) for name in UNCHANGED},
        **checkpointing_settings(arguments.gradient_checkpointing),
        **_evaluation_and_saving(arguments),
        **task.engine.settings(task.precision),
        fp16=task.precision == "fp16",
        # Curves are drawn by a callback of our own.
        report_to=[],
        # Rows are pairs of arrays, and have no columns that transformers could take away.
        remove_unused_columns=False,
        label_names=["labels"],
        **_device_settings(),
        # All parameters are used; looking for others would take time in each step.
        ddp_find_unused_parameters=False,
        logging_first_step=True,
        # The filter would wait for the device in each step, and log another number in place of NaN.
        logging_nan_inf_filter=False,
        # Steps are shown by a callback of our own.
        disable_tqdm=True,
    )
    _correct_device(settings)
    task.engine.connect()
    return settings


def checkpointing_settings(recompute: bool) -> dict[str, Any]:
    """Arguments of `TrainingArguments` that say whether activations are recomputed.

    They have the names of the installed version: after 5.17 transformers renamed
    `gradient_checkpointing` to `activation_checkpointing`. 5.17 does not know the new names, and
    5.23 warns of the old ones, which version 6 drops.
    """
    names = {argument.name for argument in fields(TrainingArguments)}
    kind = "gradient"
    if "activation_checkpointing" in names:
        kind = "activation"
    return {
        f"{kind}_checkpointing": recompute,
        f"{kind}_checkpointing_kwargs": {"use_reentrant": False},
    }


def _evaluation_and_saving(arguments: RunArguments) -> dict[str, Any]:
    """Arguments of `TrainingArguments` that say when to evaluate and save, and what is best."""
    return {
        "eval_strategy": STRATEGIES.get(arguments.eval_steps, "steps"),
        "eval_steps": arguments.eval_steps or None,
        "save_strategy": STRATEGIES.get(arguments.save_steps, "steps"),
        "save_steps": arguments.save_steps or UNUSED_SAVE_STEPS,
        "load_best_model_at_end": arguments.wants_best_model,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }


def _device_settings() -> dict[str, Any]:
    """Arguments of `TrainingArguments` that say what to train on, and how batches get there."""
    on_gpu = torch.cuda.is_available()
    accelerator_config = None
    if on_gpu:
        # A blocking copy would wait for all the work that the GPU still has to do.
        accelerator_config = {"non_blocking": True}
    return {
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "accelerator_config": accelerator_config,
    }


def _correct_device(settings: TrainingArguments) -> None:
    """Set the device to one GPU, or to the CPU without a number, in place."""
    if settings.n_gpu > 1:
        # transformers would copy the model to all GPUs that the process sees, by `DataParallel`,
        # and give each of them a whole batch.
        settings._n_gpu = 1
    if not torch.cuda.is_available():
        # On a CPU accelerate gives each of several processes an indexed device, such as `cpu:0`. A
        # run that resumes loads the optimizer's state onto it with transformers 5.17, which torch
        # refuses.
        settings._setup_devices = torch.device("cpu")
