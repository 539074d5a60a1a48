"""The tables that a page offers: those of a data set's test questions, with the questions and their queries."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from zeropods.data.checksum import sha256
from zeropods.data.json_lines import json_lines
from zeropods.data.manifest import read_manifest
from zeropods.data.sample import write_sample
from zeropods.data.wikisql import Example, Table, read_split, split_file
from zeropods.errors import UserError

SPLITS = ("test", "dev", "train")
"""The first that is there is shown: questions that training has not seen."""
MOST_TABLES = 1_000
TITLES = ("page_title", "caption", "name")
"""What WikiSQL's tables may be called by."""
LEVELS_UP = 3
LABEL = 90
"""Characters of a table's line in the list."""


@dataclass(frozen=True)
class Tables:
    """Tables by id, each with what is asked about it."""

    what: str
    """Which data set and split, and how many of its tables, in a few words."""
    examples: dict[str, tuple[Example, ...]]
    """By table, at least one each."""
    labels: dict[str, str]
    """A line for each table: its title, where it has one, and its columns."""

    def table(self, id_: str | None) -> Table:
        """A table of the list; `UserError` for any other id."""
        if id_ is None or id_ not in self.examples:
            raise UserError("choose a table, or upload one")
        return self.examples[id_][0].table

    def expected(self, table: Table, question: str) -> Example | None:
        """The data set's own example of this question about this table."""
        wanted = _words(question)
        return next((e for e in self.examples.get(table.id, ()) if _words(e.question) == wanted), None)


@lru_cache(maxsize=4)
def tables_in(data: Path) -> Tables:
    """The tables of a folder in WikiSQL's layout; `UserError` at the first fault in it."""
    split = next((split for split in SPLITS if (data / f"{split}.jsonl").is_file()), "test")
    grouped: dict[str, list[Example]] = {}
    more: set[str] = set()
    for example in read_split(data, split):
        if len(grouped) < MOST_TABLES or example.table.id in grouped:
            grouped.setdefault(example.table.id, []).append(example)
        else:
            more.add(example.table.id)
    titles = dict(_titles(split_file(data, split, "tables.jsonl")))
    labels = {id_: _label(titles.get(id_), of[0].table) for id_, of in grouped.items()}
    ordered = sorted(grouped, key=lambda id_: labels[id_].casefold())
    count = f"first {MOST_TABLES:,} of {MOST_TABLES + len(more):,}" if more else f"{len(grouped):,}"
    return Tables(
        f"{count} in the {split} split of {data.name}",
        {id_: tuple(grouped[id_]) for id_ in ordered},
        {id_: labels[id_] for id_ in ordered},
    )


@lru_cache(maxsize=1)
def sample_tables() -> Tables:
    """The tables of the embedded data set, which is made for this."""
    with tempfile.TemporaryDirectory(prefix="zeropods-sample-") as work:
        folder = Path(work) / "embedded sample"
        write_sample(folder)
        return tables_in(folder)


def tables_of(prepared: Path | None) -> Tables:
    """The tables that a tokenized set was made from, if they lie near it; those of the embedded data set otherwise."""
    data = _raw_data(prepared) if prepared else None
    return sample_tables() if data is None else tables_in(data)


def _raw_data(prepared: Path) -> Path | None:
    """The folder whose files are those that the manifest names, by their sums."""
    sources = read_manifest(prepared).source_sha256
    shown = next((split for split in SPLITS if f"{split}.jsonl" in sources), "test")
    wanted = {name: sources.get(name) for name in (f"{shown}.jsonl", f"{shown}.tables.jsonl")}
    return next((folder for folder in _near(prepared.resolve()) if _holds(folder, wanted)), None)


def _near(prepared: Path) -> Iterator[Path]:
    for parent in prepared.parents[:LEVELS_UP]:
        yield parent
        for pattern in ("*", "data/*"):
            yield from sorted(path for path in parent.glob(pattern) if path.is_dir())


def _holds(folder: Path, wanted: dict[str, str | None]) -> bool:
    try:
        return all((folder / name).is_file() and sha256(folder / name) == sum_ for name, sum_ in wanted.items())
    except PermissionError:  # Another's folder, somewhere near.
        return False


def _titles(path: Path) -> Iterator[tuple[str, str]]:
    for _, document in json_lines(path):
        title = next((document[key] for key in TITLES if isinstance(document.get(key), str)), None)
        if title:
            yield str(document["id"]), title


def _label(title: str | None, table: Table) -> str:
    name = title or (table.id if any(map(str.isalpha, table.id)) else None)
    columns = ", ".join(table.header)
    # WikiSQL's ids are numbers, which nobody knows a table by.
    line = f"{name}: {columns}" if name else columns
    return line if len(line) <= LABEL else line[: LABEL - 1] + "…"


def _words(question: str) -> str:
    return " ".join(question.split()).casefold()
