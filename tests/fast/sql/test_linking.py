"""What a question quotes from the rows of its table."""

from itertools import islice
from pathlib import Path

import pytest

from zeropods.data.wikisql import read_split
from zeropods.sql.linking import links
from zeropods.sql.table import Cell, SQLTable

NAMES = ("Inventor", "Invention", "Field", "Year")
KINDS = ("text", "text", "text", "real")
ROWS: tuple[tuple[Cell, ...], ...] = (
    ("René Laennec", "Stethoscope", "Medicine", 1816),
    ("York", "New  York bridge", "—", 1816),
    (None, "ﬁfth (b)", "medicine", 1900),
)  # fmt: skip
TABLE = SQLTable("inventions", NAMES, KINDS, ROWS)


@pytest.mark.parametrize(
    ("question", "linked"),
    [
        ("What is the field of stethoscope?", {1: ("stethoscope",)}),
        # A column of numbers is linked by any number, whether a cell has it or not.
        ("Whose stethoscope came after 1800?", {1: ("stethoscope",), 3: ()}),
        ("Which came after 1800?", {3: ()}),
        # Whole words only, in any letter case and normal form; equal cells are one.
        ("Who made stethoscopes?", None),
        ("Medicine by RENÉ LAENNEC?", {0: ("rené laennec",), 2: ("medicine",)}),
        # A longer cell does not hide a shorter one of another column.
        ("Who built New York bridge?", {0: ("york",), 1: ("new york bridge",)}),
        ("who has Fifth (b)?", {1: ("fifth (b)",)}),
        # A dash quotes nothing.
        ("Which field — if any?", None),
        ("", None),
    ],
)
def test_a_column_is_linked_by_a_cell_that_the_question_quotes(
    question: str, linked: dict[int, tuple[str, ...]] | None
) -> None:
    assert links(question, TABLE) == linked


@pytest.mark.parametrize(
    ("question", "quoted"),
    [
        ("Which has version 2.5?", "2.5"),
        ("Who has over 1,234 points?", "1,234"),
        # A point or comma between other characters, or at the end of a sentence, is no number's.
        ("Is it 5, or more than 2?", "5 2"),
        ("Is it version a.5?", "5"),
        ("Who won 3-2?", "3 2"),
        # Nothing in a cell is a regular expression.
        ("Is a.*b (c) better than [a-z]+?", "a.*b (c) [a-z]+"),
    ],
)
def test_a_number_is_quoted_as_a_whole_and_a_sign_as_it_is(question: str, quoted: str) -> None:
    cells = ("2.5", "2", "5", "1,234", "1", "234", "3", "a.*b", "(c)", "[a-z]+", "a.c")
    table = SQLTable("cells", ("A",), ("text",), tuple((cell,) for cell in cells))
    linked = links(question, table)
    assert linked is not None and set(linked[0]) == set(quoted.split())


def test_a_table_without_rows_links_numbers_alone() -> None:
    empty = SQLTable("empty", NAMES, KINDS, ())
    assert links("What is the field of Stethoscope?", empty) is None
    assert links("What came in 1816?", empty) == {3: ()}


def test_nearly_all_conditions_of_wikisql_are_linked(shared_data: Path) -> None:
    """The figures of the docstring, on every fourth question of dev."""
    other_columns = 0
    other_values = 0
    examples = list(islice(read_split(shared_data / "wikisql", "dev"), 0, None, 4))
    for example in examples:
        linked = links(example.question, example.table)
        if linked is None:
            continue
        for column, _, value in example.query.conds:
            cells = linked.get(column)
            if cells is None:
                other_columns += 1
            elif cells and " ".join(value.lower().split()) not in cells:
                other_values += 1
    assert len(examples) == 2_106
    assert other_columns <= 8 and other_values <= 4
