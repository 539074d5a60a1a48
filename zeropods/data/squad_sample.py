"""A small data set in SQuAD's layout: generated people, what is said of them, and questions about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from zeropods.data import generated_words as words
from zeropods.data.sample_folder import holds_sample, write_once

PARAGRAPHS = {"train": 200, "dev": 40}
QUESTIONS_OF_PARAGRAPH = 4
PEOPLE_OF_PARAGRAPH = 3
PARAGRAPHS_OF_ARTICLE = 20
NAMES = tuple(f"{split}-v1.1.json" for split in PARAGRAPHS)


@dataclass(frozen=True)
class Fact:
    """What is said of somebody: a sentence, the answer in it, and questions that it answers."""

    sentence: str
    answer: str
    questions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SquadSample:
    """What `write_squad_sample` left behind."""

    folder: Path
    written: bool
    """False where the folder held exactly this already."""
    seed: int
    questions: dict[str, int]
    """Questions of each split."""


def write_squad_sample(out: Path, seed: int = 0) -> SquadSample:
    """Write `train-v1.1.json` and `dev-v1.1.json` into the folder `out`; the same seed gives the same bytes.

    An `out` that holds them already is left as it is; one that holds anything else raises `UserError`.
    """
    holds_sample(out, NAMES)
    rng = Random(seed)
    seen: set[str] = set()
    files = {f"{split}-v1.1.json": _document(split, number, seen, rng) for split, number in PARAGRAPHS.items()}
    written = write_once(out, {name: _json(document) for name, document in files.items()}, seed)
    questions = {split: number * QUESTIONS_OF_PARAGRAPH for split, number in PARAGRAPHS.items()}
    return SquadSample(folder=out, written=written, seed=seed, questions=questions)


def _document(split: str, paragraphs: int, seen: set[str], rng: Random) -> dict[str, Any]:
    articles: list[dict[str, Any]] = []
    for number in range(paragraphs):
        if number % PARAGRAPHS_OF_ARTICLE == 0:
            articles.append({"title": f"People_{split}_{len(articles) + 1}", "paragraphs": []})
        articles[-1]["paragraphs"].append(_paragraph(f"{split}-{number}", seen, rng))
    return {"version": "1.1", "data": articles}


def _paragraph(id_: str, seen: set[str], rng: Random) -> dict[str, Any]:
    facts = _facts(rng)
    context = " ".join(fact.sentence for fact in facts)
    if context in seen:
        return _paragraph(id_, seen, rng)
    seen.add(context)
    asked = rng.sample(facts, QUESTIONS_OF_PARAGRAPH)
    return {"context": context, "qas": [_question(f"{id_}-{n}", f, context, rng) for n, f in enumerate(asked)]}


def _facts(rng: Random) -> list[Fact]:
    """What is said of each person, one after the other."""
    facts: list[Fact] = []
    for name in rng.sample(words.PEOPLE, PEOPLE_OF_PARAGRAPH):
        facts += rng.sample(_facts_of(name, rng), 3)
    return facts


def _facts_of(name: str, rng: Random) -> list[Fact]:
    city, job, year = rng.choice(words.CITIES), rng.choice(words.JOBS), str(rng.randint(1940, 2005))
    pet = f"a {rng.choice(words.COLOURS)} {rng.choice(words.PETS)}"
    return [
        Fact(f"{name} lives in {city}.", city, (f"Where does {name} live?", f"In which city does {name} live?")),
        Fact(f"{name} works as a {job}.", job, (f"What is the job of {name}?", f"What does {name} work as?")),
        Fact(f"{name} was born in {year}.", year, (f"When was {name} born?", f"In which year was {name} born?")),
        Fact(f"{name} has {pet}.", pet, (f"Which animal does {name} have?", f"What pet does {name} have?")),
    ]


def _question(id_: str, fact: Fact, context: str, rng: Random) -> dict[str, Any]:
    start = context.index(fact.sentence) + fact.sentence.rindex(fact.answer)
    answer = {"answer_start": start, "text": fact.answer}
    answers = [answer, answer, answer] if id_.startswith("dev") else [answer]
    return {"id": id_, "question": rng.choice(fact.questions), "answers": answers}


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"
