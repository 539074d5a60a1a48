"""What a run of a causal language model is asked to do, as flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from zeropods.errors import UserError
from zeropods.train.flags import amount, at_least, below_one, flag, one_of, parse_flags, within
from zeropods.train.run_arguments import RunArguments

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


def parse_arguments(argv: Sequence[str]) -> CausalArguments:
    """Read the flags of `causal_train.py` strictly."""
    kind = CausalArguments
    return parse_flags(kind, argv, script=kind.script, description=kind.description)
