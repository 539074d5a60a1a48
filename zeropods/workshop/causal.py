"""What notebooks 11 to 14 share: which recipe, data and model, where everything lies, how large a job it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zeropods.errors import UserError
from zeropods.files import new_folder
from zeropods.techniques import DSCONFIG
from zeropods.train.arguments import PASSES, ROWS, batch_on
from zeropods.workshop.settings import FETCHED, ROOT, RUNS, SAMPLE, Flags, WorkshopSettings, path_or_id, setting

if TYPE_CHECKING:
    from zeropods.data.manifest import Manifest
    from zeropods.data.prepare import Preparation

FLAGS = {
    "steps": "max_train_steps",
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "epochs": "num_train_epochs",
    "precision": "precision",
    "init": "init",
}
"""Settings that are flags of `causal_train.py`."""
TECHNIQUES = ("none", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")
"""The techniques that notebook 12 compares."""


@dataclass(frozen=True, kw_only=True)
class JobRecipe:
    """A job of `recipes.yaml`: a model, a data set, and how the one is trained on the other."""

    model: str
    dataset: str
    """`sample`, which is generated; `squad` or `wikitext-2`, which are fetched; or a data set at the hub."""
    max_seq_length: int
    flags: Flags
    technique: str = "none"
    tokenizer: str | None = None
    """The model's own if not given."""
    dataset_config: str | None = None
    subset: int | None = None


def read_recipes() -> dict[str, dict[str, JobRecipe]]:
    """All recipes by name, then by task."""
    document = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8"))
    return {name: {task: JobRecipe(**job) for task, job in tasks.items()} for name, tasks in document.items()}


@dataclass(frozen=True, kw_only=True)
class CausalWorkshop(WorkshopSettings):
    """The settings of notebooks 11 to 14; in the environment they are ZEROPODS_CAUSAL_RECIPE and so on.

    What nobody says is the recipe's.
    """

    recipe: str = setting("causal_recipe", default=SAMPLE)
    """`sample`, which is small; `published`; `multi_node` and `eight_billion`, which are for text."""
    task: str = "squad"
    """`squad`: questions. `lm`: text."""
    model: str | None = setting("causal_model")
    """A hub id, a model folder, or with `init="random"` the name of a known shape."""
    init: str | None = setting("causal_init")
    """`pretrained` or `random`."""
    tokenizer: str | None = setting("causal_tokenizer")
    """A hub id, a folder, or `gpt-tiny`, which is trained on the data; the model's own if not given."""
    dataset: str | None = setting("causal_dataset")
    """`sample`, which is generated; `squad` or `wikitext-2`, which are fetched; a folder; or for text a hub id."""
    subset: int | None = setting("causal_subset", read=int)
    """Only the first N questions or documents of each split."""
    steps: int | None = setting("causal_steps", read=int)
    """Number of optimizer steps, in the place of epochs."""
    batch_size: int | None = setting("causal_batch_size", read=int)
    """Number of training rows per process and forward pass."""
    accumulation: int | None = setting("causal_accumulation", read=int)
    """Number of forward passes per optimizer step of one process."""
    epochs: float | None = setting("causal_epochs", read=float)
    max_seq_length: int | None = setting("causal_max_seq_length", read=int)
    """squad: the most tokens of a row. lm: the tokens of a block."""
    loss_on: str | None = setting("causal_loss_on")
    """squad: `answer`, or `all` as in the published workshop."""
    precision: str | None = setting("causal_precision")
    """`fp32`, `bf16`, `fp16`, or `auto`."""
    slots: int = setting("causal_slots", default=2, read=int)
    """Number of processes that 13 starts on this machine: its GPUs, or less."""
    pods: int = setting("causal_pods", default=2, read=int)
    """Number of pods that 13 starts."""
    questions: int = setting("causal_questions", default=100, read=int)
    """Number of questions that the trained model answers."""
    runs: Path = setting("causal_runs", "runs", default=RUNS, read=Path)  # noqa: RUF009
    """Where data and runs lie; that of the other notebooks if not given. Paths are relative to the project's root."""

    split = "dev"
    """The split whose questions are answered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.basis

    def _default(self, name: str) -> Any:
        """The recipe's value; the script's own where the recipe has none."""
        value = self.basis.flags.get(FLAGS.get(name, name), getattr(self.basis, name, None))
        return "default" if value is None else value

    @cached_property
    def basis(self) -> JobRecipe:
        """The recipe's job of this task."""
        recipes = read_recipes()
        if self.recipe not in recipes:
            raise UserError(f"recipe {self.recipe!r}; expected {', '.join(recipes)}")
        tasks = recipes[self.recipe]
        if self.task not in tasks:
            raise UserError(f"recipe {self.recipe!r}: is for {', '.join(tasks)}, not for {self.task!r}")
        return tasks[self.task]

    @property
    def data(self) -> Path | str:
        """The raw data set: a folder, or its id at the hub."""
        name = self.dataset or self.basis.dataset
        if name == SAMPLE or name in FETCHED:
            return self.area / "data" / (f"{SAMPLE}-{self.task}" if name == SAMPLE else name)
        return ROOT / name if (ROOT / name).exists() or self.task == "squad" else name

    @property
    def prepared(self) -> Path:
        """The tokenized data set."""
        wanted = self.preparation
        subset = f"-{wanted.limit}" if wanted.limit else ""
        named = f"{Path(self.data).name}-{Path(self.model_id).name}-{wanted.max_seq_length}-{wanted.loss}{subset}"
        return self.area / "prepared" / named

    @property
    def model_id(self) -> str:
        """The model."""
        return self.model or self.basis.model

    @property
    def preparation(self) -> Preparation:
        """What is asked of `prepare`."""
        from zeropods.data.prepare import Preparation

        name = self.tokenizer or (self.basis.tokenizer if self.model is None else None) or self.model_id
        return Preparation(
            task=self.task,
            data=self.data,
            tokenizer=path_or_id(name),
            max_seq_length=self.max_seq_length or self.basis.max_seq_length,
            loss_on=self.loss_on,
            limit=self.subset or self.basis.subset,
            dataset_config=self.basis.dataset_config if self.dataset is None else None,
        )

    @property
    def training(self) -> Flags:
        """Flags of `causal_train.py` for one process."""
        given = {flag: getattr(self, name) for name, flag in FLAGS.items() if getattr(self, name) is not None}
        return {**self.basis.flags, **given, "model_name_or_path": path_or_id(self.model_id), "data": self.prepared}

    def on(self, technique: str, slots: int = 1) -> Flags:
        """A run on this machine, as `train_series` takes it."""
        return {**self._divided(technique, slots, "" if slots == 1 else f"-{slots}-slots"), "slots": slots}

    def on_pods(self, technique: str, pods: int | None = None) -> Flags:
        """A run on some pods with all their slots, all pods if not given, as `launch` takes it."""
        from zeropods.pods.hostfile import own_slots

        chosen = pods or self.pods
        return {**self._divided(technique, chosen * own_slots(), f"-{chosen}-pods"), "pods": chosen}

    def get_data(self) -> Path | str:
        """Generate or fetch the raw data set where it is not there yet; returns its folder, or its id at the hub."""
        data = self.data
        return data if isinstance(data, str) else self._get_data(self.dataset or self.basis.dataset, data)

    def prepare(self) -> Manifest:
        """Get and tokenize the data where that is not done yet."""
        from zeropods.data.prepare import prepare
        from zeropods.tables import progress

        self.get_data()
        with progress("prepare", "rows") as bar:
            manifest, _ = prepare(self.preparation, self.prepared, bar.update)
        return manifest

    def untrained(self) -> str | Path:
        """Where the model is read from before its first step: its own place; with random weights, a folder.

        The folder is made with the weights with which a run begins: the same shape and seed.
        """
        if self.training.get("init", "pretrained") == "pretrained":
            return str(self.training["model_name_or_path"])
        folder = self.area / self.prepared.name / "untrained"
        if not folder.is_dir():
            with new_folder(folder) as new:
                self._write_untrained(new)
        return folder

    def _write_untrained(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        from zeropods.train.arguments import CausalArguments
        from zeropods.train.causal import load_causal

        names = ("model_name_or_path", "init", "dropout", "seed")
        flags = {name: self.training[name] for name in names if name in self.training}
        tokenizer = AutoTokenizer.from_pretrained(self.prepared / "tokenizer")
        model = load_causal(CausalArguments(**flags, data=str(self.prepared)), tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _divided(self, technique: str, processes: int, where: str) -> Flags:
        """Flags of a run on some processes: the effective batch stays what it is on one."""
        flags, steps = self.training, f"-{self.steps}-steps" if self.steps else ""
        rows = flags.get(ROWS, 4)
        effective = rows * flags.get(PASSES, 4)
        same = batch_on(processes, effective, rows)
        if same is None:
            raise UserError(f"{processes} processes: an effective batch of {effective} rows does not divide")
        return {
            **flags,
            **same.flags,
            "deepspeed": None if technique == "none" else DSCONFIG / f"{technique}.json",
            "outputdir": self.area / self.prepared.name / f"{technique}{where}{steps}",
        }
