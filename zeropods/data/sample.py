"""A small data set in WikiSQL's layout, made from the facts in `facts/` without any download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from zeropods.data.sample_facts import FactTable, read_facts
from zeropods.data.sample_folder import holds_sample, write_once
from zeropods.data.sample_queries import draw
from zeropods.data.sample_words import ask
from zeropods.data.wikisql import SPLITS
from zeropods.sql.query import Query

QUESTIONS = {"train": 24_000, "dev": 600, "test": 600}
HELD_OUT_TABLES = {"dev": 4, "test": 4}
"""How many tables only this split has."""
HELD_OUT_SHARE = 5
"""One question in so many of dev and of test is about such a table."""

NAMES = {f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")}


@dataclass(frozen=True)
class Asked:
    """A question about a table, and the query that answers it."""

    question: str
    table: FactTable
    query: Query


@dataclass(frozen=True, kw_only=True)
class SampleSummary:
    """What `write_sample` left behind."""

    folder: Path
    written: bool
    """False where the folder held exactly this already."""
    seed: int
    questions: dict[str, int]
    """Questions of each split."""
    tables: dict[str, int]
    """Tables of each split; those of dev and test are in part those of train."""
    held_out_questions: dict[str, int]
    """Questions of dev and of test about tables that train has not."""


def write_sample(out: Path, seed: int = 0) -> SampleSummary:
    """Write `SPLIT.jsonl` and `SPLIT.tables.jsonl` of train, dev and test into the folder `out`.

    The same seed gives the same bytes. An `out` that holds them already is left as it is; one that holds
    anything else raises `UserError`.
    """
    holds_sample(out, NAMES)  # Making the questions takes seconds: a folder of others is refused before.
    splits = make_sample(seed)
    written = write_once(out, _files(splits), seed)
    return _summary(out, seed, written, splits)


def make_sample(seed: int = 0) -> dict[str, list[Asked]]:
    """The questions of each split; no two of all splits have the same words."""
    rng = Random(seed)
    tables = read_facts()
    rng.shuffle(tables)
    seen: set[str] = set()
    splits: dict[str, list[Asked]] = {}
    held_out = {}
    for split, number in HELD_OUT_TABLES.items():
        held_out[split] = [tables.pop() for _ in range(number)]
    for split in reversed(SPLITS):
        unknown = QUESTIONS[split] // HELD_OUT_SHARE if split in held_out else 0
        asked = _asked(tables, QUESTIONS[split] - unknown, seen, rng)
        asked += _asked(held_out.get(split, []), unknown, seen, rng)
        rng.shuffle(asked)
        splits[split] = asked
    return {split: splits[split] for split in SPLITS}


def _asked(tables: list[FactTable], number: int, seen: set[str], rng: Random) -> list[Asked]:
    """New questions, as many about each table as about the next; their words are added to `seen`."""
    return [_new(tables[n % len(tables)], seen, rng) for n in range(number)]


def _new(table: FactTable, seen: set[str], rng: Random) -> Asked:
    while True:
        drawn = draw(table, rng)
        if drawn is None:
            continue
        question, query = ask(table, drawn, rng)
        words = question.lower().rstrip("?.")
        if words not in seen:
            seen.add(words)
            return Asked(question, table, query)


def _files(splits: dict[str, list[Asked]]) -> dict[str, bytes]:
    files = {}
    for split, asked in splits.items():
        files[f"{split}.jsonl"] = _json_lines(_question(a) for a in asked)
        files[f"{split}.tables.jsonl"] = _json_lines(_table(t) for t in _tables(asked))
    return files


def _tables(asked: list[Asked]) -> list[FactTable]:
    by_id = {a.table.id: a.table for a in asked}
    return [by_id[id_] for id_ in sorted(by_id)]


def _question(asked: Asked) -> dict[str, Any]:
    return {
        "phase": 1,
        "table_id": asked.table.id,
        "question": asked.question,
        "sql": asked.query.to_json(),
    }


def _table(table: FactTable) -> dict[str, Any]:
    return {
        "id": table.id,
        "header": [column.name for column in table.columns],
        "types": [column.type for column in table.columns],
        "rows": table.rows,
    }


def _json_lines(documents: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents).encode()


def _summary(out: Path, seed: int, written: bool, splits: dict[str, list[Asked]]) -> SampleSummary:
    known = {asked.table.id for asked in splits["train"]}
    return SampleSummary(
        folder=out,
        written=written,
        seed=seed,
        questions={split: len(asked) for split, asked in splits.items()},
        tables={split: len(_tables(asked)) for split, asked in splits.items()},
        held_out_questions={split: sum(a.table.id not in known for a in splits[split]) for split in HELD_OUT_TABLES},
    )
