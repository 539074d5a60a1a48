"""The cells: the matrix of twelve, an ablation, and runs whose final losses are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zeropods.techniques import technique_named

ORIGINAL_BATCH = 32
PROMPTS = ("question", "schema")
"""Prompts of the control and the cells compared with it, and of cells with the best batch."""
MULTIPLES = {"off": 8, "blocks": 16, "graphs": 16}
"""The multiple of tokens to which a run pads lengths on a GPU (zeropods.train.device), by the way
it is compiled."""
PREDICTED_QUESTIONS = 2_000
QUESTIONS_ON_CPU = 64
MODEL_OF_PREDICTION = "t5-small"
NEW_TOKENS = 32
"""Number of tokens of an answer: random weights never stop, and a target of WikiSQL has 22 tokens
on average."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement; its name says what it is."""

    name: str
    kind: str
    """`control`: the original's recipe; `train`: textsql_train.py; `causal`: causal_train.py, the
    SQuAD workshop's job; `predict`: zeropods predict."""
    model: str
    technique: str = "none"
    prompt: str = "question"
    batch: int | None = ORIGINAL_BATCH
    """Number of rows of a pass; None: the best batch, as planned and tried."""
    passes: int = 1
    """Forward and backward passes of an optimizer step."""
    precision: str = "bf16"
    compile: str = "off"
    checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""
    multiple: int | None = None
    """The multiple of tokens to which lengths are padded; None: the run's own choice."""
    dropout: float | None = None
    steps: int | None = None
    """Number of optimizer steps; None: as many as the time allows."""
    seed: int = 42
    without: str | None = None
    """A measure that has no flag and is taken away, by its name in `without.TAKEN`."""
    profiled: bool = False
    """Whether DeepSpeed's flops profiler looks at a step."""
    cudnn_attention: bool = False
    """Whether torch may choose cuDNN's attention, which a run otherwise forbids."""
    questions: int = PREDICTED_QUESTIONS
    """Number of dev questions of `predict`."""
    keeps_model: bool = False
    """Whether the trained weights are saved: `predict` reads them."""

    @property
    def padded_to(self) -> int:
        """The multiple of tokens to which lengths are padded."""
        if self.multiple is None:
            return MULTIPLES[self.compile]
        return self.multiple

    @property
    def is_causal(self) -> bool:
        """Whether it trains a decoder-only model."""
        return self.kind == "causal"

    @property
    def offloads(self) -> bool:
        """Whether the optimizer is stepped in main memory, by an operation that DeepSpeed
        compiles."""
        return technique_named(self.technique).offloads

    @property
    def needs_deepspeed(self) -> bool:
        """Whether the cell cannot run without that package."""
        return self.technique != "none"


def matrix() -> list[Cell]:
    """The twelve cells; those that others are compared with come first."""
    cells = []
    for model in ("t5-small", "t5-large"):
        # A step of 32 rows waits for launches, of which few are left where both stacks are
        # replayed. Compiling the stacks takes minutes for 24 layers; a large batch is as fast with
        # each layer compiled.
        cells += [
            Cell(
                name=f"{model}-control", kind="control", model=model, precision="fp32", multiple=96
            ),
            Cell(
                name=f"{model}-none-32",
                kind="train",
                model=model,
                compile="graphs",
                keeps_model=model == MODEL_OF_PREDICTION,
            ),
            Cell(
                name=f"{model}-none-best",
                kind="train",
                model=model,
                prompt="schema",
                batch=None,
                compile="blocks",
            ),
            Cell(
                name=f"{model}-zero1-32",
                kind="train",
                model=model,
                technique="zero1",
                compile="blocks",
            ),
            Cell(
                name=f"{model}-zero3_offload-32",
                kind="train",
                model=model,
                technique="zero3_offload",
            ),
        ]
    base = Cell(
        name="t5-base-none-best",
        kind="train",
        model="t5-base",
        prompt="schema",
        batch=None,
        compile="blocks",
    )
    predict = Cell(name="t5-small-predict", kind="predict", model="t5-small", batch=512)
    return [*cells, base, predict]


ABLATION: dict[str, tuple[dict[str, Any], str]] = {
    "ablation-fast": (
        {},
        "the fast path: BF16 with FP32 masters, CUDA graphs, lengths in multiples of 8",
    ),
    "ablation-blocks": (
        {"compile": "blocks"},
        "without CUDA graphs: each layer compiled",
    ),
    "ablation-uncompiled": (
        {"compile": "off"},
        "without compilation",
    ),
    "ablation-many-lengths": (
        {"compile": "blocks", "multiple": 1},
        "without CUDA graphs and without multiples of 16",
    ),
    "ablation-fp32": (
        {"precision": "fp32"},
        "without BF16",
    ),
    "ablation-whole-logits": (
        {"without": "label-positions"},
        "with a loss over all positions",
    ),
    "ablation-waiting": (
        {"without": "running-ahead"},
        "with copies that wait for the GPU",
    ),
    "ablation-unfused": (
        {"without": "fused-adamw"},
        "without fused AdamW",
    ),
    "ablation-zero1-unfused": (
        {"technique": "zero1", "compile": "blocks", "without": "fused-adamw"},
        "ZeRO-1 without fused AdamW, beside t5-small-zero1-32",
    ),
}
"""What each run of the ablation changes in the fast path, and the same in words."""
ABLATED_FROM = {"ablation-zero1-unfused": "t5-small-zero1-32"}
"""The cell that a run is compared with, where that is not `ablation-fast`."""


def ablation() -> list[Cell]:
    """The fast path of t5-small at batch 32, and the same with each of its measures taken away
    once."""
    fast = Cell(name="ablation-fast", kind="train", model="t5-small", compile="graphs")
    return [replace(fast, name=name, **changes) for name, (changes, _) in ABLATION.items()]


def comparison(steps: int) -> list[Cell]:
    """Runs over the same rows in the same order without dropout, in FP32 and on the fast path; one
    more for noise."""
    exact = Cell(
        name="losses-fp32",
        kind="train",
        model="t5-small",
        precision="fp32",
        dropout=0.0,
        steps=steps,
        multiple=MULTIPLES["graphs"],
    )
    return [
        exact,
        replace(exact, name="losses-fast", precision="bf16", compile="graphs"),
        replace(exact, name="losses-fp32-other-seed", seed=43),
    ]


def for_cpu(cell: Cell) -> Cell:
    """The same cell with a model that a CPU trains in seconds, uncompiled: a CPU has no launches to
    save."""
    batch = cell.batch
    if batch is not None:
        batch = min(batch, ORIGINAL_BATCH)
    return replace(
        cell,
        model="bloom-tiny" if cell.is_causal else "t5-tiny",
        compile="off",
        precision="fp32" if cell.precision == "fp32" else "auto",
        batch=batch,
        questions=min(cell.questions, QUESTIONS_ON_CPU),
    )


def recompiled(cell: Cell, how: str | None) -> Cell:
    """The cell, compiled in the way that a call asks for, if any; ZeRO-3 and the control are never
    compiled."""
    is_never_compiled = cell.kind != "train" or cell.technique.startswith("zero3")
    if how is None or is_never_compiled:
        return cell
    if how == "graphs" and cell.needs_deepspeed:
        how = "blocks"
    return replace(cell, compile=how)
