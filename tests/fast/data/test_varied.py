"""Varied copies of questions: they ask the same of a table with other columns and other values."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from zeropods.data.sample import write_sample
from zeropods.data.varied import names_of_columns, varied
from zeropods.data.wikisql import read_split
from zeropods.sql.example import Example
from zeropods.sql.query import Condition, Query
from zeropods.sql.table import SQLTable

CITIES = SQLTable(
    "cities",
    ("City", "Country", "People"),
    ("text", "text", "real"),
    (("oslo", "norway", 700_000.0), ("lima", "peru", 10_000_000.0), ("rome", "italy", 2_800_000.0)),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Example, Example]]:
    """Generated questions, each with a varied copy."""
    folder = tmp_path_factory.mktemp("sample") / "sample"
    write_sample(folder)
    rng = Random(5)
    return [(example, varied(example, rng, {})) for example in read_split(folder, "dev")]


def test_a_copy_names_the_columns_that_its_original_names(pairs: list[tuple[Example, Example]]) -> None:
    for original, copy in pairs:
        assert names_in_query(copy) == names_in_query(original)
        assert set(copy.table.header) <= set(original.table.header)
        for name, kind in zip(copy.table.header, copy.table.types, strict=True):
            assert original.table.types[original.table.header.index(name)] == kind
    assert sum(copy.table.header != original.table.header for original, copy in pairs) > len(pairs) / 2
    assert any(len(copy.table.header) < len(original.table.header) for original, copy in pairs)


def names_in_query(example: Example) -> list[str]:
    header = example.table.header
    return [header[example.query.sel], *(header[condition.column] for condition in example.query.conds)]


def test_another_value_is_a_cell_of_its_column_and_stands_where_the_old_one_stood(
    pairs: list[tuple[Example, Example]],
) -> None:
    replaced = 0
    for original, copy in pairs:
        for before, after in zip(original.query.conds, copy.query.conds, strict=True):
            assert after.operator == before.operator and after.value.lower() in copy.question.lower()
            if after.value != before.value:
                replaced += 1
                assert after.value.lower() in {str(row[before.column]).lower() for row in original.table.rows}
    assert replaced > len(pairs) / 5


def many(question: str, value: str) -> Iterator[Example]:
    example = Example(0, question, CITIES, Query(2, 0, (Condition(0, 0, value),)))
    for seed in range(100):
        yield varied(example, Random(seed), {})


def test_letter_case_follows_question_and_query() -> None:
    copies = {(copy.question, copy.query.conds[0].value) for copy in many("How big is Oslo?", "Oslo")}
    cities = ("Oslo", "Lima", "Rome")
    assert copies == {(f"How big is {city}?", city) for city in cities}
    copies = {(copy.question, copy.query.conds[0].value) for copy in many("how big is oslo", "Oslo")}
    assert copies == {(f"how big is {city.lower()}", city) for city in cities}


@pytest.mark.parametrize("question", ["How big is it?", "Is Oslo in Oslo?", "Is Osloer a word?"])
def test_a_value_that_its_question_does_not_hold_once_as_a_word_stays(question: str) -> None:
    assert {copy.question for copy in many(question, "Oslo")} == {question}


def test_a_number_is_written_without_a_point() -> None:
    example = Example(0, "Which city has 700000 people?", CITIES, Query(0, 0, (Condition(2, 0, "700000"),)))
    questions = {varied(example, Random(seed), {}).question for seed in range(100)}
    assert questions == {f"Which city has {people} people?" for people in (700_000, 10_000_000, 2_800_000)}


def renamed(question: str, query: Query) -> set[tuple[str, tuple[str, ...]]]:
    """The question, and the names in its query, of copies whose columns can be called `Depth`, if they are numbers,
    and `River`, if not."""
    names = {"text": ["River"], "real": ["Depth"]}
    example = Example(0, question, replace(CITIES, rows=()), query)
    copies = [varied(example, Random(seed), names) for seed in range(100)]
    return {(copy.question, tuple(names_in_query(copy))) for copy in copies}


def test_a_column_gets_the_name_of_another_table_in_question_and_table() -> None:
    of_norway = (Condition(1, 0, "nowhere"),)
    assert renamed("Which Country has 5 people?", Query(1, 0, (Condition(2, 0, "5"),))) == {
        ("Which Country has 5 people?", ("Country", "People")),
        ("Which Country has 5 depth?", ("Country", "Depth")),
        ("Which River has 5 people?", ("River", "People")),
        ("Which River has 5 depth?", ("River", "Depth")),
    }
    assert renamed("How many citys are in nowhere?", Query(0, 3, of_norway)) == {
        ("How many citys are in nowhere?", ("City", "Country")),
        ("How many rivers are in nowhere?", ("River", "Country")),
    }


@pytest.mark.parametrize(
    ("question", "value"),
    [
        pytest.param("Which is it of nowhere?", "nowhere", id="which the question does not name"),
        pytest.param("Which city is a city of nowhere?", "nowhere", id="which the question names twice"),
        pytest.param("Which city is city hall in?", "city hall", id="whose name is in a value"),
        pytest.param("Which city has the river nowhere?", "nowhere", id="whose new name is in the question"),
        pytest.param("Which cityscape is in nowhere?", "nowhere", id="whose name only begins a word"),
    ],
)
def test_a_column_keeps_its_name(question: str, value: str) -> None:
    assert {names[0] for _, names in renamed(question, Query(0, 0, (Condition(1, 0, value),)))} == {"City"}


def test_the_same_seed_gives_the_same_copies(tmp_path: Path) -> None:
    write_sample(tmp_path / "sample")
    examples = list(read_split(tmp_path / "sample", "dev"))
    names = names_of_columns(examples)

    def copies(seed: int) -> list[Example]:
        rng = Random(seed)
        return [varied(example, rng, names) for example in examples]

    assert copies(1) == copies(1) != copies(2)
