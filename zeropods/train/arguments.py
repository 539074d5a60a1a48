"""The flags of the training scripts: fields of a dataclass, declared with their help, read strictly, checked."""

from __future__ import annotations

import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from zeropods.errors import UserError

# Flags as the fields of a dataclass: declared with their help, read strictly, checked.

Flags = TypeVar("Flags")
READERS: dict[type, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"True": True, "False": False}[text],
}


def flag(default: Any, text: str) -> Any:
    """A field with its help."""
    return field(default=default, metadata={"help": text})


def parse_flags(kind: type[Flags], argv: Sequence[str], *, script: str, description: str) -> Flags:
    """Read flags strictly: no abbreviation, no unknown flag; argparse ends with status 2 on either."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(kind, prog=script, allow_abbrev=False, description=description)
    arguments, unknown = parser.parse_args_into_dataclasses(
        list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; --help lists the flags")
    return arguments


def read_flags(kind: type[Any], argv: Sequence[str]) -> dict[str, Any]:
    """The flags of a call with their defaults, by name and typed, without loading transformers.

    For a check before launching: what cannot be read is left out, and refused by the script itself.
    """
    words = [word for text in argv for word in (text.split("=", 1) if text.startswith("--") else [text])]
    types = types_of(kind)
    read = {f.name: f.default for f in fields(kind)}
    for word, value in itertools.pairwise(words):
        name = word.removeprefix("--")
        if word.startswith("--") and name in types:
            read.pop(name, None)
            with contextlib.suppress(KeyError, ValueError):
                read[name] = READERS[types[name]](value)
    return read


def types_of(kind: type[Any]) -> dict[str, type]:
    """The type of each flag's value: that of `X | None` is X."""
    hints = get_type_hints(kind)
    return {f.name: (get_args(hints[f.name]) or (hints[f.name],))[0] for f in fields(kind)}


def one_of(name: str, value: str | None, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices; None is not given, and passes."""
    if value is not None and value not in choices:
        raise UserError(f"--{name} {value!r}; expected {', '.join(choices)}")


def at_least(name: str, value: float | None, least: float) -> None:
    """Refuse what is less, or not a number; None is not given, and passes."""
    if value is not None and not value >= least:
        raise UserError(f"--{name} {value}; expected at least {least}")


def within(name: str, value: float | None, least: float, most: float) -> None:
    """Refuse what is less or more, or not a number; None is not given, and passes."""
    if value is not None and not least <= value <= most:
        raise UserError(f"--{name} {value}; expected {least} to {most}")


def finite(name: str, value: float) -> None:
    """Refuse what is negative, infinite or not a number."""
    if not 0 <= value < math.inf:
        raise UserError(f"--{name} {value}; expected a number of at least 0")


def amount(steps_flag: str, steps: int, epochs_flag: str, epochs: float) -> None:
    """Refuse a run of no length: steps, or where these are -1, epochs."""
    if steps != -1:
        at_least(steps_flag, steps, 1)
    elif not 0 < epochs < math.inf:
        raise UserError(f"--{epochs_flag} {epochs}; expected more than 0")


def below_one(name: str, value: float | None) -> None:
    """Refuse what is not at least 0 and less than 1; None is not given, and passes."""
    if value is not None and not 0 <= value < 1:
        raise UserError(f"--{name} {value}; expected 0 or more, and less than 1")


# The flags that every training script has, under the same names, and what the engine asks of the others.

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
INITS = ("pretrained", "random")
MOST_ROWS = 2**31 - 1
MOST_THREADS = 1_024
"""More than any machine has cores: so many threads or processes end the machine, not the run."""
MOST_SEED = 2**32 - 1
"""NumPy's generators take no more."""
NO_SETTINGS = ("local_rank", "resume", "outputdir", "memory_interval", "save_total_limit")
"""Flags that change where and how a run is written down, not what it does."""
LATER = {"compile": "off", "pad_to_multiple_of": 1, "tf32": False}
"""Flags that came after runs had been recorded: at these values a run is the same as one from before them."""


@dataclass(kw_only=True)
class RunArguments(ABC):
    """What scripts share. A script's own class adds fields, and its own defaults."""

    script: ClassVar[str]
    """The file's name, at the top of the project."""
    description: ClassVar[str]
    model_flag: ClassVar[str]
    """What the script calls its model, and the next one its data."""
    data_flag: ClassVar[str]
    prompts: ClassVar[tuple[str, ...]]
    """What a row's text may be made by; the first one is usual."""
    fp16_fault: ClassVar[str | None] = None
    """Why these models do not train in FP16; None where they do."""

    outputdir: str = flag("runs/run", "the run folder: everything of this run, and nothing else")
    init: str = flag("pretrained", "pretrained | random: load weights, or draw them for the shape")
    per_device_train_batch_size: int = flag(32, "training rows a process and forward pass")
    per_device_eval_batch_size: int = flag(64, "evaluation rows a process and forward pass")
    gradient_accumulation_steps: int = flag(1, "forward passes for an optimizer step")
    gradient_checkpointing: bool = flag(False, "True | False: recompute activations in the backward pass")
    deepspeed: str | None = flag(None, "DeepSpeed configuration file (dsconfig/TECHNIQUE.json)")
    precision: str = flag("auto", "fp32 | bf16 | fp16 | auto: bf16 where it is faster, else fp32")
    dropout: float | None = flag(None, "dropout rate; the model's own if not given")
    learning_rate: float = flag(3e-4, "peak rate of AdamW")
    lr_scheduler_type: str = flag("linear", "a schedule of transformers: linear, cosine, constant ...")
    weight_decay: float = flag(0.0, "AdamW's weight decay")
    adam_beta2: float = flag(0.999, "AdamW's decay of squared gradients; 0.98 suits short runs")
    max_grad_norm: float = flag(1.0, "gradient norm above which gradients are scaled down")
    eval_steps: int | None = flag(None, "evaluate each N steps; each epoch if not given; 0: only at the end")
    save_steps: int | None = flag(None, "checkpoint each N steps; each epoch if not given; 0: never")
    save_total_limit: int | None = flag(None, "delete older checkpoints beyond N once a newer one is verified")
    logging_steps: int = flag(10, "record the loss each N steps")
    early_stopping_patience: int = flag(0, "stop after N evaluations without a better loss; 0: never")
    early_stopping_threshold: float = flag(0.0, "how much lower the loss must be to count as better")
    load_best_model: bool = flag(False, "True | False: end with the checkpoint of the lowest evaluation loss")
    resume: str = flag("auto", "auto | never | DIR: go on from the last checkpoint, start again, or a checkpoint")
    memory_interval: float = flag(0.5, "seconds between two samples of memory (memory/N.csv); 0: none")
    threads: int = flag(0, "CPU threads of a process; 0: as many as cores")
    seed: int = flag(42, "seed of weights, order and dropout")
    local_rank: int = flag(-1, "given by the DeepSpeed launcher")

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        one_of("init", self.init, INITS)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            within(name, getattr(self, name), 1, MOST_ROWS)
        for name in ("logging_steps", "save_total_limit"):
            at_least(name, getattr(self, name), 1)
        for name in ("early_stopping_patience", "early_stopping_threshold"):
            at_least(name, getattr(self, name), 0)
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "memory_interval"):
            finite(name, getattr(self, name))
        within("threads", self.threads, 0, MOST_THREADS)
        within("seed", self.seed, 0, MOST_SEED)
        for name in ("eval_steps", "save_steps"):
            at_least(name, getattr(self, name), 0)
        below_one("dropout", self.dropout)
        self._check_best_model()

    def _check_best_model(self) -> None:
        if not self.wants_best_model:
            return
        if self.eval_steps == 0 or self.save_steps == 0 or self.eval_steps != self.save_steps:
            raise UserError(
                f"--eval_steps {self.eval_steps} and --save_steps {self.save_steps}: the best model is found "
                "among checkpoints that were evaluated; give both the same value above 0, or neither"
            )

    @property
    def run_folder(self) -> Path:
        """`--outputdir` as a path."""
        return Path(self.outputdir)

    @property
    def wants_best_model(self) -> bool:
        """Whether the run ends with its best checkpoint, not its last weights."""
        return self.load_best_model or self.early_stopping_patience > 0

    def comparable(self) -> dict[str, Any]:
        """What must be equal for two calls to mean the same run."""
        flags = {k: v for k, v in asdict(self).items() if k not in NO_SETTINGS}
        return {k: v for k, v in flags.items() if k not in LATER or v != LATER[k]}

    # The engine's words for what scripts call by other names, and for what not all of them have.

    @property
    @abstractmethod
    def model_id(self) -> str:
        """Hub id, local folder or name of a known shape."""

    @property
    @abstractmethod
    def dataset_path(self) -> str:
        """What the run's data are named by."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Passes over the train split."""

    @property
    @abstractmethod
    def max_steps(self) -> int:
        """Optimizer steps; -1: as many as `epochs` takes."""

    @property
    @abstractmethod
    def warmup_steps(self) -> int:
        """Optimizer steps over which the rate rises."""

    @property
    def max_train_seconds(self) -> float:
        """Training time by which the rate is 0; 0: no limit."""
        return 0.0

    @property
    def scaled_rates(self) -> bool:
        """Whether rates differ by kind of weight."""
        return False

    @property
    def compile(self) -> str:
        """What of the model is compiled, as `compiled.compile_model` has it."""
        return "off"

    @property
    def tf32(self) -> bool:
        """Whether FP32 products may be taken in TF32."""
        return False

    @property
    def adam_beta1(self) -> float:
        """AdamW's decay of gradients."""
        return 0.9

    @property
    def eval_on_start(self) -> bool:
        """Whether the model is evaluated before its first step."""
        return False

    @property
    def max_eval_steps(self) -> int | None:
        """Forward passes of an evaluation, over all ranks; None: the whole split."""
        return None

    @property
    def dataloader_num_workers(self) -> int:
        """Processes that make training batches; 0: the rank itself."""
        return 0


# What a text-to-SQL run is asked to do, as flags.

COMPILED = ("off", "blocks", "graphs")
MOST_MULTIPLE = 1_024


@dataclass(kw_only=True)
class TextToSQLArguments(RunArguments):
    """Flags of `textsql_train.py`: the original's names, and what it lacked."""

    script: ClassVar[str] = "textsql_train.py"
    description: ClassVar[str] = "Fine-tune T5 on text-to-SQL."
    model_flag: ClassVar[str] = "model_id"
    data_flag: ClassVar[str] = "dataset_path"
    prompts: ClassVar[tuple[str, ...]] = ("schema", "question")
    fp16_fault: ClassVar[str | None] = "T5's activations overflow FP16, the loss becomes NaN"

    model_id: str = flag("t5-small", "hub id, local folder, or with --init random the name of a known shape")
    dataset_path: str = flag("wikisql_tok_dataset", "prepared data set (zeropods prepare --out)")
    outputdir: str = flag("runs/textsql", "the run folder: everything of this run, and nothing else")
    epochs: float = flag(3.0, "passes over the train split")
    max_steps: int = flag(-1, "optimizer steps; wins over --epochs")
    max_train_seconds: float = flag(0.0, "stop after so much training time, with the rate decayed to 0 by then")
    generation_max_length: int = flag(96, "most new tokens of a prediction, stored with the model")
    generation_num_beams: int = flag(1, "beams of a prediction, stored with the model")
    scaled_rates: bool = flag(False, "True | False: higher rates for embedding, position bias and norms")
    warmup_steps: int = flag(0, "optimizer steps over which the rate rises")
    pad_to_multiple_of: int = flag(1, "pad lengths to a multiple of N, so that a GPU meets few shapes")
    compile: str = flag(
        "off", "off | blocks | graphs: compile each layer, or both stacks and replay them as CUDA graphs"
    )
    tf32: bool = flag(False, "True | False: FP32 products in TF32, on GPUs that have it")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("generation_max_length", "generation_num_beams"):
            at_least(name, getattr(self, name), 1)
        at_least("warmup_steps", self.warmup_steps, 0)
        finite("max_train_seconds", self.max_train_seconds)
        amount("max_steps", self.max_steps, "epochs", self.epochs)
        within("pad_to_multiple_of", self.pad_to_multiple_of, 1, MOST_MULTIPLE)
        one_of("compile", self.compile, COMPILED)
        self._check_graphs()

    def _check_graphs(self) -> None:
        if self.compile != "graphs":
            return
        if self.gradient_accumulation_steps > 1:
            raise UserError(
                f"--compile graphs --gradient_accumulation_steps {self.gradient_accumulation_steps}: the next pass "
                "writes over a graph's gradients; take 1 pass, or --compile blocks"
            )
        if self.deepspeed is not None or self.gradient_checkpointing:
            other = "--gradient_checkpointing True" if self.deepspeed is None else f"--deepspeed {self.deepspeed}"
            raise UserError(f"--compile graphs {other}: cannot be recorded as a graph; take --compile blocks")


def parse_arguments(argv: Sequence[str]) -> TextToSQLArguments:
    """Read the flags of `textsql_train.py` strictly."""
    kind = TextToSQLArguments
    return parse_flags(kind, argv, script=kind.script, description=kind.description)


def read_text2sql_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The flags of a call of `textsql_train.py`, with their defaults, without loading transformers."""
    return read_flags(TextToSQLArguments, argv)


# What a run of a causal language model is asked to do, as flags.

TASKS = ("squad", "lm")
LOSSES = ("answer", "all")
MAX_SEQ_LENGTH = 512
"""Tokens of a row of raw data, where nothing else is said: the workshop's."""
MOST_WORKERS = 128
"""Processes that make batches, for each rank."""
ATTENTIONS = ("eager", "sdpa", "flash_attention_2")


@dataclass(kw_only=True)
class CausalArguments(RunArguments):
    """Flags of `causal_train.py`; without any, the SQuAD workshop's settings."""

    script: ClassVar[str] = "causal_train.py"
    description: ClassVar[str] = "Fine-tune a causal language model on questions (squad) or on plain text (lm)."
    model_flag: ClassVar[str] = "model_name_or_path"
    data_flag: ClassVar[str] = "data"
    prompts: ClassVar[tuple[str, ...]] = TASKS

    model_name_or_path: str = flag(
        "bigscience/bloom-560m", "hub id, local folder, or with --init random the name of a known shape"
    )
    tokenizer_name: str | None = flag(None, "hub id, folder, or gpt-tiny, for raw data; the model's own if not given")
    outputdir: str = flag("runs/causal", "the run folder: everything of this run, and nothing else")
    task: str | None = flag(None, "squad | lm; a prepared set says it itself; squad if not given with raw data")
    data: str = flag("squad", "prepared set (zeropods prepare --out), folder of raw data, or for lm a hub id")
    dataset_config: str | None = flag(None, "configuration of a data set at the hub, such as en of allenai/c4")
    text_field: str | None = flag(None, "field that holds the text of JSON lines, Parquet or a hub data set; text")
    max_seq_length: int | None = flag(None, "most tokens of a row, or tokens of a block; 512 with raw data")
    loss_on: str | None = flag(None, "answer | all: which tokens of a squad row carry the loss; answer")
    subset: int | None = flag(None, "only the first N questions or documents of raw data, or rows of a prepared set")
    per_device_train_batch_size: int = flag(4, "training rows a process and forward pass")
    per_device_eval_batch_size: int = flag(4, "evaluation rows a process and forward pass")
    gradient_accumulation_steps: int = flag(4, "forward passes for an optimizer step")
    learning_rate: float = flag(5e-5, "peak rate of AdamW")
    weight_decay: float = flag(0.01, "AdamW's weight decay")
    adam_beta1: float = flag(0.9, "AdamW's decay of gradients")
    num_train_epochs: float = flag(3.0, "passes over the train split")
    max_train_steps: int = flag(-1, "optimizer steps; wins over --num_train_epochs")
    num_warmup_steps: int = flag(0, "optimizer steps over which the rate rises")
    max_eval_steps: int | None = flag(None, "forward passes of an evaluation, over all processes; all if not given")
    eval_on_start: bool = flag(False, "True | False: evaluate before the first step too")
    attn_implementation: str = flag("sdpa", "eager | sdpa | flash_attention_2")
    dataloader_num_workers: int = flag(0, "processes that make training batches; 0: the rank itself")
    generation_prompt: str | None = flag(None, "text that the trained model goes on with (generated.json)")

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task", self.task, TASKS)
        one_of("loss_on", self.loss_on, LOSSES)
        one_of("attn_implementation", self.attn_implementation, ATTENTIONS)
        at_least("max_seq_length", self.max_seq_length, 2)
        for name in ("subset", "max_eval_steps"):
            at_least(name, getattr(self, name), 1)
        at_least("num_warmup_steps", self.num_warmup_steps, 0)
        within("dataloader_num_workers", self.dataloader_num_workers, 0, MOST_WORKERS)
        for name in ("adam_beta1", "adam_beta2"):
            below_one(name, getattr(self, name))
        amount("max_train_steps", self.max_train_steps, "num_train_epochs", self.num_train_epochs)
        if self.task == "lm" and self.loss_on == "answer":
            raise UserError("--loss_on answer: the text of --task lm has no answers; leave it out")

    @property
    def model_id(self) -> str:
        """`--model_name_or_path`."""
        return self.model_name_or_path

    @property
    def dataset_path(self) -> str:
        """`--data`."""
        return self.data

    @property
    def epochs(self) -> float:
        """`--num_train_epochs`."""
        return self.num_train_epochs

    @property
    def max_steps(self) -> int:
        """`--max_train_steps`."""
        return self.max_train_steps

    @property
    def warmup_steps(self) -> int:
        """`--num_warmup_steps`."""
        return self.num_warmup_steps


def parse_causal_arguments(argv: Sequence[str]) -> CausalArguments:
    """Read the flags of `causal_train.py` strictly."""
    kind = CausalArguments
    return parse_flags(kind, argv, script=kind.script, description=kind.description)


# The project's own training scripts and their flags, so that a call can be checked before anything is launched.

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS: dict[str, type[RunArguments]] = {kind.script: kind for kind in (TextToSQLArguments, CausalArguments)}
"""By the file's name, at the top of the project."""


def arguments_of(script: str | Path) -> type[RunArguments] | None:
    """The flags of one of our scripts, by its name or its place; None for another one."""
    path = Path(script)
    ours = path == Path(path.name) or path == PROJECT / path.name
    return SCRIPTS.get(path.name) if ours else None


def unknown_flag(kind: type[RunArguments], name: str, known: list[str]) -> str | None:
    """What is wrong with a flag's name, given without dashes, with the remedy; None where a script knows it."""
    if name in known:
        return None
    near = get_close_matches(name, known, 1)
    return f"no flag of {kind.script}; {f'{near[0]}?' if near else '--help lists them'}"
