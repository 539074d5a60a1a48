"""A small text in WikiText's layout: generated articles about invented towns, with an order to be learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from zeropods.data import generated_words as words
from zeropods.data.sample_folder import holds_sample, write_once

ARTICLES = {"train": 210, "valid": 20, "test": 20}
NAMES = tuple(f"{split}.txt" for split in ARTICLES)


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
    holds_sample(out, NAMES)
    rng = Random(seed)
    towns = [first + last for first in words.FIRST for last in words.LAST]
    rng.shuffle(towns)
    files = {}
    for split, number in ARTICLES.items():
        files[f"{split}.txt"] = "".join(_article(towns.pop(), rng) for _ in range(number)).encode()
    written = write_once(out, files, seed)
    sizes = {name: len(content) for name, content in files.items()}
    return TextSample(folder=out, written=written, seed=seed, articles=ARTICLES, bytes=sizes)


def _article(town: str, rng: Random) -> str:
    """Title, opening and three sections: what the opening says of a town comes back further down."""
    river, land, trade = rng.choice(words.RIVERS), rng.choice(words.LANDS), rng.choice(words.TRADES)
    year = rng.randint(1050, 1750)
    opening = (
        f"{town} is a town on the River {river} , near {land} . It was founded in {year} "
        f"by {rng.choice(words.FOUNDERS)} and is known for its {trade} . "
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
    for building in rng.sample(words.BUILDINGS, 4):
        year += rng.randint(20, 70)
        said.append(f"In {year} the {building} of {town} {rng.choice(words.ENDS)} .")
    return " ".join([*said, f"By {year + 10} the {trade} of {town} was carried down the {river} to the sea ."])


def _economy(town: str, river: str, trade: str, rng: Random) -> str:
    share, second = rng.randint(20, 60), rng.choice(words.TRADES)
    return (
        f"About {share} percent of the people of {town} live from {trade} , and {share // 2} percent from {second} . "
        f"A market for {trade} is held on the bank of the {river} in {rng.choice(('spring', 'summer', 'autumn'))} ."
    )


def _sport(town: str, river: str, rng: Random) -> str:
    team, wins = rng.choice(words.TEAMS), rng.randint(2, 19)
    return (
        f"The {team} club of {town} has won the cup of the {river} valley {wins} times , "
        f"most recently by {wins + rng.randint(1, 9)} points to {wins} ."
    )
