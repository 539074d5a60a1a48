"""What a fine-tuning run is asked to do, as flags."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from zeropods.errors import UserError

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
READERS: dict[type, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"True": True, "False": False}[text],
}
INITS = ("pretrained", "random")
COUNTS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "generation_max_length",
    "generation_num_beams",
    "logging_steps",
)
"""Flags whose value is at least 1."""
NO_SETTINGS = ("local_rank", "resume", "outputdir", "memory_interval")
"""Flags that change where and how a run is written down, not what it does."""


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class TextToSQLArguments:
    """Flags of `textsql_train.py`: the original's names, and what it lacked."""

    model_id: str = _flag("t5-small", "hub id, local folder, or with --init random the name of a known shape")
    init: str = _flag("pretrained", "pretrained | random: load weights, or draw them for the shape")
    dataset_path: str = _flag("wikisql_tok_dataset", "prepared data set (zeropods prepare --out)")
    outputdir: str = _flag("runs/textsql", "the run folder: everything of this run, and nothing else")
    epochs: float = _flag(3.0, "passes over the train split")
    max_steps: int = _flag(-1, "optimizer steps; wins over --epochs")
    max_train_seconds: float = _flag(0.0, "stop after so much training time, with the rate decayed to 0 by then")
    per_device_train_batch_size: int = _flag(32, "training rows a process and forward pass")
    per_device_eval_batch_size: int = _flag(64, "evaluation rows a process and forward pass")
    gradient_accumulation_steps: int = _flag(1, "forward passes for an optimizer step")
    generation_max_length: int = _flag(96, "most new tokens of a prediction, stored with the model")
    generation_num_beams: int = _flag(1, "beams of a prediction, stored with the model")
    gradient_checkpointing: bool = _flag(False, "True | False: recompute activations in the backward pass")
    deepspeed: str | None = _flag(None, "DeepSpeed configuration file (dsconfig/TECHNIQUE.json)")
    precision: str = _flag("auto", "fp32 | bf16 | fp16 | auto: bf16 where the hardware multiplies it, else fp32")
    dropout: float | None = _flag(None, "dropout rate; the model's own if not given")
    learning_rate: float = _flag(3e-4, "peak rate of AdamW")
    scaled_rates: bool = _flag(False, "True | False: higher rates for embedding, position bias and norms")
    lr_scheduler_type: str = _flag("linear", "a schedule of transformers: linear, cosine, constant ...")
    warmup_steps: int = _flag(0, "optimizer steps over which the rate rises")
    weight_decay: float = _flag(0.0, "AdamW's weight decay")
    adam_beta2: float = _flag(0.999, "AdamW's decay of squared gradients; 0.98 suits short runs")
    max_grad_norm: float = _flag(1.0, "gradient norm above which gradients are scaled down")
    eval_steps: int | None = _flag(None, "evaluate each N steps; each epoch if not given; 0: only at the end")
    save_steps: int | None = _flag(None, "checkpoint each N steps; each epoch if not given; 0: never")
    logging_steps: int = _flag(10, "record the loss each N steps")
    early_stopping_patience: int = _flag(0, "stop after N evaluations without a better loss; 0: never")
    early_stopping_threshold: float = _flag(0.0, "how much lower the loss must be to count as better")
    load_best_model: bool = _flag(False, "True | False: end with the checkpoint of the lowest evaluation loss")
    resume: str = _flag("auto", "auto | never | DIR: go on from the last checkpoint, start again, or a checkpoint")
    memory_interval: float = _flag(0.5, "seconds between two samples of memory (memory/N.csv); 0: none")
    threads: int = _flag(0, "CPU threads of a process; 0: as many as cores")
    seed: int = _flag(42, "seed of weights, order and dropout")
    local_rank: int = _flag(-1, "given by the DeepSpeed launcher")

    def __post_init__(self) -> None:
        _one_of("--precision", self.precision, PRECISIONS)
        _one_of("--init", self.init, INITS)
        for name in COUNTS:
            _at_least(name, getattr(self, name), 1)
        for name in (
            "early_stopping_patience",
            "warmup_steps",
            "max_train_seconds",
            "learning_rate",
            "threads",
            "memory_interval",
        ):
            _at_least(name, getattr(self, name), 0)
        for name in ("eval_steps", "save_steps"):
            _at_least(name, getattr(self, name) or 0, 0)
        if self.max_steps != -1:
            _at_least("max_steps", self.max_steps, 1)
        elif self.epochs <= 0:
            raise UserError(f"--epochs {self.epochs}; expected more than 0")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout}; expected 0 or more, and less than 1")
        self._check_best_model()

    def _check_best_model(self) -> None:
        if not (self.load_best_model or self.early_stopping_patience):
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

    def comparable(self) -> dict[str, Any]:
        """What must be equal for two calls to mean the same run."""
        return {k: v for k, v in asdict(self).items() if k not in NO_SETTINGS}


def parse_arguments(argv: list[str]) -> TextToSQLArguments:
    """Read flags strictly: no abbreviation, no unknown flag; argparse ends with status 2 on either."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(
        TextToSQLArguments,
        prog="textsql_train.py",
        allow_abbrev=False,
        description="Fine-tune T5 on text-to-SQL.",
    )
    arguments, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; --help lists the flags")
    return arguments


def read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The flags of a call with their defaults, by name and typed, without loading transformers.

    For a check before launching: what cannot be read is left out, and refused by the script itself.
    """
    types = get_type_hints(TextToSQLArguments)
    words = [word for text in argv for word in (text.split("=", 1) if text.startswith("--") else [text])]
    read = {f.name: f.default for f in fields(TextToSQLArguments)}
    for word, value in itertools.pairwise(words):
        name = word.removeprefix("--")
        if word.startswith("--") and name in types:
            read.pop(name, None)
            with contextlib.suppress(KeyError, ValueError):
                read[name] = READERS[(get_args(types[name]) or (types[name],))[0]](value)
    return read


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{flag} {value!r}; expected {', '.join(choices)}")


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise UserError(f"--{name} {value}; expected at least {least}")
