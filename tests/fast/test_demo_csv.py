"""A visitor's CSV file: read as a table, or refused in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeropods.data.wikisql import Table
from zeropods.demo.tables import MAX_BYTES, MAX_CELL, MAX_COLUMNS, MAX_NAME, MAX_ROWS, read_csv, uploaded
from zeropods.errors import UserError


def table(folder: Path, content: str | bytes) -> Table:
    path = folder / "pets.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_csv(path)


def test_names_types_and_cells_are_read(tmp_path: Path) -> None:
    read = table(tmp_path, "Name,Age,Postcode\nTom,3,01234\nKit,,99999\n")
    assert read.header == ("Name", "Age", "Postcode")
    assert read.types == ("text", "real", "text")
    assert read.rows == (("Tom", "3", "01234"), ("Kit", None, "99999"))


@pytest.mark.parametrize("number", ["0", "-3", "−3", "1,234", "1,234,567.5", ".5", "0.5", "2e3", "12.25"])
def test_numbers_make_a_column_numeric(tmp_path: Path, number: str) -> None:
    assert table(tmp_path, f'A;B\n"{number}";x\n').types == ("real", "text")


@pytest.mark.parametrize("word", ["nan", "inf", "1e999", "007", "12 km", "1.2.3", "2026-01-02", "1,23", "--1", "."])
def test_what_is_no_number_makes_a_column_text(tmp_path: Path, word: str) -> None:
    assert table(tmp_path, f'A;B\n"{word}";1\n').types == ("text", "real")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_of_spreadsheets_are_told_apart(tmp_path: Path, delimiter: str) -> None:
    assert table(tmp_path, f"A{delimiter}B\n1{delimiter}x\n").header == ("A", "B")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_with_and_without_a_mark_are_read(tmp_path: Path, encoding: str) -> None:
    assert table(tmp_path, "Käse,猫\n1,ß\n".encode(encoding)).header == ("Käse", "猫")


def test_quoted_line_breaks_and_blank_lines_are_taken(tmp_path: Path) -> None:
    assert table(tmp_path, 'A,B\r\n"two\nlines",1\r\n\r\n').rows == (("two lines", "1"),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"A,B\n", "no row"),
        (b"A,B\n1\n", "line 2: 1 cells for 2 columns"),
        (b"A,B\n1,2\n1,2,3\n", "line 3: 3 cells for 2 columns"),
        (b"A,\n1,2\n", "column 2 has no name"),
        (b"A,?\n1,2\n", "column 2 has no name"),
        (b"A,a\n1,2\n", "columns 1 and 2 are both named 'a'"),
        ("A²,A2\n1,2\n".encode(), "columns 1 and 2 are both named"),
        ("Käse,B\n1,2\n".encode("latin-1"), "line 1 is not text in UTF-8"),
        (b"\xff\xfeA", "is not text in UTF-8"),
        (b"A,B\n\x00\x01,2\n", "control character 0x00"),
        (b'A,B\n"1,2\n', "line 2: unexpected end of data"),
        (b"A," + b"x" * 200_000 + b"\n1,2\n", "field larger"),
        (b"A" * (MAX_NAME + 1) + b",B\n1,2\n", f"at most {MAX_NAME}"),
        (b"A,B\n1," + b"x" * (MAX_CELL + 1), f"at most {MAX_CELL}"),
        (",".join(f"c{n}" for n in range(MAX_COLUMNS + 1)).encode(), f"at most {MAX_COLUMNS}"),
        (b"A\n" + b"1\n" * (MAX_ROWS + 1), f"more than {MAX_ROWS:,} rows"),
        (b"A\n" + b"1" * MAX_BYTES, "larger than 2 MiB"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=r"pets\.csv") as error:
        table(tmp_path, content)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_has_gone_is_asked_for_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the file cats.csv is not kept any longer; upload it again"):
        uploaded(tmp_path / "cats.csv")
