"""The tables that a page offers: of a data set's test questions, or a visitor's CSV file."""

from __future__ import annotations

import csv
import io
import itertools
import re
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from zeropods.data.manifest import raw_data_of
from zeropods.data.sample import write_sample
from zeropods.data.wikisql import Example, SQLTable, read_split, split_file
from zeropods.errors import UserError
from zeropods.files import json_lines

SPLITS = ("test", "dev", "train")
"""The first that is there is shown: questions that training has not seen."""
MOST_TABLES = 1_000
TITLES = ("page_title", "caption", "name")
"""What WikiSQL's tables may be called by."""
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

    def table(self, id_: str | None) -> SQLTable:
        """A table of the list; `UserError` for any other id."""
        if id_ is None or id_ not in self.examples:
            raise UserError("choose a table, or upload one")
        return self.examples[id_][0].table

    def expected(self, table: SQLTable, question: str) -> Example | None:
        """The data set's own example of this question about this table."""
        wanted = _words(question)
        return next((e for e in self.examples.get(table.id, ()) if _words(e.question) == wanted), None)


@lru_cache(maxsize=4)
def tables_in(data: Path) -> Tables:
    """The tables of a folder in WikiSQL's layout; `UserError` at the first fault in it."""
    split = next((split for split in SPLITS if (data / f"{split}.jsonl").is_file()), "test")
    grouped: dict[str, list[Example]] = {}
    for example in read_split(data, split):
        grouped.setdefault(example.table.id, []).append(example)
    count = f"{len(grouped):,}" if len(grouped) <= MOST_TABLES else f"first {MOST_TABLES:,} of {len(grouped):,}"
    titles = dict(_titles(split_file(data, split, "tables.jsonl")))
    labels = {id_: _label(titles.get(id_), grouped[id_][0].table) for id_ in itertools.islice(grouped, MOST_TABLES)}
    ordered = sorted(labels, key=lambda id_: labels[id_].casefold())
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
    found = raw_data_of(prepared, SPLITS) if prepared else None
    return sample_tables() if found is None else tables_in(found[0])


def _titles(path: Path) -> Iterator[tuple[str, str]]:
    for _, document in json_lines(path):
        title = next((document[key] for key in TITLES if isinstance(document.get(key), str)), None)
        if title:
            yield str(document["id"]), title


def _label(title: str | None, table: SQLTable) -> str:
    name = title or (table.id if any(map(str.isalpha, table.id)) else None)
    columns = ", ".join(table.header)
    # WikiSQL's ids are numbers, which nobody knows a table by.
    line = f"{name}: {columns}" if name else columns
    return line if len(line) <= LABEL else line[: LABEL - 1] + "…"


def _words(question: str) -> str:
    return " ".join(question.split()).casefold()


# A CSV file that a visitor brings, read as a table; what is wrong with one is said in a line.

MAX_BYTES = 2 * 2**20
MAX_ROWS, MAX_COLUMNS = 10_000, 40
DELIMITERS = ",;\t|"
KEPT = 8
"""Number of uploaded tables in memory, for all visitors: one of 2 MiB takes 30 MiB there."""
NUMBER = re.compile(r"[-+−]?(0|[1-9]\d{0,2}(,\d{3})+|[1-9]\d*|0?(?=\.\d))(\.\d+)?([eE][-+]?\d{1,2})?")
"""A leading zero, as in a postcode, makes a name of it."""


@lru_cache(maxsize=KEPT)
def uploaded(path: Path) -> SQLTable:
    """A visitor's table, read again from the file where others came since; `UserError` as for `read_csv`."""
    try:
        return read_csv(path)
    except FileNotFoundError:
        raise UserError(f"the file {_shown(path.name)} is not kept any longer; upload it again") from None


def read_csv(path: Path) -> SQLTable:
    """The table in a CSV file: names in its first line, columns of numbers `real`, others `text`, empty cells None.

    Raises:
        UserError: not text in UTF-8 (or UTF-16 with its mark), too large, no header, a name that is empty or is there
            twice, a row of another length, no row.
    """
    name = f"the file {_shown(path.name)}"
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{name}: larger than {MAX_BYTES >> 20} MiB; upload fewer rows")
    lines = _lines(name, path.read_bytes())
    if len(lines) < 2:
        raise UserError(f"{name}: has no row; expected a line of column names, then rows")
    if len(lines) > MAX_ROWS + 1:
        raise UserError(f"{name}: more than {MAX_ROWS:,} rows; upload fewer")
    (_, header), *rows = lines
    _check_header(name, header)
    for number, cells in rows:
        if len(cells) != len(header):
            raise UserError(f"{name}: line {number}: {len(cells)} cells for {len(header)} columns; correct the line")
    columns = zip(*(cells for _, cells in rows), strict=True)
    types = tuple("real" if _all_numbers(column) else "text" for column in columns)
    return SQLTable("uploaded", tuple(header), types, tuple(tuple(cell or None for cell in cells) for _, cells in rows))


def _shown(text: str, most: int = 60) -> str:
    """A text of the visitor's, fit for a message: one line, letters that can be seen, not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return line if len(line) <= most else line[: most - 1] + "…"


def _lines(name: str, content: bytes) -> list[tuple[int, list[str]]]:
    """Number and cells of each line that is not blank; the delimiter is the most frequent one in the first line."""
    try:
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}: line {line} is not text in UTF-8; save the table as CSV in UTF-8") from None
    first = text.lstrip().split("\n", 1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(DELIMITERS, key=first.count), strict=True)
    try:
        lines = [(reader.line_num, [" ".join(cell.split()) for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise UserError(f"{name}: line {reader.line_num}: {error}; correct the quotes there") from None
    return [(number, cells) for number, cells in lines if any(cells)]


def _check_header(name: str, header: list[str]) -> None:
    # To the model names are the same that differ in nothing but the form of their letters.
    same = [unicodedata.normalize("NFKC", column).casefold() for column in header]
    twice = next((column for column, form in zip(header, same, strict=True) if same.count(form) > 1), None)
    if len(header) > MAX_COLUMNS:
        raise UserError(f"{name}: {len(header)} columns; expected at most {MAX_COLUMNS}: leave some out")
    for number, form in enumerate(same, 1):
        if not any(letter.isalnum() for letter in form):
            raise UserError(f"{name}: column {number} has no name; the first line names every column")
    if twice is not None:
        raise UserError(f"{name}: two columns are named {_shown(twice)!r}; rename one")


def _all_numbers(column: tuple[str, ...]) -> bool:
    cells = list(filter(None, column))
    return bool(cells) and all(NUMBER.fullmatch(cell) for cell in cells)
