"""The tasks whose questions a trained model answers, one value each, and prediction of any of them.

`zeropods.evaluate.score` tells the two tasks apart by their predictions. A model of text (`lm`) answers nothing: its
score is `zeropods.evaluate.perplexity`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.data.squad import read_squad
from zeropods.data.wikisql import read_split
from zeropods.errors import UserError
from zeropods.evaluate.generate import Answerer, Generation, Progress, QueryAnswerer, QuestionAnswerer, Speed
from zeropods.evaluate.models import task_of
from zeropods.evaluate.predictions import write_predictions
from zeropods.evaluate.score_file import SQUAD, TEXT2SQL


@dataclass(frozen=True, kw_only=True)
class AnswerTask:
    """What prediction needs to know of a task."""

    read: Callable[[Path, str], Iterator[Any]]
    """Streams the examples of a split."""
    load: Callable[..., Answerer[Any, Any]]
    """Loads a model at a precision, with the task's own options."""
    options: tuple[str, ...]
    """Names of the arguments of `predict` that no other task has."""
    max_new_tokens: int
    batch_size: int
    """Default number of questions at once."""

    def generation(self, max_new_tokens: int | None = None, batch_size: int | None = None, **how: Any) -> Generation:
        """How answers are generated, with the task's defaults for what is None."""
        return Generation(
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            batch_size=self.batch_size if batch_size is None else batch_size,
            **how,
        )


ANSWER_TASKS = {
    TEXT2SQL: AnswerTask(
        read=read_split, load=QueryAnswerer.load, options=("prompt",), max_new_tokens=96, batch_size=64
    ),
    # Batches are smaller because a causal model keeps keys and values of a whole context.
    SQUAD: AnswerTask(
        read=read_squad, load=QuestionAnswerer.load, options=("max_seq_length",), max_new_tokens=32, batch_size=16
    ),
}  # fmt: skip


def answer_task(model: Path, asked: str | None = None) -> str:
    """The task of a model: `asked`, else what the model says; `UserError` where it answers no questions."""
    task = asked or task_of(model)
    if task not in ANSWER_TASKS:
        raise UserError(f"{model}: trained on text, it answers nothing; see zeropods perplexity, or --task")
    return task


def predict(
    model: Path,
    data: Path,
    split: str,
    out: Path,
    how: Generation | None = None,
    *,
    task: str | None = None,
    precision: str = "fp32",
    limit: int | None = None,
    progress: Progress = lambda rows: None,
    **options: Any,
) -> Speed:
    """Write an answer to each example of a split (its first `limit`), atomically, and time it.

    Args:
        model: run folder, model folder, or hub id of a causal model.
        task: for a model that does not say its own.
        options: the task's own: `prompt` of text2sql; `max_seq_length` of squad, the most tokens of prompt and answer
            together. None leaves them to the model.

    Raises:
        UserError: a model, data or option that does not fit the task.
    """
    task = answer_task(model, task)
    given = {name: value for name, value in options.items() if value is not None}
    if how is not None and not how.constrained:
        given["unconstrained"] = True
    for name in given:
        other = next((t for t, o in ANSWER_TASKS.items() if name in o.options), TEXT2SQL)
        if other != task:
            raise UserError(f"--{name.replace('_', '-')}: is for {other}, this is {task}; leave it out")
    given.pop("unconstrained", None)
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}; expected at least 1")
    chosen = ANSWER_TASKS[task]
    examples = list(itertools.islice(chosen.read(data, split), limit))
    answers, speed = chosen.load(model, precision, **given).timed(examples, how or chosen.generation(), progress)
    write_predictions(out, answers)
    return speed
