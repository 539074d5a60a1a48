"""What the notebooks share: their data and model, where everything lies, and how large a job is.

`Workshop` is for text-to-SQL (00 to 07), `CausalWorkshop` for causal models (11 to 14). A setting
can be given in a notebook's parameters cell, `model = "t5-small"`, which papermill sets too, or for
all notebooks in the environment, `ZEROPODS_MODEL=t5-small`; the cell wins.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from zeropods.chatter import without_chatter
from zeropods.data.download import get
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.wikisql import has_split
from zeropods.errors import UserError
from zeropods.files import has_weights
from zeropods.outputs import new_folder
from zeropods.plan.known_models import T5_TINY
from zeropods.pods.start import slots_per_pod
from zeropods.programs import in_kernel, wait_passively
from zeropods.shipped_models import SHIPPED
from zeropods.sweep.matrix import Matrix, matrix_of
from zeropods.tables import Table, progress
from zeropods.tasks import TASKS
from zeropods.techniques import DSCONFIG, NAMES, technique_named
from zeropods.train.flags import PASSES, PROJECT, ROWS, WORDS, CausalArguments, batch_on

if TYPE_CHECKING:
    from zeropods.data.manifest import Manifest
    from zeropods.pods.cluster import Cluster
    from zeropods.sweep.results import Sweep

ROOT = PROJECT
Flags = dict[str, Any]
"""Flags of a training script, or the arguments of `train` and `launch` for a run."""
EMBEDDED_SAMPLE = "sample"
"""Name of the data set that is generated here."""
RUNS = Path("runs/notebooks")
"""Where data and runs lie unless a setting says otherwise, relative to the project's root."""
FETCHED = {task.dataset: task.name for task in TASKS.values() if task.dataset is not None}
"""Data sets that `zeropods data get` knows, and the task of each."""


def setting(*names: str, default: Any = None, read: Callable[[str], Any] = str) -> Any:
    """A dataclass field whose default is read from the environment when an instance is made.

    Args:
        names: names of variables without the `ZEROPODS_`, in lower case; the first that is set, and
            not empty, gives the value.
        default: the value where none of them is set.
        read: converts the variable's text; where it raises `ValueError`, making the instance raises
            `UserError`.
    """

    def value() -> Any:
        for name in names:
            variable = f"ZEROPODS_{name.upper()}"
            text = os.environ.get(variable)
            if not text:
                continue
            try:
                return read(text)
            except ValueError:
                expected = WORDS.get(read, "another value")
                raise UserError(f"{variable}: {text!r}; expected {expected}") from None
        return default

    return field(default_factory=value)


class WorkshopSettings:
    """Base class of a notebook's settings, which are a dataclass.

    It shows them as a table and knows their folders.
    """

    runs: Path
    """Where data and runs lie, relative to the project's root."""
    task: str
    dataset: Any
    """Name of the data set; None for that of `basis`."""
    basis: Any
    """The recipe's job; only where settings may be left to a recipe."""
    data: Any
    """The raw data set: a folder, or its id at the hub."""

    def __post_init__(self) -> None:
        # A notebook makes its settings before torch is loaded, so that threads can still be told to
        # sleep while they wait. Other libraries' progress bars are left out: ours is enough.
        wait_passively()
        without_chatter()
        if in_kernel():
            for library in ("HF_HUB", "HF_DATASETS"):
                os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
            warnings.filterwarnings("ignore", message="IProgress not found")

    @classmethod
    def of(cls, variables: Mapping[str, object], **given: Any) -> Self:
        """The settings that are among a notebook's variables, set by its parameters cell or by
        papermill.

        A variable that is None, or that the notebook has used for something else than a text, a
        number or a path, leaves the setting to the environment.

        Args:
            given: settings that win over the variables.
        """
        settings = {}
        for setting_field in fields(cls):  # type: ignore[arg-type]
            value = variables.get(setting_field.name)
            if isinstance(value, str | int | float | Path):
                settings[setting_field.name] = value
        return cls(**{**settings, **given})

    def _repr_html_(self) -> str:
        facts = {}
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            facts[name] = self._default(name) if value is None else value
        return Table.of_facts(facts).to_html()

    def _default(self, name: str) -> Any:
        """The text that is shown for a setting that was not given."""
        return "default"

    @property
    def area(self) -> Path:
        """The folder of everything that the notebooks make."""
        return ROOT / self.runs

    def get_data(self) -> Any:
        """Generate or fetch the raw data set if it does not exist yet; one at the hub is left
        there.

        Returns:
            Its folder, or its id at the hub.

        Raises:
            UserError: the data set is for another task, or there is none of that name.
        """
        name = self.dataset or self.basis.dataset
        folder = self.data
        is_on_hub = isinstance(folder, str)
        if is_on_hub:
            return folder
        if FETCHED.get(name, self.task) != self.task:
            fault = f"is for {FETCHED[name]}, this notebook is for {self.task}"
            raise UserError(f"dataset {name!r}: {fault}")
        if name == EMBEDDED_SAMPLE:
            write_sample(folder, task=self.task)
        elif name in FETCHED:
            get(name, folder)
        elif not folder.is_dir():
            names_of_task = [known for known, task in FETCHED.items() if task == self.task]
            expected = ", ".join([EMBEDDED_SAMPLE, *names_of_task])
            raise UserError(f"dataset {name!r}: no such folder; expected {expected} or a folder")
        return folder


def path_or_id(name: str) -> str:
    """The full path of a file or folder of the project; a name of anything else, such as a hub id,
    stays as it is."""
    return str(ROOT / name) if (ROOT / name).exists() else name


# Text-to-SQL: notebooks 00 to 07.

TINY = "t5-tiny"
"""The model of the notebooks unless a setting says otherwise."""
TRAINING: Flags = {"save_steps": 0, "per_device_train_batch_size": 32}
"""Flags of every training in a notebook."""
COPIES = 2
"""Number of rows that are prepared of each question for the base, the model with trained weights
that comes with the package. All but one of them are varied, so that the base gets better at tables
that it does not know. With 4 it answers dev no better after the same number of steps."""
FROM_BASE: Flags = {
    "init": "pretrained",
    "max_steps": 600,
    "per_device_train_batch_size": 16,
    "learning_rate": 4e-4,
    "scaled_rates": True,
    "adam_beta2": 0.98,
    "threads": 2,
    "warmup_steps": 20,
    "dropout": 0.0,
    "eval_steps": 300,
}
"""Flags for a model that goes on from the base that comes with the package. It ends after its
steps, and has a fixed number of threads, so that its accuracy does not depend on how busy the
machine is."""
FROM_RANDOM: Flags = {
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
"""Flags for a tiny model that is trained from random weights; the time limit ends training if the
epochs do not."""
FINE_TUNING: Flags = {"init": "pretrained", "epochs": 3, "logging_steps": 50}
"""Flags for the models that are fine-tuned: the three epochs of the original, with an evaluation
after each."""
SHORT: Flags = {
    "max_train_seconds": None,
    "eval_steps": 0,
    "logging_steps": 1,
    "learning_rate": 1e-4,
    "warmup_steps": 0,
}
"""Flags of a run of a few steps from a trained model; it has no time limit, since the clocks of
pods differ."""
STEPS_OF_TINY, STEPS_OF_OTHERS = 10, 200
"""Number of steps of such a run, for tiny models and for others: enough to measure a rate."""
PODS_OF_A_BATCH = 3
"""The effective batch of runs on pods has the rows of this number of pods, however many there are,
so that all of them train alike."""
MATRIX_SECONDS = 1_800
"""Time limit of each run of a matrix."""
STATES_ROWS, STATES_STEPS, STATES_EXAMPLES = 1, 2, 6
"""Rows per process, optimizer steps and examples per split of the runs that show what ZeRO does to
memory."""


@dataclass(frozen=True, kw_only=True)
class Workshop(WorkshopSettings):
    """The settings of notebooks 00 to 07."""

    task = "text2sql"
    dataset: str = setting("dataset", default=EMBEDDED_SAMPLE)
    """`sample`, which is generated; `wikisql`, which is fetched; or a folder in WikiSQL's
    layout."""
    model: str = setting("model")
    """`t5-tiny`, `t5-small`, `t5-large`, another hub id, or a model folder; the first of `models`
    if not given."""
    models: str | tuple[str, ...] | None = setting("models")
    """Models to compare side by side, in one text with commas between them; a notebook runs with
    one at a time."""
    init: str | None = setting("init")
    """`pretrained` or `random`."""
    prompt: str = setting("prompt", default="schema")
    """`schema` or `question`."""
    tokenizer: str | None = setting("tokenizer")
    """A hub id, a folder or a spiece.model; the model's own if not given."""
    limit: int | None = setting("limit", read=int)
    """Number of examples to take from the start of each split; all if not given."""
    steps: int | None = setting("steps", read=int)
    """Number of optimizer steps; the model's own epochs or seconds if not given."""
    batch_size: int | None = setting("batch_size", read=int)
    """Number of training rows per step and pod."""
    pods: int = setting("pods", default=3, read=int)
    """Number of pods that 03 starts."""
    repeats: int = setting("repeats", default=3, read=int)
    """Number of times that the matrix of 03 runs each of its cells."""
    states_model: str = setting("states_model", default="t5-efficient-mini")
    """Shape of the model, with random weights, whose memory 03 shows under each stage of ZeRO."""
    questions: int = setting("questions", default=600, read=int)
    """Number of questions that each trained model answers."""
    runs: Path = setting("runs", default=RUNS, read=Path)  # noqa: RUF009
    """Where data, runs and summary lie. This and other paths are relative to the project's root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.models, str):
            names = tuple(self.models.replace(",", " ").split())
        else:
            names = tuple(self.models or ())
        first = names[0] if names else TINY
        # The dataclass is frozen for everybody else.
        object.__setattr__(self, "models", names or None)
        object.__setattr__(self, "model", self.model or first)

    @property
    def each(self) -> tuple[Workshop, ...]:
        """Settings like these for each of `models`, or for `model` alone.

        The runs of all of them share one area and one summary.
        """
        return tuple(replace(self, model=name) for name in self.models or (self.model,))

    @property
    def data(self) -> Path:
        """The folder of the raw data set."""
        if self.dataset in (EMBEDDED_SAMPLE, "wikisql"):
            return self.area / "data" / self.dataset
        return Path(path_or_id(self.dataset))

    @property
    def prepared(self) -> Path:
        """The folder of the tokenized data set."""
        name = f"{self.data.name}-{Path(self.model).name}-{self.prompt}"
        if self.limit:
            name = f"{name}-{self.limit}"
        return self.area / "prepared" / name

    @property
    def run_folder(self) -> Path:
        """The folder of the run of notebook 02."""
        return self._folder("one-pod")

    @property
    def summary_folder(self) -> Path:
        """The folder of the report of notebook 06."""
        return self.area / "summary"

    @property
    def sweep_folder(self) -> Path:
        """The folder of the runs of the matrix in notebook 03."""
        return self._folder("sweep")

    @property
    def compared(self) -> list[Path]:
        """The folders of the first run of each cell of the matrix in 03.

        Runs that have answered no questions are left out.
        """
        folders = []
        for cell in self.matrix.cells:
            folder = self.sweep_folder / cell.name / "1"
            if (folder / f"predictions.{self.split}.jsonl").is_file():
                folders.append(folder)
        return folders

    @property
    def split(self) -> str:
        """The split whose questions are answered: `test` where there is one."""
        return "test" if has_split(self.data, "test") else "dev"

    @property
    def preparation(self) -> Preparation:
        """The preparation that notebook 01 asks `prepare` for."""
        tokenizer = path_or_id(self.tokenizer or self.model)
        return Preparation(
            data=self.data,
            tokenizer=tokenizer,
            prompt=self.prompt,
            limit=self.limit,
            copies=COPIES if self.model in SHIPPED else 1,
        )

    @property
    def training(self) -> Flags:
        """Flags of `textsql_train.py`, the same on one pod and on many."""
        flags = {
            **TRAINING,
            **self._flags_of_model,
            "model_id": self.model,
            "dataset_path": self.prepared,
        }
        if self.init is not None:
            flags["init"] = self.init
        if self.batch_size is not None:
            flags[ROWS] = self.batch_size
        if self.steps is not None:
            flags |= {"max_steps": self.steps, "max_train_seconds": None, "eval_steps": 0}
        return flags

    @property
    def _flags_of_model(self) -> Flags:
        """Flags of training that depend on the model's size, and on the weights it starts from."""
        if self.model in SHIPPED and self.init != "random":
            return FROM_BASE
        if self.model in T5_TINY:
            return FROM_RANDOM
        return FINE_TUNING

    @property
    def going_on(self) -> Flags:
        """Flags of a run of a few steps that begins with the model that 02 has trained, so that it
        answers questions well enough to be compared.

        Raises:
            UserError: 02 has trained no model yet.
        """
        if not has_weights(self.run_folder / "model"):
            fault = "contains no trained model yet"
            raise UserError(f"{self.run_folder}: {fault}; run notebook 02 first")
        flags = self.training | SHORT
        usual_steps = STEPS_OF_OTHERS
        if self.model in T5_TINY:
            usual_steps = STEPS_OF_TINY
            # Pods may share the cores of one machine.
            flags["threads"] = 1
        return flags | {"init": self.run_folder, "max_steps": self.steps or usual_steps}

    def on_pods(self, technique: str) -> Flags:
        """The arguments of `launch` for a profiled run on all pods.

        The effective batch is that of three pods of `per_device_train_batch_size` rows, on any
        number of pods.

        Raises:
            UserError: that batch cannot be divided evenly among the pods, or 02 has trained no
                model yet.
        """
        flags = self.going_on
        effective = PODS_OF_A_BATCH * flags["per_device_train_batch_size"]
        batch = batch_on(self.pods, effective, effective)
        if batch is None:
            raise UserError(
                f"{self.pods} pods: an effective batch of {effective} rows cannot be divided "
                "evenly among them; choose another batch_size"
            )
        run_name = f"{self.prepared.name}-{technique}-{self.pods}-pods"
        return {
            **flags,
            **batch.flags,
            "pods": self.pods,
            "deepspeed": technique_named(technique).profiled_file,
            "outputdir": Path(f"{self.area}-profiled", run_name),
        }

    @property
    def matrix(self) -> Matrix:
        """The matrix of 03.

        It has one process; DDP, ZeRO-1 and ZeRO-3 with offload on all pods; ZeRO-1 on one pod
        fewer. Each cell runs `repeats` times with the effective batch of `on_pods`, and each model
        is scored.
        """
        flags = self.going_on
        effective = PODS_OF_A_BATCH * flags.pop("per_device_train_batch_size")
        fewer = [{"technique": "zero1", "pods": self.pods - 1}] if self.pods > 2 else []
        return self._matrix_of(
            {
                "model": flags.pop("model_id"),
                "repeats": self.repeats,
                "questions": self.questions,
                "link_cells": True,
                "dataset_path": str(flags.pop("dataset_path")),
                "flags": {**flags, "init": str(self.run_folder), "effective_batch_size": effective},
            },
            ["ddp", "zero1", "zero3_offload"],
            *fewer,
        )

    @property
    def states_folder(self) -> Path:
        """Folder of the `states_matrix` runs.

        It lies beside the area, like the folders of profiled runs, since 06 sums up all runs in the
        area.
        """
        run_name = f"{self._few.prepared.name}-{Path(self.states_model).name}"
        return Path(f"{self.area}-states", run_name)

    @property
    def states_matrix(self) -> Matrix:
        """One process beside ZeRO-1, 2 and 3 on all pods.

        The runs are a few steps of a model with states large enough to see.
        """
        processes = self.pods * slots_per_pod(self.pods)
        flags = {
            "init": "random",
            "precision": "fp32",
            "max_steps": STATES_STEPS,
            "eval_steps": 0,
            "save_steps": 0,
            "logging_steps": 1,
            "effective_batch_size": STATES_ROWS * processes,
        }
        return self._matrix_of(
            {
                "model": self.states_model,
                "dataset_path": str(self._few.prepared),
                "flags": flags,
            },
            ["zero1", "zero2", "zero3"],
        )

    def _matrix_of(self, document: Flags, techniques: list[str], *cells: Flags) -> Matrix:
        """A matrix of one process without a technique, each of `techniques` on all pods, and
        further cells.

        Args:
            document: keys of a matrix file, which win over those set here.
            cells: the further cells, as a matrix file has them.
        """
        alone = {"technique": "none", "pods": 1}
        on_all_pods = {"technique": techniques, "pods": self.pods}
        common = {
            "prompt": self.prompt,
            "slots": slots_per_pod(self.pods),
            "timeout_seconds": MATRIX_SECONDS,
            "cells": [alone, on_all_pods, *cells],
        }
        return matrix_of({**common, **document}, "workshop.matrix")

    def measure_states(self, cluster: Cluster) -> Sweep:
        """Run `states_matrix` on a few examples, which are prepared first."""
        from zeropods.sweep.run import run_sweep

        prepare(self._few.preparation, self._few.prepared)
        return run_sweep(self.states_matrix, self.states_folder, cluster)

    @property
    def _few(self) -> Workshop:
        """Settings of a small data set for every model.

        With random weights, none needs its own tokenizer.
        """
        limit = min(self.limit or STATES_EXAMPLES, STATES_EXAMPLES)
        return replace(self, model=TINY, tokenizer=None, limit=limit)

    def _folder(self, what: str) -> Path:
        """A folder in the area for these settings; `what` is the end of its name."""
        steps = f"-{self.steps}-steps" if self.steps else ""
        return self.area / f"{self.prepared.name}-{what}{steps}"


# Causal models: notebooks 11 to 14, and the jobs of `recipes.yaml`.

FLAG_OF_SETTING = {
    "steps": "max_train_steps",
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "epochs": "num_train_epochs",
    "precision": "precision",
    "init": "init",
}
"""Settings that are flags of `causal_train.py`."""
TECHNIQUES = tuple(
    name for name in NAMES if name != "ddp" and technique_named(name).least_slots == 1
)
"""The techniques that notebook 12 compares, on pods of one slot. `ddp` is left out, since on one
process it is the same as `none`."""


@dataclass(frozen=True, kw_only=True)
class JobRecipe:
    """A job of `recipes.yaml`: a model, a data set, and how the model is trained on it."""

    model: str
    dataset: str
    """`sample`, which is generated; `squad` or `wikitext-2`, which are fetched; or a data set at
    the hub."""
    max_seq_length: int
    flags: Flags
    technique: str = "none"
    tokenizer: str | None = None
    """Name of the tokenizer; the model's own if not given."""
    dataset_config: str | None = None
    subset: int | None = None


def read_recipes() -> dict[str, dict[str, JobRecipe]]:
    """All recipes by name, then by task."""
    text = Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8")
    recipes = {}
    for name, tasks in yaml.safe_load(text).items():
        recipes[name] = {task: JobRecipe(**job) for task, job in tasks.items()}
    return recipes


@dataclass(frozen=True, kw_only=True)
class CausalWorkshop(WorkshopSettings):
    """The settings of notebooks 11 to 14.

    In the environment they are ZEROPODS_CAUSAL_RECIPE and so on. A setting that is not given, and
    has no default of its own, is taken from the recipe.
    """

    recipe: str = setting("causal_recipe", default=EMBEDDED_SAMPLE)
    """`sample`, which is small; `published`; `multi_node` and `eight_billion`, which are for
    text."""
    task: str = "squad"
    """`squad`: questions. `lm`: text."""
    model: str | None = setting("causal_model")
    """A hub id, a model folder, or with `init="random"` the name of a known shape."""
    init: str | None = setting("causal_init")
    """`pretrained` or `random`."""
    tokenizer: str | None = setting("causal_tokenizer")
    """A hub id, a folder, or `gpt-tiny`, which is trained on the data; the model's own if not
    given."""
    dataset: str | None = setting("causal_dataset")
    """`sample`, which is generated; `squad` or `wikitext-2`, which are fetched; a folder; or for
    text a hub id."""
    subset: int | None = setting("causal_subset", read=int)
    """Number of questions or documents to take from the start of each split; the recipe's if not
    given."""
    steps: int | None = setting("causal_steps", read=int)
    """Number of optimizer steps, in place of epochs."""
    batch_size: int | None = setting("causal_batch_size", read=int)
    """Number of training rows per process and forward pass."""
    accumulation: int | None = setting("causal_accumulation", read=int)
    """Number of forward passes per optimizer step of one process."""
    epochs: float | None = setting("causal_epochs", read=float)
    max_seq_length: int | None = setting("causal_max_seq_length", read=int)
    """squad: maximum number of tokens of a row. lm: number of tokens of a block."""
    loss_on: str | None = setting("causal_loss_on")
    """squad: `answer`, or `all` as in the published workshop."""
    precision: str | None = setting("causal_precision")
    """`fp32`, `bf16`, `fp16`, or `auto`."""
    slots: int = setting("causal_slots", default=2, read=int)
    """Number of processes that 13 starts on this machine: as many as it has GPUs, or fewer."""
    pods: int = setting("causal_pods", default=2, read=int)
    """Number of pods that 13 starts."""
    questions: int = setting("causal_questions", default=100, read=int)
    """Number of questions that the trained model answers."""
    runs: Path = setting("causal_runs", "runs", default=RUNS, read=Path)  # noqa: RUF009
    """Where data and runs lie; as for the other notebooks if not given. Paths are relative to the
    project's root."""

    split = "dev"
    """The split whose questions are answered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # An unknown recipe or task is refused now, not when it is first needed.
        _ = self.basis

    def _default(self, name: str) -> Any:
        """The recipe's value, or `default` where it has none and the script's own default holds."""
        of_recipe = getattr(self.basis, name, None)
        value = self.basis.flags.get(FLAG_OF_SETTING.get(name, name), of_recipe)
        return "default" if value is None else value

    @cached_property
    def basis(self) -> JobRecipe:
        """The recipe's job for this task; `UserError` if there is no such recipe, or it has no job
        for the task."""
        recipes = read_recipes()
        if self.recipe not in recipes:
            raise UserError(f"recipe {self.recipe!r}; expected {', '.join(recipes)}")
        tasks = recipes[self.recipe]
        if self.task not in tasks:
            fault = f"is for {', '.join(tasks)}, not for {self.task!r}"
            raise UserError(f"recipe {self.recipe!r}: {fault}")
        return tasks[self.task]

    @property
    def data(self) -> Path | str:
        """The raw data set: a folder, or its id at the hub."""
        name = self.dataset or self.basis.dataset
        if name == EMBEDDED_SAMPLE:
            return self.area / "data" / f"{EMBEDDED_SAMPLE}-{self.task}"
        if name in FETCHED:
            return self.area / "data" / name
        is_folder = (ROOT / name).exists() or not TASKS[self.task].reads_hub
        return ROOT / name if is_folder else name

    @property
    def prepared(self) -> Path:
        """The folder of the tokenized data set."""
        preparation = self.preparation
        data = Path(self.data).name
        model = Path(self.model_id).name
        name = f"{data}-{model}-{preparation.max_seq_length}-{preparation.loss}"
        if preparation.limit:
            name = f"{name}-{preparation.limit}"
        return self.area / "prepared" / name

    @property
    def model_id(self) -> str:
        """The model that was given, or that of the recipe."""
        return self.model or self.basis.model

    @property
    def preparation(self) -> Preparation:
        """The preparation that `prepare` is asked for."""
        tokenizer = self.tokenizer
        if self.model is None:
            tokenizer = tokenizer or self.basis.tokenizer
        return Preparation(
            task=self.task,
            data=self.data,
            tokenizer=path_or_id(tokenizer or self.model_id),
            max_seq_length=self.max_seq_length or self.basis.max_seq_length,
            loss_on=self.loss_on,
            limit=self.subset or self.basis.subset,
            dataset_config=self.basis.dataset_config if self.dataset is None else None,
        )

    @property
    def training(self) -> Flags:
        """Flags of `causal_train.py` for one process."""
        given = {}
        for name, flag in FLAG_OF_SETTING.items():
            value = getattr(self, name)
            if value is not None:
                given[flag] = value
        return {
            **self.basis.flags,
            **given,
            "model_name_or_path": path_or_id(self.model_id),
            "data": self.prepared,
        }

    def on(self, technique: str, slots: int = 1) -> Flags:
        """Flags of a run on this machine, as `train_series` takes them."""
        where = "" if slots == 1 else f"-{slots}-slots"
        return {**self._flags_on(technique, slots, where), "slots": slots}

    def on_pods(self, technique: str) -> Flags:
        """Flags of a run on all pods with all their slots, as `launch` takes them."""
        processes = self.pods * slots_per_pod(self.pods)
        return {**self._flags_on(technique, processes, f"-{self.pods}-pods"), "pods": self.pods}

    def prepare(self) -> Manifest:
        """Get and tokenize the data if that has not been done yet."""
        self.get_data()
        with progress("prepare", "rows") as bar:
            manifest, _ = prepare(self.preparation, self.prepared, bar.update)
        return manifest

    def untrained(self) -> str | Path:
        """Where the untrained model can be read from: its hub id or folder.

        For random weights it is a folder, which is made if it does not exist yet. It gets the
        weights with which a run begins: the same shape and seed.
        """
        training = self.training
        if training.get("init", "pretrained") == "pretrained":
            return str(training["model_name_or_path"])
        folder = self.area / self.prepared.name / "untrained"
        if not folder.is_dir():
            self._make_untrained(folder)
        return folder

    def _make_untrained(self, folder: Path) -> None:
        """Make the model folder with random weights; the data must have been prepared."""
        from transformers import AutoTokenizer

        from zeropods.train.causal import load_causal

        flags = {}
        for name in ("model_name_or_path", "init", "dropout", "seed"):
            if name in self.training:
                flags[name] = self.training[name]
        tokenizer = AutoTokenizer.from_pretrained(self.prepared / "tokenizer")
        model = load_causal(CausalArguments(**flags, data=str(self.prepared)), tokenizer)
        with new_folder(folder) as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)

    def _flags_on(self, technique: str, processes: int, where: str) -> Flags:
        """Flags of a run on this many processes, with the effective batch size of one process.

        Args:
            where: a part of the run folder's name that says where the run takes place.

        Raises:
            UserError: the effective batch cannot be divided evenly among the processes.
        """
        flags = self.training
        steps = f"-{self.steps}-steps" if self.steps else ""
        # 4 is the script's own default of either flag.
        rows = flags.get(ROWS, 4)
        effective = rows * flags.get(PASSES, 4)
        batch = batch_on(processes, effective, rows)
        if batch is None:
            raise UserError(
                f"{processes} processes: an effective batch of {effective} rows cannot be divided "
                "evenly among them; choose another batch_size"
            )
        return {
            **flags,
            **batch.flags,
            **_flags_of_technique(technique),
            "outputdir": self.area / self.prepared.name / f"{technique}{where}{steps}",
        }


def _flags_of_technique(name: str) -> Flags:
    """The flags of a run with a technique, or with another configuration of `dsconfig/`."""
    if name in NAMES:
        return technique_named(name).flags
    return {"deepspeed": DSCONFIG / f"{name}.json"}
