"""What a text-to-SQL run is asked to do, as flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from zeropods.errors import UserError
from zeropods.train import flags
from zeropods.train.flags import amount, at_least, finite, flag, one_of, within
from zeropods.train.run_arguments import RunArguments

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
    return flags.parse_flags(kind, argv, script=kind.script, description=kind.description)


def read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The flags of a call of `textsql_train.py`, with their defaults, without loading transformers."""
    return flags.read_flags(TextToSQLArguments, argv)
