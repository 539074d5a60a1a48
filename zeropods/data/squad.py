"""A strict reader of SQuAD v1.1's official layout: one JSON document a split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.data.json_lines import json_object, text_of
from zeropods.errors import UserError

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class SquadExample:
    """A question about a context, and the answers that people marked in it."""

    index: int
    """Number of the question in its file, from 0."""
    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """At least one; train has one, dev three or more, often the same."""
    starts: tuple[int, ...] = ()
    """Where in `context` each answer begins, in characters."""


def read_squad(folder: Path, split: str) -> Iterator[SquadExample]:
    """The questions of a split in file order; `UserError` at the first fault, with its place."""
    path = squad_file(folder, split)
    index, seen = 0, set[str]()
    for place, context, document in _questions(path):
        example = _example(place, index, context, document)
        if example.id in seen:
            raise UserError(f"{place}: id {example.id!r} stands there twice; keep one of them")
        seen.add(example.id)
        index += 1
        yield example
    if index == 0:
        raise UserError(f"{path}: holds no question; fetch it again: zeropods data get squad --out DIR")


def squad_file(folder: Path, split: str) -> Path:
    """The file of a split, which must be there: `SPLIT-v1.1.json`, or the only one named `SPLIT*.json`."""
    if split not in SPLITS:
        raise UserError(f"split {split!r}; expected {', '.join(SPLITS)}")
    official = Path(folder) / f"{split}-v1.1.json"
    if official.is_file():
        return official
    found = _named(folder, split)
    if not found:
        raise UserError(f"{official}: no such file; the official release has it: zeropods data get squad --out DIR")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(f"{folder}: {names} are all of split {split!r}; keep one of them there")
    return found[0]


def squad_splits(folder: Path) -> list[str]:
    """The splits that a folder has; train must be there."""
    squad_file(folder, "train")
    return [split for split in SPLITS if _named(folder, split)]


def _named(folder: Path, split: str) -> list[Path]:
    """Files that may hold a split; `dev.executable.json` is WikiSQL's."""
    return [path for path in sorted(Path(folder).glob(f"{split}*.json")) if not path.name.endswith(".executable.json")]


def _questions(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, context and document of every question."""
    for number, article in enumerate(_objects(str(path), json_object(str(path), path.read_bytes()), "data"), 1):
        title = article.get("title") or f"number {number}"
        for part, paragraph in enumerate(_objects(f"{path}: article {title!r}", article, "paragraphs"), 1):
            place = f"{path}: article {title!r}, paragraph {part}"
            context = text_of(place, paragraph, "context")
            for document in _objects(place, paragraph, "qas"):
                yield f"{place}, question {document.get('id')!r}", context, document


def _example(place: str, index: int, context: str, document: dict[str, Any]) -> SquadExample:
    id_ = text_of(place, document, "id")
    question = text_of(place, document, "question")
    answers = [_answer(place, context, answer) for answer in _objects(place, document, "answers")]
    if not answers:
        raise UserError(f"{place}: has no answer; SQuAD v1.1 has one at least: leave the question out")
    texts, starts = zip(*answers, strict=True)
    return SquadExample(index, id_, question, context, texts, starts)


def _answer(place: str, context: str, answer: dict[str, Any]) -> tuple[str, int]:
    text, start = text_of(place, answer, "text"), answer.get("answer_start")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise UserError(f"{place}: answer_start is {start!r}; expected a number of characters, 0 or more")
    if context.startswith(text, start):
        return text, start
    there = context.find(text)
    if there < 0:
        raise UserError(f"{place}: answer {text!r} is not in its context; correct it or leave the question out")
    raise UserError(f"{place}: answer {text!r} is not at answer_start {start} but at {there}; correct answer_start")


def _objects(place: str, document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = document.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{place}: {key} is {str(value)[:60]!r}; expected a list of objects")
    return value
