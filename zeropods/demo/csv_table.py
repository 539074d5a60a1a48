"""A CSV file that a visitor brings, read as a table; what is wrong with one is said in a line."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from zeropods.data.wikisql import Cell, Table
from zeropods.errors import UserError

MAX_BYTES = 2 * 2**20
MAX_ROWS, MAX_COLUMNS = 10_000, 40
MAX_NAME, MAX_CELL = 80, 500
"""Characters."""
DELIMITERS = ",;\t|"
ID = "uploaded"

_NUMBER = re.compile(r"[-+−]?(0|[1-9]\d{0,2}(,\d{3})+|[1-9]\d*|0?(?=\.\d))(\.\d+)?([eE][-+]?\d{1,3})?")
"""A leading zero, as in a postcode, makes a name of it."""
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")

Line = tuple[int, list[str]]
KEPT = 8
"""Uploaded tables in memory, for all visitors: one of 2 MiB takes 30 MiB there."""


@lru_cache(maxsize=KEPT)
def uploaded(path: Path) -> Table:
    """A visitor's table, read again from the file where others came since; `UserError` as for `read_csv`."""
    try:
        return read_csv(path)
    except FileNotFoundError:
        raise UserError(f"the file {shown(path.name)} is not kept any longer; upload it again") from None


def read_csv(path: Path) -> Table:
    """The table in a CSV file: names in its first line, columns of numbers `real`, others `text`, empty cells None.

    Raises:
        UserError: not text in UTF-8 (or UTF-16 with its mark), too large, no header, a name that is empty or stands
            twice, a row of another length, no row.
    """
    name = f"the file {shown(path.name)}"
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{name}: larger than {MAX_BYTES >> 20} MiB; upload fewer rows")
    lines = _lines(name, _text(name, path.read_bytes()))
    first = next(lines, None)
    if first is None:
        raise UserError(f"{name}: is empty; expected a line of column names, then rows")
    header = _header(name, first)
    rows = tuple(_row(name, header, line, number) for number, line in enumerate(lines, 1))
    if not rows:
        raise UserError(f"{name}: has column names but no row; add rows")
    types = tuple("real" if _all_numbers(column) else "text" for column in zip(*rows, strict=True))
    return Table(ID, header, types, rows)


def shown(text: str, most: int = 60) -> str:
    """A text of the visitor's, fit for a message: one line, letters that can be seen, not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return line if len(line) <= most else line[: most - 1] + "…"


def _text(name: str, content: bytes) -> str:
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}: line {line} is not text in UTF-8; save the table as CSV in UTF-8") from None
    found = _BINARY.search(text)
    if found:
        raise UserError(f"{name}: holds the control character {ord(found.group()):#04x}; expected a text file")
    return text


def _lines(name: str, text: str) -> Iterator[Line]:
    """Number and cells of each line that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [" ".join(cell.split()) for cell in cells]
    except csv.Error as error:
        raise UserError(f"{name}: line {reader.line_num}: {error}; correct the quotes there") from None


def _delimiter(text: str) -> str:
    """The one that stands most often in the first line."""
    first = text.lstrip().split("\n", 1)[0]
    return max(DELIMITERS, key=first.count)


def _header(name: str, line: Line) -> tuple[str, ...]:
    number, names = line
    if len(names) > MAX_COLUMNS:
        raise UserError(f"{name}: {len(names)} columns; expected at most {MAX_COLUMNS}: leave some out")
    seen: dict[str, int] = {}
    for place, column in enumerate(names, 1):
        # To the model names are the same that differ in nothing but the form of their letters.
        same = unicodedata.normalize("NFKC", column).casefold()
        if not any(letter.isalnum() for letter in same):
            raise UserError(f"{name}: line {number}: column {place} has no name; the first line names every column")
        if len(column) > MAX_NAME:
            raise UserError(f"{name}: column {place} has a name of {len(column)} characters; at most {MAX_NAME}")
        if same in seen:
            raise UserError(f"{name}: columns {seen[same]} and {place} are both named {shown(column)!r}; rename one")
        seen[same] = place
    return tuple(names)


def _row(name: str, header: tuple[str, ...], line: Line, number: int) -> tuple[Cell, ...]:
    place, cells = line
    if number > MAX_ROWS:
        raise UserError(f"{name}: more than {MAX_ROWS:,} rows; upload fewer")
    if len(cells) != len(header):
        raise UserError(f"{name}: line {place}: {len(cells)} cells for {len(header)} columns; correct the line")
    if longest := next((cell for cell in cells if len(cell) > MAX_CELL), None):
        raise UserError(f"{name}: line {place} has a cell of {len(longest):,} characters; at most {MAX_CELL}")
    return tuple(cell or None for cell in cells)


def _all_numbers(column: tuple[Cell, ...]) -> bool:
    cells = [str(cell) for cell in column if cell is not None]
    return bool(cells) and all(map(_is_number, cells))


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and math.isfinite(float(text.replace(",", "").replace("−", "-")))
