"""The flags of the training scripts: fields of a dataclass with help and bounds, read strictly.

A launch and a sweep also read them before anything starts, and check the model and the data that
they name, so nothing here imports torch or transformers.
"""

from __future__ import annotations

import argparse
import math
import operator
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args, get_type_hints

from zeropods import tasks
from zeropods.data.manifest import FILE, Manifest, read_manifest
from zeropods.errors import UserError
from zeropods.files import (
    TOKENIZER,
    check_digests,
    check_utf8,
    check_weights,
    has_weights,
    no_folder,
    read_object,
)
from zeropods.measure.mlflow_runs import MLFLOW, check_server
from zeropods.measure.record import read_config
from zeropods.outputs import writing_fault
from zeropods.plan.known_models import CAUSAL_TINY, T5_TINY, known_config
from zeropods.shipped_models import model_source
from zeropods.tables import Help, counted, nearest_multiples
from zeropods.techniques import technique_of
from zeropods.train.foreign_flags import faults_of

PROJECT = Path(__file__).resolve().parents[2]
NO_FP16 = "--precision fp16: there is no GPU here, and CPUs only emulate FP16; use bf16 or fp32"
INITS = ("pretrained", "random")
CAUSAL_TASKS = tuple(task.name for task in tasks.tasks_of(tasks.CAUSAL_SCRIPT))
"""Names of the tasks of causal models, the default first."""
OWN = "data"
"""Folder, within the run folder, of the prepared set that a run makes from raw data."""
COMMON = ("model_id", "dataset_path", "epochs", "max_steps", "warmup_steps")
"""Settings that every script has, some under another name: the model (a hub id, a local folder or
the name of a known shape); the name of the data; passes over the train split; optimizer steps, -1
for as many as these passes take; and the number of steps over which the learning rate rises."""
LR_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
)
"""transformers' schedules that need no settings of their own, as there are no
flags for such settings."""
MAX_SEQ_LENGTH = 512
"""Default number of tokens per row of raw data: the workshop's value."""
MOST_ROWS = 2**31 - 1
MOST_SEED = 2**32 - 1
"""Largest seed that NumPy's generators accept."""
MOST_THREADS = 1_024
"""Most threads of a process: more than any machine has cores. Too many crash the whole machine."""
NO_SETTINGS = (
    "local_rank",
    "resume",
    "outputdir",
    "memory_interval",
    "save_total_limit",
    "save_model",
    "global_batch",
    "report_to",
)
"""Flags that change where and how a run is recorded, not what it does; and the rows of a step,
which other flags have by then."""
REPORTS = ("tensorboard", MLFLOW)
"""Values of `--report_to`; TensorBoard's events are written in any case."""
NOT_NAMED = ("auto", "never")
"""Values of `--resume` that name no checkpoint."""
RESUME_REMEDY = "give auto, never or the folder of a complete checkpoint"
BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}
"""Bounds of a flag by name: the words for each in a message, and the comparison that holds within
it."""
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
METAVARS = {int: "N", float: "X", bool: "BOOL", str: "TEXT"}
WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
}

Flags = TypeVar("Flags", bound="RunArguments")


def flag(default: Any, text: str, choices: tuple[str, ...] = (), **bounds: float) -> Any:
    """A dataclass field that is a flag.

    Args:
        default: a value that it may always have.
        text: its help.
        choices: the other values that it may have; empty where any may be given.
        bounds: bounds of a finite number, by the names of `BOUNDS`.
    """
    return field(default=default, metadata={"help": text, "choices": choices, "bounds": bounds})


@dataclass(frozen=True)
class Vocabularies:
    """Ids by token."""

    model: Mapping[str, int]
    data: Mapping[str, int]


def _fault_of(
    value: Any, *, choices: tuple[str, ...], bounds: Mapping[str, float], **_: Any
) -> str | None:
    """A message's words for a flag's wrong value: the value, and what is expected; None where it is
    right.

    Args:
        choices: as for `flag`.
        bounds: as for `flag`.
    """
    if choices and value not in choices:
        expected = ", ".join(choices)
        return f"{value!r}; expected {expected}"
    if not bounds:
        return None
    parts = []
    for name, bound in bounds.items():
        words, _holds = BOUNDS[name]
        parts.append(f"{words} {bound}")
    expected = " and ".join(parts)
    if not math.isfinite(value):
        return f"{value}; expected a finite number, {expected}"
    for name, bound in bounds.items():
        _words, holds = BOUNDS[name]
        if not holds(value, bound):
            return f"{value}; expected {expected}"
    return None


@dataclass(kw_only=True)
class RunArguments:
    """The flags that every training script has.

    A script's own class adds others, and its own defaults.
    """

    script: ClassVar[str]
    """Name of the script's file, at the top of the project."""
    task_class: ClassVar[str]
    """Module and class of its `job.Task`, by name, so that a run of one script loads nothing of the
    other."""
    description: ClassVar[str]
    names_here: ClassVar[Mapping[str, str]] = {name: name for name in COMMON}
    """The script's own name for each setting of `COMMON`."""
    prompts: ClassVar[tuple[str, ...]]
    """Prompts with which a row's text may be made; the first one is the default."""
    fp16_fault: ClassVar[str | None] = None
    """The reason why these models do not train in FP16; None where they do."""

    outputdir: str = flag("runs/run", "the run folder")
    init: str = flag("pretrained", "random, or a RUN")
    per_device_train_batch_size: int = flag(
        32, "rows per process and pass", least=1, most=MOST_ROWS
    )
    per_device_eval_batch_size: int = flag(64, "the same for evaluation", least=1, most=MOST_ROWS)
    gradient_accumulation_steps: int = flag(1, "passes per optimizer step", least=1, most=MOST_ROWS)
    global_batch: int | None = flag(
        None, "rows per step, sets passes (default: none)", least=1, most=MOST_ROWS
    )
    gradient_checkpointing: bool = flag(False, "recompute activations")
    deepspeed: str | None = flag(None, "dsconfig/TECHNIQUE.json (default: none)")
    precision: str = flag("auto", "fp32 | bf16 | fp16 | auto", ("auto", "fp32", "bf16", "fp16"))
    dropout: float | None = flag(None, "dropout rate (default: the model's own)", least=0, below=1)
    learning_rate: float = flag(3e-4, "peak rate of AdamW", least=0)
    lr_scheduler_type: str = flag("linear", "transformers' schedule", LR_SCHEDULES)
    weight_decay: float = flag(0.0, "AdamW's weight decay", least=0)
    adam_beta2: float = flag(0.999, "AdamW's second decay rate", least=0, below=1)
    max_grad_norm: float = flag(1.0, "clip gradients to this norm", least=0)
    eval_steps: int | None = flag(None, "every N steps, 0: at end (default: epoch)", least=0)
    save_steps: int | None = flag(None, "every N steps, 0: never (default: epoch)", least=0)
    save_total_limit: int | None = flag(None, "newest checkpoints to keep (default: all)", least=1)
    save_model: bool = flag(True, "keep the trained weights")
    logging_steps: int = flag(10, "record the loss every N steps", least=1)
    early_stopping_patience: int = flag(0, "evals without gain; 0: off", least=0)
    early_stopping_threshold: float = flag(0.0, "smallest gain that counts", least=0)
    load_best_model: bool = flag(False, "end with the best weights")
    resume: str = flag("auto", "never, or a checkpoint")
    memory_interval: float = flag(0.5, "s between samples; 0: none", least=0)
    report_to: str = flag(REPORTS[0], "mlflow: there too", REPORTS)
    threads: int = flag(0, "per process; 0: all cores", least=0, most=MOST_THREADS)
    seed: int = flag(42, "for weights, order, dropout", least=0, most=MOST_SEED)
    local_rank: int = flag(-1, "set by DeepSpeed's launcher")

    # Settings that a run reads for every script, with the values that hold where a script has no
    # such flag.
    model_id = ""
    dataset_path = ""
    epochs = 0.0
    max_steps = 0
    warmup_steps = 0
    adam_beta1 = 0.9
    max_train_seconds = 0.0
    scaled_rates = False
    compile = "off"
    tf32 = False
    eval_on_start = False
    dataloader_num_workers = 0

    def __post_init__(self) -> None:
        for setting, name_here in self.names_here.items():
            setattr(self, setting, getattr(self, name_here))
        self._check_values()
        if self.precision == "fp16" and self.fp16_fault is not None:
            raise UserError(f"--precision fp16: {self.fp16_fault}; use bf16 or fp32")
        if not self.outputdir:
            raise UserError("--outputdir '': expected a folder; '.' means the current folder")
        check_utf8(self.outputdir, "--outputdir")
        if self.init not in INITS and not has_weights(Path(self.init) / "model"):
            expected = ", ".join(INITS)
            raise UserError(
                f"--init {self.init!r}; expected {expected} or the folder of a finished run"
            )
        # Both are None where neither is given: then every epoch is evaluated and saved.
        saves_what_it_evaluates = self.eval_steps == self.save_steps and self.save_steps != 0
        if self.wants_best_model and not saves_what_it_evaluates:
            raise UserError(
                f"--eval_steps {self.eval_steps} and --save_steps {self.save_steps}: the best "
                "model is chosen from checkpoints that were evaluated; "
                "give both the same value above 0, or neither"
            )

    def _check_values(self) -> None:
        """Refuse values that are out of bounds or none of the choices, in one message that lists
        every fault."""
        faults = []
        for flag_field in fields(self):
            value = getattr(self, flag_field.name)
            # A default may be out of the bounds of given values, such as -1 steps for none.
            if value == flag_field.default:
                continue
            fault = _fault_of(value, **flag_field.metadata)
            if fault is not None:
                faults.append(f"--{flag_field.name} {fault}")
        if faults:
            raise UserError("; ".join(faults))

    def divided_among(self, ranks: int) -> Self:
        """The same flags, with `--gradient_accumulation_steps` in place of `--global_batch`.

        On this number of processes the passes add up to the rows that `--global_batch` asks for.
        Without that flag these flags are returned as they are.

        Raises:
            UserError: no whole number of passes reaches the rows.
        """
        if self.global_batch is None:
            return self
        passes = passes_to_reach(self.global_batch, self.per_device_train_batch_size, ranks)
        return replace(self, gradient_accumulation_steps=passes, global_batch=None)

    @property
    def model_flag(self) -> str:
        """The flag that names the model, as it is written on the command line."""
        return f"--{self.names_here['model_id']}"

    @property
    def wants_best_model(self) -> bool:
        """Whether the run ends with its best checkpoint, not its last weights."""
        return self.load_best_model or self.early_stopping_patience > 0

    # The engine and the technique that the flags ask for.

    @property
    def engine_class(self) -> str:
        """Module and class of the engine, by name, so that a run loads no other one."""
        if self.deepspeed is not None:
            return "zeropods.train.engines.deepspeed:DeepSpeed"
        return "zeropods.train.engines.ddp:Ddp"

    def technique(self, config: Mapping[str, object] | None, ranks: int) -> str:
        """Name of the technique; `Technique.flags` goes the other way.

        Args:
            config: the DeepSpeed configuration at `--deepspeed`; None where none is named.
            ranks: number of processes of the run.
        """
        return technique_of(config, ranks)

    # Checks of the model and the data that the flags name, before anything starts.

    @property
    def source(self) -> str:
        """A folder or hub id with the model's weights.

        It is the one that the model flag names (a folder of this package for a model that comes
        with it), or the model of the run that `--init` names.

        Raises:
            UserError: the run of `--init` trained another model than the call names.
        """
        if self.init in INITS:
            return model_source(self.model_id)
        trained = read_config(Path(self.init)).model_id
        if trained != self.model_id:
            raise UserError(
                f"--init {self.init}: its model is {trained}, not {self.model_id}; "
                f"give {self.model_flag} {trained}"
            )
        return str(Path(self.init) / "model")

    def manifest(self) -> Manifest | None:
        """The prepared set's manifest, checked against the flags.

        Returns:
            None for raw data, which must exist unless the task reads the hub.
        """
        raise NotImplementedError

    def check_model(self) -> tuple[str, int | None]:
        """Check the model that the flags name, without loading it or asking a hub.

        Returns:
            The model's name, and the number of its embedding rows; None in place of a number that
            no file here tells.

        Raises:
            UserError: the model has no weights, or is of another kind.
        """
        if self.init == "random":
            kind = "t5" if isinstance(self, TextToSQLArguments) else "causal"
            return self.model_id, known_config(self.model_id, kind)["vocab_size"]
        name = self.source
        if name in (*T5_TINY, *CAUSAL_TINY) and not Path(name).is_dir():
            raise UserError(
                f"{self.model_flag} {name}: has no pretrained weights; give --init random"
            )
        check_weights(Path(name))
        path = Path(name) / "config.json"
        config: Mapping[str, Any] = {}
        if path.is_file():
            config = read_object(path, "save the model again")
        if config.get("is_encoder_decoder") and not isinstance(self, TextToSQLArguments):
            model_type = config.get("model_type")
            raise UserError(
                f"{self.model_flag} {name}: {model_type!r} is not a causal language model"
            )
        return name, config.get("vocab_size")

    def check_inputs(self) -> None:
        """Refuse a model or data that are missing, or do not fit each other.

        Also refused are a run folder that cannot be made, a checkpoint that is not there, and an
        MLflow server that cannot be used. No hub is asked: a run will do that.
        """
        self.check_outputdir()
        self.check_resume()
        self.check_reporting()
        manifest = self.manifest()
        name, embedding_rows = self.check_model()
        if manifest is None:
            # The run prepares its raw data, and checks then whether the model fits them.
            return
        # A model with random weights has learned no ids, so any tokenizer fits it.
        vocabularies = None if self.init == "random" else self._vocabularies(Path(name))
        self.check_fit(name, embedding_rows, manifest.vocabulary_size, vocabularies)

    def _vocabularies(self, model: Path) -> Vocabularies | None:
        """The vocabularies of a model's folder and of the prepared set.

        Returns:
            None where either has no `tokenizer.json`.

        Raises:
            UserError: a file is broken, or has changed since the model was saved.
        """
        of_model = model / TOKENIZER
        of_data = Path(self.dataset_path) / "tokenizer" / TOKENIZER
        if not of_model.is_file() or not of_data.is_file():
            return None
        from tokenizers import Tokenizer

        check_digests(model, weights=False)

        def read(path: Path, remedy: str) -> dict[str, int]:
            read_object(path, remedy)
            return Tokenizer.from_file(str(path)).get_vocab()

        return Vocabularies(
            model=read(of_model, "save the model again"),
            data=read(of_data, "prepare the data again"),
        )

    def check_outputdir(self) -> None:
        """Refuse a run folder that is a file, is below one, or is where this user may not write."""
        place, fault = writing_fault(Path(self.outputdir))
        if not place.is_dir():
            raise UserError(f"--outputdir {self.outputdir}: {place} is a file; name a folder")
        if fault is not None:
            raise UserError(
                f"--outputdir {self.outputdir}: {place} cannot be written to ({fault}); "
                "choose another folder"
            )

    def check_resume(self) -> None:
        """Refuse a checkpoint to resume from that is not there.

        Whether it is complete is seen when it is resumed.
        """
        if self.resume not in NOT_NAMED and not Path(self.resume).is_dir():
            raise UserError(f"--resume {self.resume}: no such checkpoint; {RESUME_REMEDY}")

    def check_reporting(self) -> None:
        """Refuse `--report_to mlflow` where the server cannot be used from here.

        Only rank 0 of a run reports, so other ranks check nothing. Where a supervisor started the
        ranks, it has checked the server before, and sends in the end what rank 0 could not send.
        """
        is_first = os.environ.get("RANK", "0") == "0"
        is_supervised = bool(os.environ.get("ZEROPODS_RUN"))
        if self.report_to == MLFLOW and is_first and not is_supervised:
            check_server(f"--report_to {MLFLOW}")

    def check_fit(
        self,
        name: str,
        embedding_rows: int | None,
        vocabulary_size: int,
        vocabularies: Vocabularies | None,
    ) -> None:
        """Refuse a model that does not fit the prepared set: with an embedding that is too small,
        or with another tokenizer.

        Args:
            name: the model, for the message.
            embedding_rows: rows of the model's embedding; None where they are not known.
            vocabulary_size: number of tokens of the set's tokenizer.
            vocabularies: those of model and set; None to compare no ids.
        """
        if vocabularies is not None:
            self._check_same_ids(name, vocabularies)
        if embedding_rows is not None and vocabulary_size > embedding_rows:
            raise UserError(
                f"{self.dataset_path}: its tokenizer has {vocabulary_size} tokens, {name} has "
                f"{embedding_rows} embedding rows; prepare the data with the model's own tokenizer"
            )

    def _check_same_ids(self, name: str, vocabularies: Vocabularies) -> None:
        """Refuse a model whose tokenizer gives a token another id than the set's does."""
        for token, index in vocabularies.model.items():
            index_in_data = vocabularies.data.get(token)
            if index_in_data == index:
                continue
            other = "has no such token"
            if index_in_data is not None:
                other = f"gives {index_in_data}"
            raise UserError(
                f"{self.model_flag} {name}: its tokenizer gives {token!r} id {index}, "
                f"the prepared set's {other}; prepare the data with --tokenizer {name}"
            )

    def comparable(self) -> dict[str, object]:
        """The flags that must be equal for two calls to mean the same run."""
        settings = {}
        for name, value in asdict(self).items():
            if name not in NO_SETTINGS:
                settings[name] = value
        return settings


@dataclass(kw_only=True)
class TextToSQLArguments(RunArguments):
    """Flags of `textsql_train.py`: the original script's, under the same names, and more."""

    script: ClassVar[str] = tasks.T5_SCRIPT
    task_class: ClassVar[str] = "zeropods.train.text2sql:TextToSQL"
    description: ClassVar[str] = "Fine-tune T5 on text-to-SQL."
    prompts: ClassVar[tuple[str, ...]] = tasks.prompts_of(tasks.T5_SCRIPT)
    fp16_fault: ClassVar[str | None] = "T5's activations overflow FP16 and the loss becomes NaN"

    model_id: str = flag("t5-small", "id, folder, known shape")
    dataset_path: str = flag("wikisql_tok_dataset", "prepared set")
    outputdir: str = flag("runs/textsql", "the run folder")
    epochs: float = flag(3.0, "passes over the train split", above=0)
    max_steps: int = flag(-1, "overrides --epochs (default: none)", least=1)
    max_train_seconds: float = flag(0.0, "time limit; 0: none", least=0)
    generation_max_length: int = flag(96, "maximum tokens per prediction", least=1)
    generation_num_beams: int = flag(1, "beams per prediction", least=1)
    scaled_rates: bool = flag(False, "embeddings learn faster")
    warmup_steps: int = flag(0, "learning-rate warmup steps", least=0)
    pad_to_multiple_of: int | None = flag(
        None, "of tokens (default: GPU 8 or 16, CPU 1)", least=1, most=1_024
    )
    compile: str = flag("off", "off | blocks | graphs", ("off", "blocks", "graphs"))
    tf32: bool = flag(False, "TF32 on GPUs that have it")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile != "graphs":
            return
        if self.gradient_accumulation_steps > 1:
            passes = self.gradient_accumulation_steps
            raise UserError(
                f"--compile graphs --gradient_accumulation_steps {passes}: the next pass "
                "overwrites a graph's gradients; use 1 pass, or --compile blocks"
            )
        other_flag = None
        if self.deepspeed is not None:
            other_flag = f"--deepspeed {self.deepspeed}"
        elif self.gradient_checkpointing:
            other_flag = "--gradient_checkpointing True"
        if other_flag is not None:
            reason = "cannot be recorded as a graph"
            raise UserError(f"--compile graphs {other_flag}: {reason}; use --compile blocks")

    def manifest(self) -> Manifest:
        """The manifest of the set at `--dataset_path`.

        Raises:
            UserError: there is no prepared set, or it is for the other script.
        """
        manifest = read_manifest(Path(self.dataset_path))
        if tasks.task_or_unknown(manifest.task).script != self.script:
            place = f"--dataset_path {self.dataset_path}"
            raise UserError(
                f"{place}: prepared for {manifest.task}; train on it with {tasks.CAUSAL_SCRIPT}"
            )
        return manifest


@dataclass(kw_only=True)
class CausalArguments(RunArguments):
    """Flags of `causal_train.py`; the defaults are the SQuAD workshop's settings."""

    script: ClassVar[str] = tasks.CAUSAL_SCRIPT
    task_class: ClassVar[str] = "zeropods.train.causal:Causal"
    description: ClassVar[str] = (
        "Fine-tune a causal language model on questions (squad) or on plain text (lm)."
    )
    names_here: ClassVar[Mapping[str, str]] = {
        "model_id": "model_name_or_path",
        "dataset_path": "data",
        "epochs": "num_train_epochs",
        "max_steps": "max_train_steps",
        "warmup_steps": "num_warmup_steps",
    }
    prompts: ClassVar[tuple[str, ...]] = tasks.prompts_of(tasks.CAUSAL_SCRIPT)

    model_name_or_path: str = flag("bigscience/bloom-560m", "id or path")
    tokenizer_name: str | None = flag(None, "for raw data (default: the model's own)")
    outputdir: str = flag("runs/causal", "the run folder")
    task: str | None = flag(
        None, f"{' | '.join(CAUSAL_TASKS)} (default: the set's, or {CAUSAL_TASKS[0]})", CAUSAL_TASKS
    )
    data: str = flag("squad", "set, folder or hub id")
    dataset_config: str | None = flag(None, "such as en for allenai/c4 (default: none)")
    text_field: str | None = flag(None, "in JSON lines or Parquet (default: text)")
    max_seq_length: int | None = flag(None, "tokens per row (default: 512 for raw data)", least=2)
    loss_on: str | None = flag(None, "answer | all, for squad (default: answer)", ("answer", "all"))
    subset: int | None = flag(None, "first N questions or rows (default: all)", least=1)
    per_device_train_batch_size: int = flag(4, "rows per process and pass", least=1, most=MOST_ROWS)
    per_device_eval_batch_size: int = flag(4, "the same for evaluation", least=1, most=MOST_ROWS)
    gradient_accumulation_steps: int = flag(4, "passes per optimizer step", least=1, most=MOST_ROWS)
    learning_rate: float = flag(5e-5, "peak rate of AdamW", least=0)
    weight_decay: float = flag(0.01, "AdamW's weight decay", least=0)
    adam_beta1: float = flag(0.9, "AdamW's first decay rate", least=0, below=1)
    num_train_epochs: float = flag(3.0, "passes over the train split", above=0)
    max_train_steps: int = flag(-1, "overrides epochs (default: none)", least=1)
    num_warmup_steps: int = flag(0, "learning-rate warmup steps", least=0)
    max_eval_steps: int | None = flag(None, "passes per evaluation (default: all)", least=1)
    eval_on_start: bool = flag(False, "before the first step too")
    attn_implementation: str = flag(
        "sdpa", "or eager, flash_attention_2", ("eager", "sdpa", "flash_attention_2")
    )
    dataloader_num_workers: int = flag(0, "0: the rank itself", least=0, most=128)
    generation_prompt: str | None = flag(None, "text to continue at the end (default: none)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generation_prompt is not None and not self.save_model:
            raise UserError(
                "--save_model False --generation_prompt: only a saved model continues it; "
                "leave one out"
            )
        if self.loss_on == "answer" and not self.task_of_raw_data.has_answers:
            raise UserError(
                f"--loss_on answer: the text of --task {self.task} has no answers; leave it out"
            )

    @property
    def task_of_raw_data(self) -> tasks.LearningTask:
        """The task for which raw data are prepared: the flag's, or the default."""
        return tasks.TASKS[self.task or CAUSAL_TASKS[0]]

    def manifest(self) -> Manifest | None:
        """The manifest of the set at `--data`.

        Returns:
            None for raw data.

        Raises:
            UserError: raw data are missing; or the set is for the other script, or was prepared
                with settings that the flags contradict.
        """
        data = Path(self.data)
        if not (data / FILE).is_file():
            if not self.task_of_raw_data.reads_hub:
                self._check_raw_data(data)
            return None
        manifest = read_manifest(data)
        if tasks.task_or_unknown(manifest.task).script != self.script:
            # These are the flags of causal models, and there is one other script.
            raise UserError(
                f"--data {self.data}: prepared for {manifest.task}; "
                f"train on it with {tasks.T5_SCRIPT}"
            )
        self._refuse_contradictions(manifest)
        return manifest

    def _check_raw_data(self, data: Path) -> None:
        """Refuse raw data that are missing, and flags that are for data of a hub.

        For a task that reads no hub.
        """
        on_hub = " or ".join(task.name for task in tasks.hub_tasks())
        for name in ("dataset_config", "text_field"):
            value = getattr(self, name)
            if value is not None:
                raise UserError(f"--{name} {value}: is for --task {on_hub}; leave it out")
        # An earlier attempt of the run has prepared them.
        is_prepared = (Path(self.outputdir) / OWN / FILE).is_file()
        if not data.is_dir() and not is_prepared:
            dataset = self.task_of_raw_data.dataset
            command = f"zeropods data get {dataset} --out {shlex.quote(self.data)}"
            raise UserError(
                f"--data {self.data}: {no_folder(data)}; "
                f"give a prepared set, or fetch raw data: {command}"
            )

    def _refuse_contradictions(self, manifest: Manifest) -> None:
        """Refuse flags that contradict the settings with which the set was prepared."""
        prepared_with: dict[str, int | str | None] = {
            "task": manifest.task,
            "max_seq_length": manifest.max_seq_length,
            "loss_on": manifest.loss_on,
            "tokenizer_name": manifest.tokenizer,
            "dataset_config": None,
            "text_field": None,
        }
        for name, value in prepared_with.items():
            flag_value = getattr(self, name)
            if flag_value is None or flag_value == value:
                continue
            contradiction = f"was prepared with {value}"
            if value is None:
                contradiction = "is a prepared set already"
            raise UserError(
                f"--{name} {flag_value}: --data {self.data} {contradiction}; "
                "leave the flag out, or prepare the data again"
            )


SCRIPTS: dict[str, type[RunArguments]] = {
    TextToSQLArguments.script: TextToSQLArguments,
    CausalArguments.script: CausalArguments,
}
"""The project's own training scripts by their files' names, at the top of the project."""


def arguments_of(script: str | Path) -> type[RunArguments] | None:
    """The class of flags of one of our scripts; None for any other script.

    Args:
        script: its name or path; a file of the same name elsewhere is another script.
    """
    path = Path(script)
    is_in_project = path in (Path(path.name), PROJECT / path.name)
    if not is_in_project:
        return None
    return SCRIPTS.get(path.name)


def parse_flags(kind: type[Flags], argv: Sequence[str]) -> Flags:
    """Read a script's flags strictly: no abbreviations, and no unknown flags.

    Args:
        kind: the script's class of flags.

    Raises:
        UserError: it names the flag, the value and the remedy.
    """
    parser = _parser_of(kind)
    # A flag's name may be written with dashes instead of underscores.
    words = [re.sub(r"^--[\w-]+", _with_underscores, word) for word in argv]
    _check_names(kind, words)
    _check_batch(words)
    try:
        values, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(str(error).removeprefix("argument ")) from None
    if unknown:
        raise UserError(
            f"{unknown[0]}: not a flag of {kind.script}, nor the value of one; see --help"
        )
    faults = []
    for name, value in vars(values).items():
        if isinstance(value, _Unreadable):
            faults.append(f"--{name}: {value.fault}")
    if faults:
        raise UserError("; ".join(faults))
    return kind(**vars(values))


def _parser_of(kind: type[RunArguments]) -> argparse.ArgumentParser:
    """The parser of a script's flags; a value that cannot be read becomes an `_Unreadable`."""
    parser = argparse.ArgumentParser(
        prog=kind.script,
        description=kind.description,
        allow_abbrev=False,
        formatter_class=Help,
        exit_on_error=False,
    )
    hints = get_type_hints(kind)
    for flag_field in fields(kind):
        value_kind = hints[flag_field.name]
        kinds_of_union = get_args(value_kind)
        if kinds_of_union:
            # A flag of type `X | None` is read as X.
            value_kind = kinds_of_union[0]
        options: dict[str, Any] = {
            "default": flag_field.default,
            "type": partial(_value, value_kind),
            "metavar": METAVARS[value_kind],
            "help": flag_field.metadata["help"],
        }
        if value_kind is bool:
            # The flag alone means True.
            options["nargs"] = "?"
            options["const"] = True
        parser.add_argument(f"--{flag_field.name}", **options)
    return parser


def _with_underscores(flag_name: re.Match[str]) -> str:
    """A flag's name with underscores in place of dashes, but for the two before it."""
    return "--" + flag_name[0][2:].replace("-", "_")


def _check_names(kind: type[RunArguments], words: Sequence[str]) -> None:
    """Refuse flags that a script does not have; the message says what each is called here."""
    names = [flag_field.name for flag_field in fields(kind)]
    # The other script's name for a setting leads to this script's.
    names_here = {}
    for other in SCRIPTS.values():
        for setting in COMMON:
            names_here[other.names_here[setting]] = kind.names_here[setting]
    faults = faults_of(words, names, names_here, kind.script)
    if faults:
        raise UserError("; ".join(faults))


def _check_batch(words: Sequence[str]) -> None:
    """Refuse `--global_batch` beside `--gradient_accumulation_steps`, which it sets."""
    names = {word.partition("=")[0] for word in words}
    if {f"--{STEP_ROWS}", f"--{PASSES}"} <= names:
        raise UserError(f"--{STEP_ROWS}: sets --{PASSES} too; leave one of them out")


@dataclass(frozen=True)
class _Unreadable:
    """Stands for a flag's value that cannot be read, so that all of them can be named at once."""

    fault: str


def _value(kind: type, text: str) -> Any:
    """The value of a flag of this type, or `_Unreadable`."""
    try:
        if kind is bool:
            return TRUTH[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        return _Unreadable(f"{text!r}; expected {WORDS[kind]}")


# The batch of N ranks: the share of each in an optimizer step, so that the effective batch size is
# the same for any N.

ROWS = "per_device_train_batch_size"
"""Flag of a training script for the rows of a rank in a forward pass."""
PASSES = "gradient_accumulation_steps"
"""Flag for the number of these passes in an optimizer step."""
STEP_ROWS = "global_batch"
"""Flag for the rows of all ranks in an optimizer step, from which the passes follow."""


@dataclass(frozen=True)
class Batch:
    """The share of one rank in an optimizer step."""

    rows: int
    """Rows per forward pass: `--per_device_train_batch_size`."""
    passes: int
    """Forward passes per step: `--gradient_accumulation_steps`."""

    @property
    def flags(self) -> dict[str, int]:
        """The share as flags of a training script."""
        return {ROWS: self.rows, PASSES: self.passes}


def batch_on(ranks: int, effective: int, most_rows: int) -> Batch | None:
    """The share of each rank in an optimizer step.

    The rows per pass are the largest divisor of the share up to `most_rows`, since more may not fit
    into memory.

    Args:
        effective: rows of all ranks in a step.
        most_rows: most rows of a rank in a pass.

    Returns:
        None where the rows do not divide evenly among the ranks.
    """
    if not 1 <= ranks <= effective:
        return None
    if effective % ranks != 0:
        return None
    share = effective // ranks
    rows = min(most_rows, share)
    while share % rows != 0:
        rows -= 1
    return Batch(rows, share // rows)


def passes_to_reach(step_rows: int, rows: int, ranks: int) -> int:
    """The number of passes in which these ranks reach the rows of an optimizer step.

    Args:
        step_rows: rows of all ranks in a step.
        rows: rows of a rank in a pass.

    Raises:
        UserError: no whole number of passes reaches them.
    """
    rows_per_pass = rows * ranks
    if step_rows % rows_per_pass == 0:
        return step_rows // rows_per_pass
    near = nearest_multiples(step_rows, rows_per_pass)
    share = f"{counted(ranks, 'process')} of {counted(rows, 'row')} a pass"
    raise UserError(
        f"--global-batch {step_rows}: {share} cannot reach it; give {near}, or another --{ROWS}"
    )
