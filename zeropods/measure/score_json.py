"""Scores of every task, and `score.SPLIT.json`, which holds one and is read back strictly."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from annotated_types import Ge, Le

from zeropods.errors import UserError
from zeropods.files import validated, write_json
from zeropods.measure.record import RECORD, Record, read_json, read_record
from zeropods.tables import counted
from zeropods.tasks import LM, SQUAD, TEXT2SQL, judging_value

UNSEEN_SPLITS: Final = ("test", "dev")
"""Splits that training does not see; a run is judged by the first that was scored."""

NEAR_ZERO: Final = 0.05
"""Share of right answers, or F1, below which a model has not learned its task."""
LEARN_FIRST: Final = "train longer, or start from a trained model"
"""What helps a model that has not learned its task."""
NOT_TRAINED: Final = (
    "not trained enough: fewer than 1 answer in 20 is right, so nothing can be concluded about the "
    f"technique; {LEARN_FIRST}"
)
"""What a summary says of rows whose scores are near zero."""

Interval = tuple[float, float]
"""The ends of a 95 % interval."""
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the scores of all tasks have in common.

    A file may hold further keys, but no value of another type.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"strict": True, "allow_inf_nan": False}

    task: str

    def write(self, folder: Path, split: str) -> None:
        """Write `score.SPLIT.json` atomically."""
        write_json(Path(folder) / f"score.{split}.json", asdict(self))


@dataclass(frozen=True, kw_only=True)
class AnswerScore(Score):
    """What the scores of answers have in common."""

    examples: int
    """Number of examples that were answered and scored."""
    exact_match: Share
    """Share of answers whose text is that of a right one."""


@dataclass(frozen=True, kw_only=True)
class QueryScore(AnswerScore):
    """Accuracy of queries; what could not be measured is None."""

    task: Literal["text2sql"] = TEXT2SQL
    logical_form_accuracy: Share
    """Share of predictions with the gold query's column, aggregate and conditions."""
    execution_accuracy: Share | None
    """Share of the `executable` examples whose prediction finds what the gold query finds."""
    executable: int
    """Number of examples whose gold query finds something on the rows at hand."""
    unparseable: int | None = None
    intervals: dict[str, Interval | None]
    """95 % intervals of the three accuracies and of custom metrics, by name."""
    rouge: dict[str, float] | None = None
    """Mean F1 of rouge1, rouge2, rougeL and rougeLsum."""
    groups: dict[str, QueryScore] | None = None
    """Scores of `known_tables` and `unseen_tables`: examples whose table is in train.tables.jsonl,
    and the others."""
    kinds: dict[str, QueryScore] | None = None
    """Scores by the gold query's aggregate and by its number of conditions, which show where a
    model fails."""
    own_metrics: dict[str, float] = field(default_factory=dict)
    """Means of custom metrics by name, over all examples; groups have none."""
    linked: bool = False
    """Whether the answers know what their questions quote from the rows of the tables. They are not
    to be compared with answers that know the names of the columns only."""


@dataclass(frozen=True, kw_only=True)
class SquadScore(AnswerScore):
    """Means over the answered questions, from 0 to 1, not to 100."""

    task: Literal["squad"] = SQUAD
    f1: Share
    intervals: dict[str, Interval | None]
    own_metrics: dict[str, float] = field(default_factory=dict)
    """Means of custom metrics by name."""


@dataclass(frozen=True, kw_only=True)
class TextScore(Score):
    """How well a text is predicted, token by token."""

    task: Literal["lm"] = LM
    tokens: int
    """Number of tokens that were predicted: all of a dev or test split but the first."""
    loss: float
    """Mean loss in nats per token."""
    perplexity: float
    """exp(loss): the model is as unsure as in a choice among this many equally likely tokens.
    Models with different tokenizers cannot be compared by it."""


def text_score(loss_sum: float, tokens: int) -> TextScore:
    """The score of a text.

    Args:
        loss_sum: loss in nats, summed over all predicted tokens and all ranks.
        tokens: number of predicted tokens.

    Raises:
        UserError: no tokens, or a loss that is not finite or whose perplexity is too large for a
            float.
    """
    if tokens < 1:
        raise UserError(f"perplexity of {tokens} tokens; expected a text of at least two tokens")
    loss = loss_sum / tokens
    # Beyond this, exp() is more than a float can hold; a loss that is not a number is not below it
    # either.
    if not loss < math.log(sys.float_info.max):
        fault = f"a loss of {loss:.4g} nats per token over {tokens} tokens"
        raise UserError(f"perplexity: {fault}; the model is broken")
    return TextScore(tokens=tokens, loss=loss, perplexity=math.exp(loss))


SCORES: dict[str, type[Score]] = {TEXT2SQL: QueryScore, SQUAD: SquadScore, LM: TextScore}
"""The type of the scores of each task, by its name."""


# What is said of a score near zero.


def near_zero_text(score: Score, record: Record | None) -> str:
    """Why a score is near zero and what to do about it, in a line; empty where it is not near zero.

    Args:
        record: that of the run whose model was scored; None where it is not known.
    """
    if not _is_near_zero(score):
        return ""
    if record is None:
        reason = "how its model was trained is not recorded here"
    else:
        reason = _training_text(record)
    return f"{_right_text(score)}: {reason}; {LEARN_FIRST}"


def _is_near_zero(score: Score) -> bool:
    """Whether the share of right answers, or F1, by which a model is judged is near zero; False for
    a text, which has no answers."""
    judging = judging_value(vars(score))
    if judging is None:
        return False
    measure, value = judging
    return measure.is_share and value < NEAR_ZERO


def _right_text(score: Score) -> str:
    """How many answers are right, such as `3 of 300 right`."""
    if isinstance(score, QueryScore) and score.execution_accuracy is not None:
        number = score.executable
        right = round(score.execution_accuracy * number)
    elif isinstance(score, QueryScore):
        number = score.examples
        right = round(score.logical_form_accuracy * number)
    elif isinstance(score, AnswerScore):
        number = score.examples
        right = round(score.exact_match * number)
    else:
        return "next to nothing right"
    return f"{right:,} of {number:,} right"


def _training_text(record: Record) -> str:
    """How long a model was trained, from which weights and to which loss."""
    rows = record.steps * record.effective_batch_size
    epochs = rows / max(1, record.train_rows)
    length = counted(record.steps, "step")
    if epochs < 1:
        length += " only"
    if record.init == "random":
        start = "random weights"
    elif record.init == "pretrained":
        start = record.model_id
    else:
        start = f"the model of {record.init}"
    text = f"trained {length}, {round(epochs, 2):g} epochs, from {start}"
    if record.losses:
        text += f" to a loss of {record.losses[-1].loss:.3g}"
    rank = record.rank_0
    if rank is not None and rank.stopped_by == "time":
        text += ", until its time limit"
    return text


def record_beside(path: Path) -> Record | None:
    """The record in a folder; None where there is none, or none that can be read."""
    if not (path / RECORD).is_file():
        return None
    try:
        return read_record(path)
    except UserError:
        return None


# The file of a score, and which score a run is judged by.


def read_score(path: Path) -> Score:
    """The score in `score.SPLIT.json`.

    Raises:
        UserError: a file that is damaged, or the first value that is missing or of another type.
    """
    task = read_json(path).get("task")
    if task not in SCORES:
        expected = ", ".join(SCORES)
        raise UserError(f"{path}: task is {task!r:.60}: expected one of {expected}; measure again")
    return validated(SCORES[task], path, path.read_bytes(), "measure again")


def score_of(run: Path) -> tuple[str, Score] | None:
    """The split by which a run is judged, and its score; None where none of `UNSEEN_SPLITS` was
    scored. `UserError` as from `read_score`."""
    for split in UNSEEN_SPLITS:
        path = Path(run) / f"score.{split}.json"
        if path.is_file():
            return split, read_score(path)
    return None
