"""The tasks that models are trained for, each one value here that answers questions about itself.

A new task needs a value in `TASKS` and, in each of these tables, a line under its name:

* `TASK_DATA` of `data/prepare.py`: what reads its raw data and turns them into rows of tokens;
* where a model answers its examples one by one, `SCORES` of `measure/score_json.py`: the type of
  its scores; `SCORERS` of `evaluate/score.py`: what grades its answers; and `ANSWERERS` of
  `evaluate/generate.py`: what makes them;
* where there is a generated sample of it, `GENERATORS` of `data/sample.py`.

The tables lie in the rooms that have what they name, since nothing on this floor knows a room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TEXT2SQL: Final = "text2sql"
SQUAD: Final = "squad"
LM: Final = "lm"

T5_SCRIPT = "textsql_train.py"
CAUSAL_SCRIPT = "causal_train.py"


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
    figures: tuple[str, ...] = ()
    """Keys of a summary's columns of accuracy that it has."""
    judged_by: tuple[tuple[str, str], ...] = ()
    """Labels and keys of the measures by which a run is judged: the first that was measured, else
    the last."""

    @property
    def chooses_prompt(self) -> bool:
        """Whether its prompt is a choice, which a model has to record."""
        return len(self.prompts) > 1


TASKS = {
    TEXT2SQL: LearningTask(
        name=TEXT2SQL,
        script=T5_SCRIPT,
        prompts=("schema", "question"),
        dataset="wikisql",
        preparation_flags=("prompt", "max_source_tokens", "plain_vocabulary"),
        has_sample=True,
        has_rouge=True,
        figures=(
            "split",
            "tables",
            "examples",
            "exact_match",
            "logical_form_accuracy",
            "execution_accuracy",
            "executable",
        ),
        judged_by=(
            ("execution", "execution_accuracy"),
            ("logical form", "logical_form_accuracy"),
        ),
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
        figures=("split", "examples", "exact_match", "f1"),
        judged_by=(("F1", "f1"),),
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
        figures=("split", "text_tokens", "text_loss", "perplexity"),
        judged_by=(("perplexity", "perplexity"),),
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
