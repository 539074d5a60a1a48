"""Answers of a model to SQuAD's questions: `{"index", "id", "question", "prediction"}`, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zeropods.atomic import write_text
from zeropods.evaluate.prediction_lines import index_of, prediction_lines, refuse_missing, refuse_twice, text_of

KEYS = ("index", "id", "question", "prediction")


@dataclass(frozen=True, kw_only=True)
class SquadAnswer:
    """What a model answered to one question."""

    index: int
    """The question's place in its split, from 0."""
    id: str
    """The question's own, as the data set has it."""
    question: str
    text: str

    def to_json(self) -> dict[str, int | str]:
        """The line of a prediction file."""
        return {"index": self.index, "id": self.id, "question": self.question, "prediction": self.text}


def write_answers(path: Path, answers: Iterable[SquadAnswer]) -> None:
    """Write a prediction file; it appears when it is complete."""
    write_text(path, "".join(json.dumps(answer.to_json()) + "\n" for answer in answers))


def read_answers(path: Path) -> list[SquadAnswer]:
    """The answers in file order; `UserError` at the first fault."""
    answers: list[SquadAnswer] = []
    seen: set[int] = set()
    for place, document in prediction_lines(path):
        refuse_missing(place, document, KEYS)
        index = index_of(place, document)
        refuse_twice(place, index, seen)
        id_, question, text = (text_of(place, document, key) for key in KEYS[1:])
        answers.append(SquadAnswer(index=index, id=id_, question=question, text=text))
    return answers


def holds_answers(path: Path) -> bool:
    """Whether a prediction file answers SQuAD's questions: its first line names one by its id.

    Of a line that cannot be read it is not known; whoever reads the file says what is wrong with it.
    """
    with open(path, "rb") as file:
        line = file.readline()
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "id" in first and "query" not in first
