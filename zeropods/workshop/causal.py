"""What notebooks 11 to 14 share: which recipe, data and model, where everything lies, how large a job it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods import techniques
from zeropods.errors import UserError
from zeropods.files import new_folder
from zeropods.workshop.recipes import ROOT, RUNS, SAMPLE, Recipe, at_ease, recipe, setting

if TYPE_CHECKING:
    from zeropods.data.manifest import Manifest
    from zeropods.data.prepare_causal import CausalPreparation


# What notebooks 11 to 14 share: which recipe, data and model, where everything lies, how large a job it is.
#
# Each setting can be given in a notebook's parameters cell, `CausalWorkshop(recipe="published")`, or for all of them
# in
# the environment, `ZEROPODS_CAUSAL_RECIPE=published`; the cell wins, and what nobody says is the recipe's.

FETCHED = {"squad": "squad", "wikitext-2": "lm"}
"""Data sets that `zeropods data get` knows, and what they are for."""
FLAGS = {
    "steps": "max_train_steps",
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "epochs": "num_train_epochs",
    "precision": "precision",
    "init": "init",
}
"""Settings that are flags of the script."""
SCRIPT = ROOT / "causal_train.py"
TECHNIQUES = tuple(each.name for each in techniques.TECHNIQUES if each.is_alone or each.stage)


def _of_causal(name: str, default: Any, read: Any = str) -> Any:
    return field(default_factory=setting(f"causal_{name}", default, read))


@dataclass(frozen=True, kw_only=True)
class CausalWorkshop:
    """The settings of notebooks 11 to 14."""

    recipe: str = _of_causal("recipe", SAMPLE)
    """`sample`, which is small; `published`; `multi_node` and `eight_billion`, which are for text."""
    task: str = "squad"
    """`squad`: questions. `lm`: text."""
    model: str | None = _of_causal("model", None)
    """A hub id, a model folder, or with `init="random"` the name of a known shape."""
    init: str | None = _of_causal("init", None)
    """`pretrained` or `random`."""
    tokenizer: str | None = _of_causal("tokenizer", None)
    """A hub id, a folder, or `gpt-tiny`, which is trained on the data; the model's own if not given."""
    dataset: str | None = _of_causal("dataset", None)
    """`sample`, which is generated; `squad` or `wikitext-2`, which are fetched; a folder; or for text a hub id."""
    subset: int | None = _of_causal("subset", None, int)
    """Only the first N questions or documents of each split."""
    steps: int | None = _of_causal("steps", None, int)
    """Optimizer steps, in the place of epochs."""
    batch_size: int | None = _of_causal("batch_size", None, int)
    """Training rows a process and forward pass."""
    accumulation: int | None = _of_causal("accumulation", None, int)
    """Forward passes for an optimizer step of one process."""
    epochs: float | None = _of_causal("epochs", None, float)
    max_seq_length: int | None = _of_causal("max_seq_length", None, int)
    """squad: the most tokens of a row. lm: the tokens of a block."""
    loss_on: str | None = _of_causal("loss_on", None)
    """squad: `answer`, or `all` as in the published workshop."""
    precision: str | None = _of_causal("precision", None)
    """`fp32`, `bf16`, `fp16`, or `auto`."""
    slots: int = _of_causal("slots", 2, int)
    """How many processes 13 starts on this machine: its GPUs, or less."""
    pods: int = _of_causal("pods", 2, int)
    """How many pods 13 starts."""
    questions: int = _of_causal("questions", 100, int)
    """How many questions the trained model answers."""
    runs: Path = field(default_factory=lambda: setting("causal_runs", setting("runs", RUNS, Path)(), Path)())
    """Where data and runs lie; that of the other notebooks if not given. Paths are relative to the project's root."""

    def __post_init__(self) -> None:
        at_ease()
        _ = self.basis

    def _repr_html_(self) -> str:
        from zeropods.tables import Table

        values = asdict(self).items()
        return Table.of_facts({k: self._of_recipe(k) if v is None else v for k, v in values}).to_html()

    @cached_property
    def basis(self) -> Recipe:
        """What the recipe says."""
        return recipe(self.recipe, self.task)

    @property
    def area(self) -> Path:
        """The folder of all that the notebooks make."""
        return ROOT / self.runs

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
    def split(self) -> str:
        """The split whose questions are answered."""
        return "dev"

    @property
    def preparation(self) -> CausalPreparation:
        """What is asked of `prepare_causal`."""
        from zeropods.data.prepare_causal import CausalPreparation

        name = self.tokenizer or (self.basis.tokenizer if self.model is None else None) or self.model_id
        return CausalPreparation(
            task=self.task,
            data=self.data,
            tokenizer=str(ROOT / name) if (ROOT / name).exists() else name,
            max_seq_length=self.max_seq_length or self.basis.max_seq_length,
            loss_on=self.loss_on,
            limit=self.subset or self.basis.subset,
            dataset_config=self.basis.dataset_config if self.dataset is None else None,
        )

    @property
    def training(self) -> dict[str, Any]:
        """Flags of `causal_train.py` for one process."""
        given = {flag: getattr(self, name) for name, flag in FLAGS.items() if getattr(self, name) is not None}
        model = str(ROOT / self.model_id) if (ROOT / self.model_id).exists() else self.model_id
        return {**self.basis.flags, **given, "model_name_or_path": model, "data": self.prepared}

    def on(self, technique: str, slots: int = 1) -> dict[str, Any]:
        """A run on this machine, as `train_series` takes it."""
        where = "" if slots == 1 else f"-{slots}-slots"
        return {**self._divided(technique, slots, where), "slots": slots}

    def on_pods(self, technique: str, pods: int | None = None) -> dict[str, Any]:
        """A run on some pods with all their slots, all pods if not given, as `launch` takes it."""
        from zeropods.pods.this_pod import slots

        chosen = pods or self.pods
        return {**self._divided(technique, chosen * slots(), f"-{chosen}-pods"), "pods": chosen}

    def get_data(self) -> Path | str:
        """Generate or fetch the raw data set where it is not there yet; returns its folder, or its id at the hub."""
        name = self.dataset or self.basis.dataset
        if name in FETCHED and FETCHED[name] != self.task:
            raise UserError(f"dataset {name!r}: is for {FETCHED[name]}, this notebook is for {self.task}")
        if isinstance(self.data, str):
            return self.data
        if name == SAMPLE:
            _write_sample(self.task, self.data)
        elif name in FETCHED:
            from zeropods.data.download import get

            get(name, self.data)
        elif not self.data.is_dir():
            raise UserError(f"dataset {name!r}: no such folder; expected {SAMPLE}, {', '.join(FETCHED)} or a folder")
        return self.data

    def prepare(self) -> Manifest:
        """Get and tokenize the data where that is not done yet."""
        from zeropods.data.prepare import prepare
        from zeropods.tables import progress

        self.get_data()
        with progress("prepare", "rows") as bar:
            manifest, _ = prepare(self.preparation, self.prepared, bar.update)
        return manifest

    def _divided(self, technique: str, processes: int, where: str) -> dict[str, Any]:
        """Flags of a run on some processes: the effective batch stays what it is on one."""
        flags, steps = self.training, f"-{self.steps}-steps" if self.steps else ""
        rows = flags.get("per_device_train_batch_size", 4)
        effective = rows * flags.get("gradient_accumulation_steps", 4)
        if processes < 1 or effective % processes:
            raise UserError(f"{processes} processes: an effective batch of {effective} rows does not divide")
        each = effective // processes
        rows = rows if each % rows == 0 else each
        config = None if technique == "none" else ROOT / "dsconfig" / f"{technique}.json"
        return {
            **flags,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": each // rows,
            "deepspeed": config,
            "outputdir": self.area / self.prepared.name / f"{technique}{where}{steps}",
        }

    def _of_recipe(self, name: str) -> Any:
        """What the recipe says of a setting; the script's default where it says nothing."""
        said = self.basis.flags.get(FLAGS.get(name, name), getattr(self.basis, name, None))
        return "default" if said is None else said


def _write_sample(task: str, folder: Path) -> None:
    if task == "squad":
        from zeropods.data.causal_samples import write_squad_sample

        write_squad_sample(folder)
    else:
        from zeropods.data.causal_samples import write_text_sample

        write_text_sample(folder)


# The model of a workshop as it is before training, to be measured beside the trained one.


def untrained(workshop: CausalWorkshop) -> str | Path:
    """Where the model is read from before its first step: pretrained, its own place; random, a folder that is made.

    The random weights are those with which a run begins: the same shape and seed.
    """
    flags = workshop.training
    if flags.get("init", "pretrained") == "pretrained":
        return str(flags["model_name_or_path"])
    folder = workshop.area / workshop.prepared.name / "untrained"
    if not folder.is_dir():
        with new_folder(folder) as new:
            _write(workshop, new)
    return folder


def _write(workshop: CausalWorkshop, folder: Path) -> None:
    from transformers import AutoTokenizer

    from zeropods.train.arguments import CausalArguments
    from zeropods.train.causal_models import load_causal

    names = ("model_name_or_path", "init", "dropout", "seed")
    said = {name: workshop.training[name] for name in names if name in workshop.training}
    tokenizer = AutoTokenizer.from_pretrained(workshop.prepared / "tokenizer")
    model = load_causal(CausalArguments(**said, data=str(workshop.prepared)), tokenizer, precision="fp32")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
