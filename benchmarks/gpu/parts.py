"""The calls of a session on a GPU that is lent for a quarter of an hour: what each measures, by
worth.

A call is a list of steps. A step has a limit of seconds, and is skipped where less than half of it
is left: a call that is cut off has measured what matters most.

`a` and `b` fit into a quarter of an hour together, and so do `c` and `d`: what is compiled, for
which torch needs more than a minute before the first step on a slow host, and a decoder-only model
of today.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.gpu.cells import MODEL_OF_PREDICTION, Cell, matrix

STEADY_SECONDS = 6.0
"""Seconds of steady steps of a cell: short, since a quarter of an hour has to do for all of
them."""
TECHNIQUES = ("none", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
"""Techniques of the SQuAD workshop's table on one GPU; those with offload come last, since
DeepSpeed compiles their operation meanwhile."""
WORKSHOP_STEPS = 10
"""Optimizer steps of each of its runs: the first is left out of its rate."""
ATTENTION_STEPS = 60
"""Optimizer steps of the two runs that differ in cuDNN's attention: some 30 pairs of lengths."""
PROFILED_STEPS = 4
ASKED_WITH_CUDNN = 512
"""Questions of the prediction that may use cuDNN's attention: one batch meets a new length at
nearly every token."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a call: some cells that share its limit, or, without cells, the facts of the
    machine."""

    name: str
    most_seconds: float
    """Limit of the whole step."""
    cells: tuple[Cell, ...] = ()

    @property
    def least_seconds(self) -> float:
        """Seconds that must be left for the step to begin."""
        return self.most_seconds / 2


def parts() -> dict[str, tuple[Step, ...]]:
    """The calls by their names."""
    return {"a": _first_facts(), "b": _tables(), "c": _compiled(), "d": _decoder_only()}


def _first_facts() -> tuple[Step, ...]:
    """What nobody has measured yet of this project on a GPU, in its shortest form."""
    known = {cell.name: cell for cell in matrix()}
    control = known["t5-small-control"]
    predicted = known["t5-small-predict"]
    uncompiled, profiled, offloaded = _small_runs()
    with_cudnn = replace(
        predicted,
        name="t5-small-predict-cudnn",
        cudnn_attention=True,
        questions=ASKED_WITH_CUDNN,
    )
    return (
        Step(name="facts", most_seconds=60),
        Step(name="recipe", most_seconds=90, cells=(control, uncompiled)),
        Step(name="prediction", most_seconds=60, cells=(predicted,)),
        Step(name="attention", most_seconds=90, cells=_with_and_without_cudnn()),
        Step(name="profiler", most_seconds=40, cells=(profiled,)),
        Step(name="prediction with cuDNN", most_seconds=60, cells=(with_cudnn,)),
        Step(name="offload", most_seconds=90, cells=(offloaded,)),
    )


def _small_runs() -> tuple[Cell, Cell, Cell]:
    """Trainings of t5-small: uncompiled, as predictions need it; profiled; with offload."""
    uncompiled = Cell(
        name="t5-small-uncompiled-32",
        kind="train",
        model=MODEL_OF_PREDICTION,
        keeps_model=True,
    )
    profiled = Cell(
        name="t5-small-profiled",
        kind="train",
        model="t5-small",
        technique="zero1",
        steps=PROFILED_STEPS,
        profiled=True,
    )
    offloaded = Cell(
        name="t5-small-zero3_offload-32",
        kind="train",
        model="t5-small",
        technique="zero3_offload",
        steps=20,
    )
    return uncompiled, profiled, offloaded


def _with_and_without_cudnn() -> tuple[Cell, Cell]:
    """Two trainings that differ in whether torch may choose cuDNN's attention."""
    without = Cell(
        name="t5-small-cudnn-off",
        kind="train",
        model="t5-small",
        steps=ATTENTION_STEPS,
    )
    return without, replace(without, name="t5-small-cudnn-on", cudnn_attention=True)


def _tables() -> tuple[Step, ...]:
    """The workshop's table, then both T5 at their best batch, uncompiled."""
    known = {cell.name: cell for cell in matrix()}
    steps = []
    for technique in TECHNIQUES:
        cell = _workshop(technique)
        steps.append(Step(name=f"workshop {technique}", most_seconds=60, cells=(cell,)))
    for model in ("t5-large", "t5-small"):
        control = known[f"{model}-control"]
        best = replace(known[f"{model}-none-best"], name=f"{model}-uncompiled-best", compile="off")
        steps.append(Step(name=model, most_seconds=100, cells=(control, best)))
    return tuple(steps)


def _compiled() -> tuple[Step, ...]:
    """Both T5 compiled, each beside the recipe in the same call; CUDA graphs last, since they ended
    by SIGSEGV where they were tried."""
    known = {cell.name: cell for cell in matrix()}
    small = ("t5-small-control", "t5-small-none-32")
    large = ("t5-large-control", "t5-large-none-best")
    return (
        Step(
            name="t5-large by layers", most_seconds=220, cells=tuple(known[name] for name in large)
        ),
        Step(name="t5-small by layers", most_seconds=120, cells=(known["t5-small-none-best"],)),
        Step(
            name="t5-small as CUDA graphs",
            most_seconds=300,
            cells=tuple(known[name] for name in small),
        ),
    )


def _decoder_only() -> tuple[Step, ...]:
    """A decoder-only model with grouped queries and a large vocabulary, with and without recomputed
    activations."""
    plain = Cell(
        name="qwen3-0.6b-none",
        kind="causal",
        model="qwen3-0.6b",
        prompt="squad",
        batch=16,
        steps=WORKSHOP_STEPS,
        multiple=1,
    )
    checkpointing = replace(plain, name="qwen3-0.6b-none-checkpointing", checkpointing=True)
    zero2 = replace(plain, name="qwen3-0.6b-zero2", technique="zero2")
    zero3 = replace(
        plain, name="qwen3-0.6b-zero3-checkpointing", technique="zero3", checkpointing=True
    )
    steps = []
    for cell in (plain, checkpointing, zero2, zero3):
        steps.append(Step(name=cell.name, most_seconds=60, cells=(cell,)))
    return tuple(steps)


def _workshop(technique: str) -> Cell:
    """The SQuAD workshop's job by one technique: batch 4, four passes, FP16, no checkpointing."""
    return Cell(
        name=f"bloom-560m-{technique}",
        kind="causal",
        model="bloom-560m",
        technique=technique,
        prompt="squad",
        batch=4,
        passes=4,
        precision="fp16",
        steps=WORKSHOP_STEPS,
        multiple=1,
    )
