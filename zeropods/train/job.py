"""A checked call, and what its run folder says about it."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from zeropods.data.manifest import Manifest
from zeropods.errors import UserError
from zeropods.measure import environment
from zeropods.measure.run_folder import Opening
from zeropods.measure.schema import SCHEMA_VERSION
from zeropods.train import processes
from zeropods.train.dataset import TokenizedSplit
from zeropods.train.deepspeed_config import (
    Config,
    check_config,
    effective_config,
    read_config,
    technique,
    without_batch,
)
from zeropods.train.precision import resolve_precision
from zeropods.train.recipe import Prepared, Recipe, recipe_of
from zeropods.train.run_arguments import RunArguments

DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Flags that divide the rows of a step over processes and passes."""


@dataclass(frozen=True)
class Job:
    """A checked call: everything that can be known before processes meet."""

    arguments: RunArguments
    recipe: Recipe
    precision: str
    template: Config | None
    """The DeepSpeed configuration as it was read."""
    data: Prepared | None
    """None for raw data that the run itself is going to prepare."""

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
        flags = {key: value for key, value in self.recipe.settings(self.prepared).items() if key not in DIVISION}
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
            processes.on_rank_zero(self.recipe.prepare)
            job = replace(self, data=self.recipe.prepared())
        processes.on_rank_zero(lambda: _check_data(job))
        return job


def check_call(arguments: RunArguments) -> Job:
    """Read what the arguments name, and refuse what contradicts itself."""
    precision = resolve_precision(arguments.precision, arguments.fp16_fault, arguments.model_id)
    processes_asked = int(os.environ.get("WORLD_SIZE", "1"))
    config = None
    if arguments.deepspeed is not None:
        config = read_config(Path(arguments.deepspeed))
        check_config(config, arguments.deepspeed, _flags(arguments, precision, processes_asked), arguments.fp16_fault)
    if arguments.max_train_seconds and processes_asked > 1:
        raise UserError("--max_train_seconds: clocks of several processes differ; give --max_steps instead")
    recipe = recipe_of(arguments)
    recipe.check(precision)
    return Job(arguments, recipe, precision, config, recipe.found())


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
        "technique": technique(job.deepspeed, ranks),
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
