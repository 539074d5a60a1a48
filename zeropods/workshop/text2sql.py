"""What notebooks 00 to 06 share: which data and model, where everything lies, how large a job it is.

Each setting can be given in a notebook's parameters cell, `Workshop(model="t5-small")`, or for all
notebooks in the environment, `ZEROPODS_MODEL=t5-small`; the cell wins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.techniques import technique_named
from zeropods.workshop.recipes import ROOT, RUNS, SAMPLE, at_ease, setting

if TYPE_CHECKING:
    from zeropods.data.prepare import Preparation
    from zeropods.sweep.matrix import Matrix


WIKISQL = "wikisql"
TINY = "t5-tiny"

TRAINING: dict[str, Any] = {"save_steps": 0, "per_device_train_batch_size": 32}
"""Flags of every training in a notebook."""
EMBEDDED: dict[str, Any] = {
    "init": "random",
    "epochs": 20,
    "max_train_seconds": 150,
    "learning_rate": 1e-3,
    "scaled_rates": True,
    "adam_beta2": 0.98,
    "per_device_train_batch_size": 16,
    "threads": 1,
    "warmup_steps": 50,
    "dropout": 0.0,
    "eval_steps": 500,
}
"""Flags for the model that is trained from nothing; the clock ends it where the epochs do not."""
PUBLISHED: dict[str, Any] = {"init": "pretrained", "epochs": 3, "logging_steps": 50}
"""Flags for the models that are fine-tuned: the original's three epochs, evaluated after each."""
PODS_OF_A_BATCH = 3
TINY_ON_PODS: dict[str, Any] = {"max_steps": 40, "max_train_seconds": None, "eval_steps": 0, "logging_steps": 1}
"""The embedded model on pods: a few steps, to be seen and compared; clocks of several pods differ."""
MEASURED: dict[str, Any] = {"max_steps": 30, "max_train_seconds": None, "eval_steps": 0, "logging_steps": 1}
"""A run of the matrix: long enough for a rate."""
MATRIX_PODS, MATRIX_SECONDS = 2, 600


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """The settings of notebooks 00 to 06."""

    dataset: str = field(default_factory=setting("dataset", SAMPLE))
    """`sample`, which is generated; `wikisql`, which is fetched; or a folder in WikiSQL's layout."""
    model: str = field(default_factory=setting("model", TINY))
    """`t5-tiny`, `t5-small`, `t5-large`, another hub id, or a model folder."""
    init: str | None = field(default_factory=setting("init", None))
    """`pretrained` or `random`; `t5-tiny` has no pretrained weights."""
    prompt: str = field(default_factory=setting("prompt", "schema"))
    """`schema` or `question`."""
    tokenizer: str | None = field(default_factory=setting("tokenizer", None))
    """A hub id, a folder or a spiece.model; the model's own if not given."""
    limit: int | None = field(default_factory=setting("limit", None, int))
    """Only the first N examples of each split."""
    steps: int | None = field(default_factory=setting("steps", None, int))
    """Optimizer steps; the model's own epochs or seconds if not given."""
    batch_size: int | None = field(default_factory=setting("batch_size", None, int))
    """Training rows a step and pod."""
    pods: int = field(default_factory=setting("pods", 3, int))
    """How many pods 03 starts."""
    repeats: int = field(default_factory=setting("repeats", 2, int))
    """How often the matrix of 03 runs each of its cells."""
    questions: int = field(default_factory=setting("questions", 600, int))
    """How many questions the trained model answers."""
    runs: Path = field(default_factory=setting("runs", RUNS, Path))
    """Where data, runs and summary lie. This and other paths are relative to the project's root."""

    def __post_init__(self) -> None:
        at_ease()

    def _repr_html_(self) -> str:
        from zeropods.tables import Table

        values = {name: "default" if value is None else value for name, value in asdict(self).items()}
        return Table.of_facts(values).to_html()

    @property
    def area(self) -> Path:
        """The folder of all that the notebooks make."""
        return ROOT / self.runs

    @property
    def data(self) -> Path:
        """The raw data set."""
        generated = self.dataset in (SAMPLE, WIKISQL)
        return self.area / "data" / self.dataset if generated else ROOT / self.dataset

    @property
    def prepared(self) -> Path:
        """The tokenized data set."""
        limit = f"-{self.limit}" if self.limit else ""
        return self.area / "prepared" / f"{self.data.name}-{Path(self.model).name}-{self.prompt}{limit}"

    @property
    def run_folder(self) -> Path:
        """The run of 02."""
        steps = f"-{self.steps}-steps" if self.steps else ""
        return self.area / f"{self.prepared.name}-one-pod{steps}"

    @property
    def summary_folder(self) -> Path:
        """The report of 06."""
        return self.area / "summary"

    @property
    def sweep_folder(self) -> Path:
        """The runs of the matrix in 03."""
        steps = f"-{self.steps}-steps" if self.steps else ""
        return self.area / f"{self.prepared.name}-sweep{steps}"

    @property
    def split(self) -> str:
        """The split whose questions are answered: `test` where there is one."""
        return "test" if (self.data / "test.jsonl").is_file() else "dev"

    @property
    def preparation(self) -> Preparation:
        """What 01 asks of `prepare`."""
        from zeropods.data.prepare import Preparation

        name = self.tokenizer or self.model
        tokenizer = str(ROOT / name) if (ROOT / name).exists() else name
        return Preparation(data=self.data, tokenizer=tokenizer, prompt=self.prompt, limit=self.limit)

    @property
    def training(self) -> dict[str, Any]:
        """Flags of `textsql_train.py`, the same on one pod and on many."""
        size = EMBEDDED if self.model == TINY else PUBLISHED
        flags = {**TRAINING, **size, "model_id": self.model, "dataset_path": self.prepared}
        if self.init is not None:
            flags["init"] = self.init
        if self.batch_size is not None:
            flags["per_device_train_batch_size"] = self.batch_size
        if self.steps is not None:
            flags |= {"max_steps": self.steps, "max_train_seconds": None, "eval_steps": 0}
        return flags

    def on_pods(self, technique: str, pods: int | None = None) -> dict[str, Any]:
        """What `launch` is given for a technique on some pods, all if not given: an effective batch on any number.

        The effective batch is that of three pods of `per_device_train_batch_size` rows.
        """
        flags = self.training
        pods = min(pods or self.pods, self.pods)
        effective = PODS_OF_A_BATCH * flags["per_device_train_batch_size"]
        if pods < 1 or effective % pods:
            raise UserError(f"{pods} pods: an effective batch of {effective} rows does not divide; choose batch_size")
        flags |= {"per_device_train_batch_size": effective // pods, "gradient_accumulation_steps": 1}
        if self.model == TINY:
            flags |= TINY_ON_PODS | {"max_steps": self.steps or TINY_ON_PODS["max_steps"]}
        folder = self.area / f"{self.prepared.name}-{technique}-{pods}-pods"
        return {
            **flags,
            "pods": pods,
            "deepspeed": ROOT / "dsconfig" / f"{technique_named(technique).profiled}.json",
            "outputdir": folder,
        }

    @property
    def matrix(self) -> Matrix:
        """One process beside ZeRO-1 and ZeRO-2 on two pods, `repeats` times, with the batch of `on_pods`."""
        from zeropods.pods.this_pod import slots
        from zeropods.sweep.reading import matrix_of

        flags = self.training | MEASURED | ({} if self.steps is None else {"max_steps": self.steps})
        effective = PODS_OF_A_BATCH * flags.pop("per_device_train_batch_size")
        pods = min(MATRIX_PODS, self.pods)
        document = {
            "model": flags.pop("model_id"),
            "prompt": self.prompt,
            "cells": [{"technique": "none", "pods": 1}, {"technique": ["zero1", "zero2"], "pods": pods}],
            "repeats": self.repeats,
            "slots": slots(),
            "timeout_seconds": MATRIX_SECONDS,
            "dataset_path": str(flags.pop("dataset_path")),
            "flags": {**flags, "effective_batch_size": effective},
        }
        return matrix_of(document, "workshop.matrix")

    def get_data(self) -> Path:
        """Generate or fetch the raw data set where it is not there yet; returns its folder."""
        if self.dataset == SAMPLE:
            from zeropods.data.sample import write_sample

            write_sample(self.data)
        elif self.dataset == WIKISQL:
            from zeropods.data.download import get

            get(WIKISQL, self.data)
        elif not self.data.is_dir():
            raise UserError(f"dataset {self.dataset!r}: no such folder; expected {SAMPLE}, {WIKISQL} or a folder")
        return self.data
