"""The facts that the sample's questions are about, and the words in which people ask for them.

A file of `facts/` holds tables, set apart by empty lines. A table is
    id,singular,plural        planets,planet,planets
    column names              Planet,Type,Diameter (km)
    kinds                     name,text,level
    phrases, split at |       planet,type|class,diameter|> is wider than {} km|? How wide is {}
    rows                      Mars,rocky,6779
Kinds of text: `name` (what a row is about; `who` where that is a person), `text`, `person`.
Kinds of numbers: `amount` (may be summed), `level` (may not), `year`, `count` (of a plural noun).
A phrase is a noun; or, after `= `, `> ` or `< `, a predicate with the value at `{}`; or, after `? `,
a question about the column with the row's name at `{}`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

KINDS = {
    "name": "text", "who": "text", "text": "text", "person": "text",
    "amount": "real", "level": "real", "year": "real", "count": "real",
}  # fmt: skip
KEYS = ("name", "who")


@dataclass(frozen=True)
class Column:
    """A column, and how people refer to it."""

    name: str
    kind: str
    """A key of KINDS."""
    phrases: tuple[str, ...]

    @property
    def type(self) -> str:
        """`text` or `real`, as in WikiSQL's files."""
        return KINDS[self.kind]

    @property
    def nouns(self) -> list[str]:
        """Names for the column: `diameter`."""
        return [p for p in self.phrases if p[:2] not in ("= ", "> ", "< ", "? ")]

    def marked(self, mark: str) -> list[str]:
        """The phrases after a mark: `is wider than {} km` for `>`."""
        return [p[2:] for p in self.phrases if p.startswith(f"{mark} ")]


@dataclass(frozen=True)
class FactTable:
    """A table of facts about things of one sort."""

    id: str
    singular: str
    plural: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str | int | float, ...], ...]

    @property
    def key(self) -> int:
        """Index of the column that names what a row is about."""
        return next(i for i, column in enumerate(self.columns) if column.kind in KEYS)


def read_facts() -> list[FactTable]:
    """All tables, in the order of file names; `ValueError` says which table is malformed."""
    tables = []
    files = (f for f in resources.files("zeropods.data").joinpath("facts").iterdir() if f.name.endswith(".csv"))
    for file in sorted(files, key=lambda f: f.name):
        tables += [_table(block) for block in _blocks(file.read_text("utf-8"))]
    return tables


def _blocks(text: str) -> Iterator[list[list[str]]]:
    for block in text.strip().split("\n\n"):
        yield list(csv.reader(block.strip().splitlines()))


def _table(block: list[list[str]]) -> FactTable:
    (id, singular, plural), names, kinds, phrases, *rows = block
    for line in (kinds, phrases, *rows):
        if len(line) != len(names):
            raise ValueError(f"facts {id}: {line!r}; expected {len(names)} cells")
    columns = tuple(Column(n, k, tuple(p.split("|"))) for n, k, p in zip(names, kinds, phrases, strict=True))
    if not set(kinds) <= KINDS.keys() or sum(kind in KEYS for kind in kinds) != 1:
        raise ValueError(f"facts {id}: kinds {kinds!r}; expected one name or who, and others of {list(KINDS)}")
    cells = tuple(tuple(_cell(c, v) for c, v in zip(columns, row, strict=True)) for row in rows)
    return FactTable(id, singular, plural, columns, cells)


def _cell(column: Column, text: str) -> str | int | float:
    if column.type == "text":
        return text
    return float(text) if "." in text else int(text)
