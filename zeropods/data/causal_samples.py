"""Generated people in SQuAD's layout and towns in WikiText's, of the words in `facts/words.json`."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from random import Random
from typing import NamedTuple

PARAGRAPHS = {"train": 200, "dev": 40}
QUESTIONS_OF_PARAGRAPH = 4
PEOPLE_OF_PARAGRAPH = 3
FACTS_OF_PERSON = 3
PARAGRAPHS_OF_ARTICLE = 20
ARTICLES = {"train": 210, "valid": 20, "test": 20}


class Fact(NamedTuple):
    """What is said of somebody: a sentence, the answer in it, and questions that it answers."""

    sentence: str
    answer: str
    questions: tuple[str, ...]


@cache
def _words() -> dict[str, list[str]]:
    return json.loads(resources.files("zeropods.data").joinpath("facts", "words.json").read_text("utf-8"))


# SQuAD's layout: what is said of three people, and questions about it.


def squad_files(rng: Random) -> tuple[dict[str, bytes], dict[str, dict[str, int]]]:
    """`train-v1.1.json` and `dev-v1.1.json`, and the number of questions of each split."""
    seen: set[str] = set()
    files = {}
    for split, paragraphs in PARAGRAPHS.items():
        made = [_paragraph(f"{split}-{number}", seen, rng) for number in range(paragraphs)]
        articles = [
            {"title": f"People_{split}_{n}", "paragraphs": made[begin : begin + PARAGRAPHS_OF_ARTICLE]}
            for n, begin in enumerate(range(0, paragraphs, PARAGRAPHS_OF_ARTICLE), 1)
        ]
        document = {"version": "1.1", "data": articles}
        files[f"{split}-v1.1.json"] = json.dumps(document, ensure_ascii=False).encode() + b"\n"
    questions = {split: number * QUESTIONS_OF_PARAGRAPH for split, number in PARAGRAPHS.items()}
    return files, {"questions": questions}


def _paragraph(id_: str, seen: set[str], rng: Random) -> dict[str, object]:
    """A context that is in no other paragraph, and questions about some of its facts."""
    facts: list[Fact] = []
    for name in rng.sample(_words()["people"], PEOPLE_OF_PARAGRAPH):
        facts += rng.sample(_facts_of(name, rng), FACTS_OF_PERSON)
    context = " ".join(fact.sentence for fact in facts)
    if context in seen:
        return _paragraph(id_, seen, rng)
    seen.add(context)
    asked = rng.sample(facts, QUESTIONS_OF_PARAGRAPH)
    return {"context": context, "qas": [_question(f"{id_}-{n}", f, context, rng) for n, f in enumerate(asked)]}


def _facts_of(name: str, rng: Random) -> list[Fact]:
    words = _words()
    city, job, year = rng.choice(words["cities"]), rng.choice(words["jobs"]), str(rng.randint(1940, 2005))
    pet = f"a {rng.choice(words['colours'])} {rng.choice(words['pets'])}"
    return [
        Fact(f"{name} lives in {city}.", city, (f"Where does {name} live?", f"In which city does {name} live?")),
        Fact(f"{name} works as a {job}.", job, (f"What is the job of {name}?", f"What does {name} work as?")),
        Fact(f"{name} was born in {year}.", year, (f"When was {name} born?", f"In which year was {name} born?")),
        Fact(f"{name} has {pet}.", pet, (f"Which animal does {name} have?", f"What pet does {name} have?")),
    ]


def _question(id_: str, fact: Fact, context: str, rng: Random) -> dict[str, object]:
    start = context.index(fact.sentence) + fact.sentence.rindex(fact.answer)
    answer = {"answer_start": start, "text": fact.answer}
    answers = [answer, answer, answer] if id_.startswith("dev") else [answer]
    return {"id": id_, "question": rng.choice(fact.questions), "answers": answers}


# WikiText's layout: articles about invented towns, with an order to be learned.


def text_files(rng: Random) -> tuple[dict[str, bytes], dict[str, dict[str, int]]]:
    """`train.txt`, `valid.txt` and `test.txt`; the number of articles of each split and the size of each file."""
    towns = [first + last for first in _words()["town_beginnings"] for last in _words()["town_endings"]]
    rng.shuffle(towns)
    files = {}
    for split, number in ARTICLES.items():
        files[f"{split}.txt"] = "".join(_article(towns.pop(), rng) for _ in range(number)).encode()
    return files, {"articles": ARTICLES, "bytes": {name: len(content) for name, content in files.items()}}


def _article(town: str, rng: Random) -> str:
    """Title, opening and three sections: what the opening says of a town comes back further down."""
    river, land, trade = rng.choice(_words()["rivers"]), rng.choice(_words()["lands"]), rng.choice(_words()["trades"])
    year = rng.randint(1050, 1750)
    opening = (
        f"{town} is a town on the River {river} , near {land} . It was founded in {year} "
        f"by {rng.choice(_words()['founders'])} and is known for its {trade} . "
        f"The people of {town} number about {rng.randint(2, 90)} @,@ 000 ."
    )
    sections = {
        "History": _history(town, river, trade, year, rng),
        "Economy": _economy(town, river, trade, rng),
        "Sport": _sport(town, river, rng),
    }
    text = f" \n = {town} = \n \n {opening} \n"
    return text + "".join(f" \n = = {title} = = \n \n {body} \n" for title, body in sections.items())


def _history(town: str, river: str, trade: str, year: int, rng: Random) -> str:
    said = [f"The oldest record of {town} is from {year + rng.randint(5, 60)} ."]
    for building in rng.sample(_words()["buildings"], 4):
        year += rng.randint(20, 70)
        said.append(f"In {year} the {building} of {town} {rng.choice(_words()['ends'])} .")
    return " ".join([*said, f"By {year + 10} the {trade} of {town} was carried down the {river} to the sea ."])


def _economy(town: str, river: str, trade: str, rng: Random) -> str:
    share, second = rng.randint(20, 60), rng.choice(_words()["trades"])
    return (
        f"About {share} percent of the people of {town} live from {trade} , and {share // 2} percent from {second} . "
        f"A market for {trade} is held on the bank of the {river} in {rng.choice(('spring', 'summer', 'autumn'))} ."
    )


def _sport(town: str, river: str, rng: Random) -> str:
    team, wins = rng.choice(_words()["teams"]), rng.randint(2, 19)
    return (
        f"The {team} club of {town} has won the cup of the {river} valley {wins} times , "
        f"most recently by {wins + rng.randint(1, 9)} points to {wins} ."
    )
