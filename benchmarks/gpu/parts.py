"""The calls of a session on a GPU that is lent for a quarter of an hour: what each measures, by
worth.

A call is a list of steps. A step has a limit of seconds, and is skipped where less than half of it
is left: a call that is cut off has measured what matters most.

`a` and `b` fit into a quarter of an hour together, and so do `c` and `d`: what is compiled, for
which torch needs more than a minute before the first step on a slow host, and a decoder-only model
of today. So do `e`, with `g` beside it, and `f`: the commands that people type, notebooks, and runs
that are planned beforehand by what a probe measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.gpu.cells import MODEL_OF_PREDICTION, Cell, matrix
from benchmarks.gpu.commands import Command, zeropods
from zeropods.tables import GIB

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
    """A step of a call: some cells or commands that share its limit, or, without either, the facts
    of the machine."""

    name: str
    most_seconds: float
    """Limit of the whole step."""
    cells: tuple[Cell, ...] = ()
    commands: tuple[Command, ...] = ()

    @property
    def least_seconds(self) -> float:
        """Seconds that must be left for the step to begin."""
        return self.most_seconds / 2


def parts() -> dict[str, tuple[Step, ...]]:
    """The calls by their names."""
    return {
        "a": _first_facts(),
        "b": _tables(),
        "c": _compiled(),
        "d": _decoder_only(),
        "e": _typed(),
        "f": _planned_by_a_probe(),
        "g": _notebooks(),
    }


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
    plain = _qwen3("qwen3-0.6b")
    checkpointing = replace(plain, name="qwen3-0.6b-none-checkpointing", checkpointing=True)
    zero2 = replace(plain, name="qwen3-0.6b-zero2", technique="zero2")
    zero3 = replace(
        plain, name="qwen3-0.6b-zero3-checkpointing", technique="zero3", checkpointing=True
    )
    steps = []
    for cell in (plain, checkpointing, zero2, zero3):
        steps.append(Step(name=cell.name, most_seconds=60, cells=(cell,)))
    return tuple(steps)


FEW_BYTES = 6 * GIB
"""What a neighbour leaves of the GPU: too little for the largest batch that is asked for."""
FEW_STEPS = ("--eval_steps", "0", "--learning_rate", "1e-4", "--logging_steps", "10")


def _typed() -> tuple[Step, ...]:
    """What people type, from a probe to a summary; a probe is what the plans of `f` go by."""
    pod = ("launch", "--name", "one")
    kept = _training("undisturbed", "zero2", "--max_steps", "150", "--save_steps", "25")
    killed = _training("killed", "zero2", "--max_steps", "150", "--save_steps", "25")
    profiled = _training("profiled", "zero1profiler", "--max_steps", "6", "--save_steps", "0")
    offloaded = _training("offloaded", "zero3_offload", "--max_steps", "20", "--save_steps", "0")
    tune = ("plan", "--model", "{runs}/undisturbed", "--tune")
    large_batch = ("--technique", "none", "--batch-size", "2048", "--out", "{runs}/crowded")
    answers = ("--data", "{data}/wikisql", "--split", "dev", "--limit", "2000", "--score")
    told = (
        zeropods("probe", "probe", "--alone", "--json"),
        zeropods("pods up", "pods", "up", "--count", "1", "--name", "one"),
        zeropods("pods check", "pods", "check", "--name", "one"),
        zeropods("undisturbed", *pod, *kept),
        zeropods("killed", *pod, "--restarts", "1", *killed, kills_rank_at=60),
        zeropods("pods down", "pods", "down", "--name", "one"),
        zeropods("tune", *tune, "{data}/question", "--out", "{runs}/tune"),
        zeropods(
            "tune beside a neighbour", *tune, "{data}/schema", *large_batch, leaves_bytes=FEW_BYTES
        ),
        zeropods("plan again", "plan", "--model", "{runs}/undisturbed", *large_batch[:-2]),
        zeropods("two pods", "pods", "up", "--count", "2", "--name", "two"),
        zeropods("two pods down", "pods", "down", "--name", "two"),
        zeropods("profiled", "launch", "--launcher", "none", *profiled),
        zeropods("profile", "profile", "{runs}/profiled"),
        zeropods(
            "predict",
            *("predict", "--model", "zeropods/models/t5-tiny", "--link-cells", *answers),
            *("--out", "{runs}/predictions.dev.jsonl"),
        ),
        zeropods("offloaded", "launch", "--launcher", "none", *offloaded),
        zeropods("summary", "summary", "{runs}", "--out", "{runs}/summary"),
    )
    steps = []
    for command in told:
        # Of tuning, each try is a run.
        most_seconds = 100 if "--tune" in command.words else 60
        steps.append(Step(name=command.name, most_seconds=most_seconds, commands=(command,)))
    return tuple(steps)


def _training(name: str, configuration: str, *flags: str) -> tuple[str, ...]:
    """The words of a training by a file of `dsconfig/`, into the run folder of this name."""
    script = ("--", "textsql_train.py", "--init", "random", "--model_id", "{model}")
    places = ("--dataset_path", "{data}/question", "--outputdir", f"{{runs}}/{name}")
    by = ("--deepspeed", f"dsconfig/{configuration}.json")
    return (*script, *places, *by, *FEW_STEPS, *flags)


def _notebooks() -> tuple[Step, ...]:
    """The notebooks of `make demo`."""
    demo = Command(
        name="demo",
        words=("tools/demo.py", "--out", "{runs}/notebooks"),
        variables={"ZEROPODS_RUNS": "{runs}/demo"},
    )
    return (Step(name="demo", most_seconds=600, commands=(demo,)),)


def _planned_by_a_probe() -> tuple[Step, ...]:
    """Runs of several sizes, which are planned by what the probe of `e` measured: small ones wait
    for the host, and Qwen3 1.7B for the GPU."""
    known = {cell.name: cell for cell in matrix()}
    uncompiled, _, _ = _small_runs()
    small_best = replace(
        known["t5-small-none-best"], name="t5-small-uncompiled-best", compile="off"
    )
    large_best = replace(
        known["t5-large-none-best"], name="t5-large-uncompiled-best", compile="off"
    )
    qwen = _qwen3("qwen3-1.7b")
    steps = [
        Step(name="facts", most_seconds=40),
        Step(name="recipe", most_seconds=50, cells=(known["t5-small-control"], uncompiled)),
        Step(name="t5-small at its best", most_seconds=40, cells=(small_best,)),
        Step(name=qwen.name, most_seconds=70, cells=(qwen,)),
    ]
    others = [
        replace(qwen, name="qwen3-1.7b-zero2", technique="zero2"),
        replace(qwen, name="qwen3-1.7b-zero3", technique="zero3"),
        _workshop("none"),
        _workshop("zero2"),
        replace(qwen, name="qwen3-1.7b-none-checkpointing", checkpointing=True),
        _workshop("zero3"),
        _workshop("zero2_offload"),
        known["t5-large-control"],
        large_best,
        replace(qwen, name="qwen3-1.7b-zero3_offload", technique="zero3_offload"),
    ]
    for cell in others:
        # Drawing the weights of the larger ones takes longer than their steps.
        most_seconds = 50 if cell.model == "bloom-560m" else 70
        steps.append(Step(name=cell.name, most_seconds=most_seconds, cells=(cell,)))
    return tuple(steps)


def _qwen3(model: str) -> Cell:
    """A Qwen3 on the SQuAD workshop's data by `none`: batch 16 in BF16."""
    return Cell(
        name=f"{model}-none",
        kind="causal",
        model=model,
        prompt="squad",
        batch=16,
        steps=WORKSHOP_STEPS,
        multiple=1,
    )


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
