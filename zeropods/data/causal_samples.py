"""Small data sets in the layouts of SQuAD and WikiText, generated from a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from zeropods.data.sample import holds_sample, write_once

# The words that the generated questions and the generated text are made of.


def _parts(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


PEOPLE = _parts(
    "Ada|Bruno|Carla|Dmitri|Elif|Farah|Goran|Hana|Ivo|Jana|Kofi|Lena|Mateo|Nadia|Omar|Petra|Quinn|Rosa|Sami|Tova|"
    "Ugo|Vera|Wim|Ximena|Yuki|Zoe|Amir|Beata|Cosmo|Dalia|Emil|Fiona|Gus|Helga|Ines|Joao"
)
CITIES = _parts(
    "Bergen|Lima|Zürich|Porto|Oslo|Quito|Gdańsk|Dakar|Málaga|Kyoto|Perth|Turin|Accra|Lyon|Riga|Hanoi|Cork|"
    "New Delhi|Cape Town|Santa Fe"
)
JOBS = _parts("baker|judge|pilot|nurse|sailor|farmer|tailor|painter|bus driver|watch maker|music teacher|diver")
PETS = _parts("cat|dog|horse|parrot|goat|rabbit|tortoise|pony")
COLOURS = _parts("grey|black|white|brown|red|spotted")

FIRST = _parts("Al|Bel|Cor|Dun|Es|Fal|Gar|Hol|Ip|Kel|Lin|Mar|Nor|Ost|Pel|Rav|Sel|Tor|Ul|Wen")
"""Beginnings of the towns' names; each is joined with each of `LAST`."""
LAST = _parts("ba|dale|den|ford|gate|ham|haven|holm|mere|minster|mouth|nick|port|stead|ton|wick")
RIVERS = _parts("Aune|Brel|Calla|Dorn|Esk|Fenn|Gala|Isk|Lorn|Mede|Nith|Orr|Pye|Rune|Sark|Tave")
LANDS = _parts("the northern hills|the eastern plain|the western coast|the southern lakes|the high moor")
TRADES = _parts("salt|wool|timber|glass|copper|herring|paper|cider")
FOUNDERS = _parts("a group of monks|two brothers|the crown|a guild of weavers|settlers from the coast")
BUILDINGS = _parts("town hall|stone bridge|harbour|market hall|lighthouse|railway station|grammar school")
ENDS = _parts("burned down|was rebuilt|was flooded|was sold|was widened")
TEAMS = _parts("rowing|cricket|football|chess|cycling")


# A small data set in SQuAD's layout: generated people, what is said of them, and questions about it.

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
    for name in rng.sample(PEOPLE, PEOPLE_OF_PARAGRAPH):
        facts += rng.sample(_facts_of(name, rng), 3)
    return facts


def _facts_of(name: str, rng: Random) -> list[Fact]:
    city, job, year = rng.choice(CITIES), rng.choice(JOBS), str(rng.randint(1940, 2005))
    pet = f"a {rng.choice(COLOURS)} {rng.choice(PETS)}"
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


# A small text in WikiText's layout: generated articles about invented towns, with an order to be learned.

ARTICLES = {"train": 210, "valid": 20, "test": 20}
TOWN_NAMES = tuple(f"{split}.txt" for split in ARTICLES)


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """What `write_text_sample` left behind."""

    folder: Path
    written: bool
    """False where the folder held exactly this already."""
    seed: int
    articles: dict[str, int]
    """Articles of each split."""
    bytes: dict[str, int]
    """Size of each file."""


def write_text_sample(out: Path, seed: int = 0) -> TextSample:
    """Write `train.txt`, `valid.txt` and `test.txt` into the folder `out`; the same seed gives the same bytes.

    An `out` that holds them already is left as it is; one that holds anything else raises `UserError`.
    """
    holds_sample(out, TOWN_NAMES)
    rng = Random(seed)
    towns = [first + last for first in FIRST for last in LAST]
    rng.shuffle(towns)
    files = {}
    for split, number in ARTICLES.items():
        files[f"{split}.txt"] = "".join(_article(towns.pop(), rng) for _ in range(number)).encode()
    written = write_once(out, files, seed)
    sizes = {name: len(content) for name, content in files.items()}
    return TextSample(folder=out, written=written, seed=seed, articles=ARTICLES, bytes=sizes)


def _article(town: str, rng: Random) -> str:
    """Title, opening and three sections: what the opening says of a town comes back further down."""
    river, land, trade = rng.choice(RIVERS), rng.choice(LANDS), rng.choice(TRADES)
    year = rng.randint(1050, 1750)
    opening = (
        f"{town} is a town on the River {river} , near {land} . It was founded in {year} "
        f"by {rng.choice(FOUNDERS)} and is known for its {trade} . "
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
    for building in rng.sample(BUILDINGS, 4):
        year += rng.randint(20, 70)
        said.append(f"In {year} the {building} of {town} {rng.choice(ENDS)} .")
    return " ".join([*said, f"By {year + 10} the {trade} of {town} was carried down the {river} to the sea ."])


def _economy(town: str, river: str, trade: str, rng: Random) -> str:
    share, second = rng.randint(20, 60), rng.choice(TRADES)
    return (
        f"About {share} percent of the people of {town} live from {trade} , and {share // 2} percent from {second} . "
        f"A market for {trade} is held on the bank of the {river} in {rng.choice(('spring', 'summer', 'autumn'))} ."
    )


def _sport(town: str, river: str, rng: Random) -> str:
    team, wins = rng.choice(TEAMS), rng.randint(2, 19)
    return (
        f"The {team} club of {town} has won the cup of the {river} valley {wins} times , "
        f"most recently by {wins + rng.randint(1, 9)} points to {wins} ."
    )
