"""The tasks that models are trained for, each one value here that answers questions about itself,
and the measures by which their models are scored.

A new task needs a value in `TASKS` and, in each of these tables, a line under its name:

* `TASK_DATA` of `data/prepare.py`: what reads its raw data and turns them into rows of tokens;
* where a model answers its examples one by one, `SCORES` of `measure/score_json.py`: the type of
  its scores; `SCORERS` of `evaluate/score.py`: what grades its answers; and `ANSWERERS` of
  `evaluate/generate.py`: what makes them;
* where there is a generated sample of it, `GENERATORS` of `data/sample.py`.

A measure of its own is one more value here, a field of that name in its type of scores, and a line
in docs/figures.md.

The tables lie in the rooms that have what they name, since nothing on this floor knows a room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

TEXT2SQL: Final = "text2sql"
SQUAD: Final = "squad"
LM: Final = "lm"

T5_SCRIPT = "textsql_train.py"
CAUSAL_SCRIPT = "causal_train.py"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of at least 0 that the scores of a task have.

    Tables, the files of a report, the regression gate and what `zeropods score` prints look up here
    what they need of it. It has a 95 % interval where the `intervals` of a score have its name.
    """

    key: str
    """Its key in `summary.json` and `summary.csv`."""
    name: str
    """What people call it; the heading of its column."""
    unit: str = ""
    name_in_score: str = ""
    """Its field in the type of the scores, where that is not `key`."""
    form: str = ".3f"
    """How a value is rounded, as a format specification."""
    is_count: bool = False
    """Whether it says how much was scored, and nothing about how good a model is."""
    is_share: bool = False
    """Whether it lies between 0, where nothing is right, and 1."""
    higher_is_better: bool = True
    exponential_of: str | None = None
    """Key of another measure, whose exponential it is. Its mean over repeats, and how far it may
    rise, follow from those of the other one."""

    @property
    def field(self) -> str:
        """Its field in the type of the scores."""
        return self.name_in_score or self.key

    def text(self, value: float) -> str:
        """A value as people read it."""
        return f"{value:{self.form}}"


EXAMPLE_COUNT = Measure(key="examples", name="examples", form=",.0f", is_count=True)
EXECUTABLE_COUNT = Measure(key="executable", name="executable", form=",.0f", is_count=True)
EXACT_MATCH = Measure(key="exact_match", name="exact match", is_share=True)
LOGICAL_FORM = Measure(key="logical_form_accuracy", name="logical form", is_share=True)
EXECUTION = Measure(key="execution_accuracy", name="execution", is_share=True)
F1 = Measure(key="f1", name="F1", is_share=True)
TOKEN_COUNT = Measure(
    key="text_tokens", name="tokens", name_in_score="tokens", form=",.0f", is_count=True
)
# `loss` and `tokens`, as a score has them, would say too little next to the figures of a run.
TEXT_LOSS = Measure(
    key="text_loss",
    name="loss of the text",
    unit="nats/token",
    name_in_score="loss",
    form=".4f",
    higher_is_better=False,
)
PERPLEXITY = Measure(
    key="perplexity",
    name="perplexity",
    form=",.2f",
    higher_is_better=False,
    exponential_of=TEXT_LOSS.key,
)


@dataclass(frozen=True, kw_only=True)
class LearningTask:
    """What a model learns to do."""

    name: str
    script: str
    """Name of the script that trains it."""
    is_one_text: bool = False
    """Whether a row is one text, as decoder-only models read it, in which some tokens carry a loss;
    otherwise it is a source and a target, for a T5."""
    has_answers: bool = True
    """Whether a model answers the examples one by one, to be scored afterwards. Otherwise its score
    is the perplexity of the text, which training measures."""
    prompts: tuple[str, ...]
    """Ways in which the text of a row is made, the default first: the task's own name where there
    is only one."""
    dataset: str | None = None
    """Name of a published data set, as `zeropods data get` fetches it."""
    reads_hub: bool = False
    """Whether its raw data may be a data set on the hub, with a configuration and a field of
    text."""
    loss_on: str = "all"
    """Tokens of one text that carry a loss unless another choice is made: `answer` or `all`."""
    unit: str = "rows"
    """What the raw data are counted in while they are prepared."""
    preparation_flags: tuple[str, ...] = ()
    """Flags of `zeropods prepare` that it has and some other task has not."""
    has_sample: bool = False
    """Whether `zeropods data sample` generates data for it."""
    has_rouge: bool = False
    """Whether `zeropods score --rouge` compares its answers as texts."""
    has_tables: bool = False
    """Whether its questions are about tables, which training may have seen or not."""
    figures: tuple[Measure, ...] = ()
    """What its scores have, in the order of a summary's columns."""
    judged_by: tuple[Measure, ...] = ()
    """Those of its measures by which a run is judged: the first that was measured, else the
    last."""
    printed: tuple[Measure, ...] = ()
    """Its measures in the order in which `zeropods score` prints them, where that is not the order
    of the columns."""

    @property
    def chooses_prompt(self) -> bool:
        """Whether its prompt is a choice, which a model has to record."""
        return len(self.prompts) > 1

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The figures of its scores that say how good a model is."""
        return tuple(figure for figure in self.figures if not figure.is_count)

    @property
    def printed_measures(self) -> tuple[Measure, ...]:
        """Its measures in the order in which `zeropods score` prints them."""
        return self.printed or self.measures


TASKS = {
    TEXT2SQL: LearningTask(
        name=TEXT2SQL,
        script=T5_SCRIPT,
        prompts=("schema", "question"),
        dataset="wikisql",
        preparation_flags=("prompt", "max_source_tokens", "plain_vocabulary", "copies"),
        has_sample=True,
        has_rouge=True,
        has_tables=True,
        figures=(EXAMPLE_COUNT, EXACT_MATCH, LOGICAL_FORM, EXECUTION, EXECUTABLE_COUNT),
        judged_by=(EXECUTION, LOGICAL_FORM),
        printed=(EXECUTION, LOGICAL_FORM, EXACT_MATCH),
    ),
    SQUAD: LearningTask(
        name=SQUAD,
        script=CAUSAL_SCRIPT,
        is_one_text=True,
        prompts=(SQUAD,),
        dataset="squad",
        loss_on="answer",
        preparation_flags=("max_seq_length", "loss_on"),
        has_sample=True,
        figures=(EXAMPLE_COUNT, EXACT_MATCH, F1),
        judged_by=(F1,),
    ),
    LM: LearningTask(
        name=LM,
        script=CAUSAL_SCRIPT,
        is_one_text=True,
        has_answers=False,
        prompts=(LM,),
        dataset="wikitext-2",
        reads_hub=True,
        unit="documents",
        preparation_flags=("max_seq_length", "loss_on", "dataset_config", "text_field"),
        has_sample=True,
        figures=(TOKEN_COUNT, TEXT_LOSS, PERPLEXITY),
        judged_by=(PERPLEXITY,),
        printed=(PERPLEXITY, TEXT_LOSS),
    ),
}
"""The tasks by name; the first is the default."""
UNKNOWN_TASK = LearningTask(name="unknown", script="", prompts=())
"""Stands for a task that is none of ours: a script of somebody else may record any name."""


def task_or_unknown(name: str) -> LearningTask:
    """The task of that name, as a record or a manifest has it; `UNKNOWN_TASK` where there is
    none."""
    return TASKS.get(name, UNKNOWN_TASK)


def task_with_prompt(prompt: object) -> LearningTask:
    """The task that has this prompt; `UNKNOWN_TASK` where there is none."""
    for task in TASKS.values():
        if prompt in task.prompts:
            return task
    return UNKNOWN_TASK


def tasks_of(script: str) -> list[LearningTask]:
    """The tasks that a script trains, its default first."""
    return [task for task in TASKS.values() if task.script == script]


def prompts_of(script: str) -> tuple[str, ...]:
    """The prompts of all tasks that a script trains, its default first."""
    prompts: list[str] = []
    for task in tasks_of(script):
        prompts += task.prompts
    return tuple(prompts)


def answering_tasks() -> list[LearningTask]:
    """The tasks whose examples a model answers one by one."""
    return [task for task in TASKS.values() if task.has_answers]


def hub_tasks() -> list[LearningTask]:
    """The tasks whose raw data may be on the hub."""
    return [task for task in TASKS.values() if task.reads_hub]


def figures_of(tasks: Iterable[LearningTask]) -> list[Measure]:
    """What the scores of some tasks have, each figure once, in the order of the tasks."""
    by_key: dict[str, Measure] = {}
    for task in tasks:
        for figure in task.figures:
            by_key.setdefault(figure.key, figure)
    return list(by_key.values())


def judging_value(score: Mapping[str, object]) -> tuple[Measure, float] | None:
    """The measure by which a run is judged, and its value: the first measure of the task's
    `judged_by` that a score has; None where it has none.

    Args:
        score: the document of `score.SPLIT.json`. In older files it names no task, and is of
            text-to-SQL.
    """
    task = task_or_unknown(str(score.get("task", TEXT2SQL)))
    for measure in task.judged_by:
        value = score.get(measure.field)
        if isinstance(value, int | float):
            return measure, value
    return None
