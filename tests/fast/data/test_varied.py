"""Varied copies of questions: they ask the same of a table with other columns and other values."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from zeropods.data.sample import write_sample
from zeropods.data.varied import varied
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
    return [(example, varied(example, rng)) for example in read_split(folder, "dev")]


def test_a_copy_names_the_columns_that_its_original_names(pairs: list[tuple[Example, Example]]) -> None:
    for original, copy in pairs:
        assert names_of_columns(copy) == names_of_columns(original)
        assert set(copy.table.header) <= set(original.table.header)
        for name, kind in zip(copy.table.header, copy.table.types, strict=True):
            assert original.table.types[original.table.header.index(name)] == kind
    assert sum(copy.table.header != original.table.header for original, copy in pairs) > len(pairs) / 2
    assert any(len(copy.table.header) < len(original.table.header) for original, copy in pairs)


def names_of_columns(example: Example) -> list[str]:
    header = example.table.header
    return [header[example.query.sel], *(header[condition.column] for condition in example.query.conds)]


def test_another_value_is_a_cell_of_its_column_and_stands_where_the_old_one_stood(
    pairs: list[tuple[Example, Example]],
) -> None:
    replaced = 0
    for original, copy in pairs:
        for before, after in zip(original.query.conds, copy.query.conds, strict=True):
            assert after.operator == before.operator and after.value in copy.question
            if after.value != before.value:
                replaced += 1
                assert after.value in {str(row[before.column]) for row in original.table.rows}
    assert replaced > len(pairs) / 5


def many(question: str, value: str) -> Iterator[Example]:
    example = Example(0, question, CITIES, Query(2, 0, (Condition(0, 0, value),)))
    for seed in range(100):
        yield varied(example, Random(seed))


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
    questions = {varied(example, Random(seed)).question for seed in range(100)}
    assert questions == {f"Which city has {people} people?" for people in (700_000, 10_000_000, 2_800_000)}


def test_the_same_seed_gives_the_same_copies(tmp_path: Path) -> None:
    write_sample(tmp_path / "sample")
    examples = list(read_split(tmp_path / "sample", "dev"))

    def copies(seed: int) -> list[Example]:
        rng = Random(seed)
        return [varied(example, rng) for example in examples]

    assert copies(1) == copies(1) != copies(2)
