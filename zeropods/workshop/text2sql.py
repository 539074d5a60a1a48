"""What notebooks 00 to 07 share: which data and model, where everything lies, how large a job it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.files import has_weights
from zeropods.plan.models import T5_TINY
from zeropods.techniques import DSCONFIG, technique_named
from zeropods.train.arguments import batch_on
from zeropods.workshop.settings import RUNS, SAMPLE, Flags, WorkshopSettings, path_or_id, setting

if TYPE_CHECKING:
    from zeropods.data.prepare import Preparation
    from zeropods.pods.cluster import Cluster
    from zeropods.sweep.matrix import Matrix
    from zeropods.sweep.results import Sweep

TINY = "t5-tiny"
TRAINING: Flags = {"save_steps": 0, "per_device_train_batch_size": 32}
"""Flags of every training in a notebook."""
EMBEDDED: Flags = {
    "init": "random",
    "epochs": 20,
    "max_train_seconds": 130,
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
PUBLISHED: Flags = {"init": "pretrained", "epochs": 3, "logging_steps": 50}
"""Flags for the models that are fine-tuned: the original's three epochs, evaluated after each."""
SHORT: Flags = {
    "max_train_seconds": None,
    "eval_steps": 0,
    "logging_steps": 1,
    "learning_rate": 1e-4,
    "warmup_steps": 0,
}
"""Flags of a run that goes on with a trained model for a few steps; clocks of several pods differ."""
TINY_STEPS, SHORT_STEPS = 10, 200
"""Steps of such a run: long enough for a rate."""
PODS_OF_A_BATCH = 3
MATRIX_SECONDS = 1_800
STATES_ROWS, STATES_STEPS, STATES_EXAMPLES = 1, 2, 6
"""Of the runs that show what ZeRO does to memory: rows per pod, optimizer steps, examples of each split."""


@dataclass(frozen=True, kw_only=True)
class Workshop(WorkshopSettings):
    """The settings of notebooks 00 to 07."""

    task = "text2sql"
    dataset: str = setting("dataset", default=SAMPLE)
    """`sample`, which is generated; `wikisql`, which is fetched; or a folder in WikiSQL's layout."""
    model: str = setting("model")
    """`t5-tiny`, `t5-small`, `t5-large`, another hub id, or a model folder; the first of `models` if not given."""
    models: str | tuple[str, ...] | None = setting("models")
    """Models to be seen side by side, in one text with commas between them; a notebook runs with one at a time."""
    init: str | None = setting("init")
    """`pretrained` or `random`; `t5-tiny` has no pretrained weights."""
    prompt: str = setting("prompt", default="schema")
    """`schema` or `question`."""
    tokenizer: str | None = setting("tokenizer")
    """A hub id, a folder or a spiece.model; the model's own if not given."""
    limit: int | None = setting("limit", read=int)
    """Only the first N examples of each split."""
    steps: int | None = setting("steps", read=int)
    """Number of optimizer steps; the model's own epochs or seconds if not given."""
    batch_size: int | None = setting("batch_size", read=int)
    """Number of training rows per step and pod."""
    pods: int = setting("pods", default=3, read=int)
    """Number of pods that 03 starts."""
    repeats: int = setting("repeats", default=3, read=int)
    """How often the matrix of 03 runs each of its cells."""
    states_model: str = setting("states_model", default="t5-efficient-mini")
    """Shape of the model, with random weights, whose memory 03 shows under each stage of ZeRO."""
    questions: int = setting("questions", default=400, read=int)
    """Number of questions that each trained model answers."""
    runs: Path = setting("runs", default=RUNS, read=Path)  # noqa: RUF009
    """Where data, runs and summary lie. This and other paths are relative to the project's root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.models.replace(",", " ").split() if isinstance(self.models, str) else self.models
        object.__setattr__(self, "models", tuple(names or ()) or None)
        object.__setattr__(self, "model", self.model or (*(names or ()), TINY)[0])

    @property
    def each(self) -> tuple[Workshop, ...]:
        """These settings for each of `models`, or as they are: the runs of all have one area and one summary."""
        return tuple(replace(self, model=name) for name in self.models or (self.model,))

    @property
    def data(self) -> Path:
        """The folder of the raw data set."""
        made = self.area / "data" / self.dataset
        return made if self.dataset in (SAMPLE, "wikisql") else Path(path_or_id(self.dataset))

    @property
    def prepared(self) -> Path:
        """The tokenized data set."""
        limit = f"-{self.limit}" if self.limit else ""
        return self.area / "prepared" / f"{self.data.name}-{Path(self.model).name}-{self.prompt}{limit}"

    @property
    def run_folder(self) -> Path:
        """The run of 02."""
        return self._folder("one-pod")

    @property
    def summary_folder(self) -> Path:
        """The report of 06."""
        return self.area / "summary"

    @property
    def sweep_folder(self) -> Path:
        """The runs of the matrix in 03."""
        return self._folder("sweep")

    @property
    def compared(self) -> list[Path]:
        """The first run of each cell of the matrix in 03, as far as they have answered questions."""
        folders = (self.sweep_folder / cell.name / "1" for cell in self.matrix.cells)
        return [folder for folder in folders if (folder / f"predictions.{self.split}.jsonl").is_file()]

    @property
    def split(self) -> str:
        """The split whose questions are answered: `test` where there is one."""
        return "test" if (self.data / "test.jsonl").is_file() else "dev"

    @property
    def preparation(self) -> Preparation:
        """What 01 asks of `prepare`."""
        from zeropods.data.prepare import Preparation

        tokenizer = path_or_id(self.tokenizer or self.model)
        return Preparation(data=self.data, tokenizer=tokenizer, prompt=self.prompt, limit=self.limit)

    @property
    def training(self) -> Flags:
        """Flags of `textsql_train.py`, the same on one pod and on many."""
        size = EMBEDDED if self.model in T5_TINY else PUBLISHED
        given = {"init": self.init, "per_device_train_batch_size": self.batch_size}
        flags = {**TRAINING, **size, "model_id": self.model, "dataset_path": self.prepared}
        flags |= {name: value for name, value in given.items() if value is not None}
        if self.steps is not None:
            flags |= {"max_steps": self.steps, "max_train_seconds": None, "eval_steps": 0}
        return flags

    @property
    def going_on(self) -> Flags:
        """Flags of a run of a few steps that begins with the model of 02, so that it can answer questions."""
        if not has_weights(self.run_folder / "model"):
            raise UserError(f"{self.run_folder}: no trained model is there yet; run notebook 02 first")
        steps = self.steps or (TINY_STEPS if self.model in T5_TINY else SHORT_STEPS)
        return self.training | SHORT | {"init": self.run_folder, "max_steps": steps}

    def on_pods(self, technique: str) -> Flags:
        """What `launch` is given for a profiled run on all pods.

        The effective batch is that of three pods of `per_device_train_batch_size` rows, on any number of pods.
        """
        flags = self.going_on
        effective = PODS_OF_A_BATCH * flags["per_device_train_batch_size"]
        same = batch_on(self.pods, effective, effective)
        if same is None:
            raise UserError(
                f"{self.pods} pods: an effective batch of {effective} rows does not divide; choose batch_size"
            )
        return {
            **flags,
            **same.flags,
            "pods": self.pods,
            "deepspeed": DSCONFIG / f"{technique_named(technique).profiled}.json",
            "outputdir": self._beside("profiled") / f"{self.prepared.name}-{technique}-{self.pods}-pods",
        }

    @property
    def matrix(self) -> Matrix:
        """One process, and on all pods DDP, ZeRO-1 and ZeRO-3 with offload, and ZeRO-1 on one pod less.

        Each `repeats` times, with the batch of `on_pods`, and scored.
        """
        flags = self.going_on
        effective = PODS_OF_A_BATCH * flags.pop("per_device_train_batch_size")
        fewer = [{"technique": "zero1", "pods": self.pods - 1}] if self.pods > 2 else []
        return self._matrix_of(
            {
                "model": flags.pop("model_id"),
                "repeats": self.repeats,
                "questions": self.questions,
                "dataset_path": str(flags.pop("dataset_path")),
                "flags": {**flags, "init": str(self.run_folder), "effective_batch_size": effective},
            },
            ["ddp", "zero1", "zero3_offload"],
            *fewer,
        )

    @property
    def states_folder(self) -> Path:
        """The runs of `states_matrix`."""
        return self._beside("states") / f"{self._few.prepared.name}-{Path(self.states_model).name}"

    @property
    def states_matrix(self) -> Matrix:
        """One process beside ZeRO-1, 2 and 3 on all pods: a few steps of a model that is large enough to be seen."""
        from zeropods.pods.hostfile import own_slots

        processes = self.pods * own_slots()
        flags = {"init": "random", "precision": "fp32", "max_steps": STATES_STEPS, "eval_steps": 0, "save_steps": 0}
        return self._matrix_of(
            {
                "model": self.states_model,
                "dataset_path": str(self._few.prepared),
                "flags": {**flags, "logging_steps": 1, "effective_batch_size": STATES_ROWS * processes},
            },
            ["zero1", "zero2", "zero3"],
        )

    def _matrix_of(self, document: Flags, techniques: list[str], *cells: Flags) -> Matrix:
        """One process beside techniques on all pods, and further cells."""
        from zeropods.pods.hostfile import own_slots
        from zeropods.sweep.matrix import matrix_of

        common = {"prompt": self.prompt, "slots": own_slots(), "timeout_seconds": MATRIX_SECONDS}
        compared = [{"technique": "none", "pods": 1}, {"technique": techniques, "pods": self.pods}, *cells]
        return matrix_of({**common, "cells": compared, **document}, "workshop.matrix")

    def measure_states(self, cluster: Cluster) -> Sweep:
        """Run `states_matrix`, on a few examples that are prepared first."""
        from zeropods.data.prepare import prepare
        from zeropods.sweep.run import run_sweep

        prepare(self._few.preparation, self._few.prepared)
        return run_sweep(self.states_matrix, self.states_folder, cluster)

    @property
    def _few(self) -> Workshop:
        """The same for every model, whose own tokenizer random weights do not need."""
        return replace(self, model=TINY, tokenizer=None, limit=min(self.limit or STATES_EXAMPLES, STATES_EXAMPLES))

    def get_data(self) -> Path:
        """Generate or fetch the raw data set where it is not there yet; returns its folder."""
        return self._get_data(self.dataset, self.data)

    def _beside(self, what: str) -> Path:
        """A folder of runs that the summary of 06 leaves out: they are profiled, or of another model."""
        return self.area.with_name(f"{self.area.name}-{what}")

    def _folder(self, what: str) -> Path:
        steps = f"-{self.steps}-steps" if self.steps else ""
        return self.area / f"{self.prepared.name}-{what}{steps}"
