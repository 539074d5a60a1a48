"""The flags that every training script has, under the same names, and what the engine asks of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from zeropods.errors import UserError
from zeropods.train.flags import at_least, below_one, finite, flag, one_of, within

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
