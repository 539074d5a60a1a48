"""A checked call, and what its run folder says about it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
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
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.dataset import TokenizedSplit, load_prepared
from zeropods.train.deepspeed_config import Config, check_config, effective_config, read_config, technique
from zeropods.train.precision import resolve_precision


@dataclass(frozen=True)
class Job:
    """A checked call: everything that can be known before processes meet."""

    arguments: TextToSQLArguments
    precision: str
    template: Config | None
    """The DeepSpeed configuration as it was read."""
    manifest: Manifest
    train: TokenizedSplit
    dev: TokenizedSplit | None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.arguments.run_folder

    @property
    def deepspeed(self) -> Config | None:
        """The configuration that is in effect: its output goes into the run folder."""
        return None if self.template is None else effective_config(self.template, self.folder)

    def effective_batch_size(self) -> int:
        """Rows of an optimizer step, over all ranks; to be asked once processes have met."""
        rows = self.arguments.per_device_train_batch_size * self.arguments.gradient_accumulation_steps
        return rows * processes.world_size()

    def identity(self) -> dict[str, Any]:
        """What must be equal for two calls to mean the same run."""
        return {
            **self.arguments.comparable(),
            "precision": self.precision,
            "deepspeed": self.template,
            "dataset_path": self.manifest.content_key,
        }


def check_call(arguments: TextToSQLArguments) -> Job:
    """Read what the arguments name, and refuse what contradicts itself."""
    precision = resolve_precision(arguments.precision)
    processes_asked = int(os.environ.get("WORLD_SIZE", "1"))
    config = None
    if arguments.deepspeed is not None:
        config = read_config(Path(arguments.deepspeed))
        flags = {**asdict(arguments), "precision": precision, "world_size": processes_asked}
        check_config(config, arguments.deepspeed, flags)
    if arguments.max_train_seconds and processes_asked > 1:
        raise UserError("--max_train_seconds: clocks of several processes differ; give --max_steps instead")
    manifest, train, dev = load_prepared(Path(arguments.dataset_path))
    return Job(arguments, precision, config, manifest, train, dev)


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
        "prompt": job.manifest.prompt,
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
