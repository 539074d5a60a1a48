"""What the embedded sample data set promises."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from zeropods.data.sample import SampleSummary, read_facts, write_sample
from zeropods.data.wikisql import SPLITS, Example, Table, read_split, read_tables
from zeropods.errors import UserError
from zeropods.sql.execute import Execution, is_usable
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition
from zeropods.sql.text import format_query, parse_query

Splits = dict[str, list[Example]]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> SampleSummary:
    return write_sample(tmp_path_factory.mktemp("sample") / "sample")


@pytest.fixture(scope="module")
def splits(summary: SampleSummary) -> Splits:
    return {split: list(read_split(summary.folder, split)) for split in SPLITS}


@pytest.fixture(scope="module")
def tables(summary: SampleSummary) -> dict[str, dict[str, Table]]:
    return {split: read_tables(summary.folder / f"{split}.tables.jsonl") for split in SPLITS}


def examples(splits: Splits) -> Iterator[Example]:
    for split in SPLITS:
        yield from splits[split]


def conditions(splits: Splits) -> Iterator[tuple[Example, Condition]]:
    for example in examples(splits):
        for condition in example.query.conds:
            yield example, condition


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_folder_holds_just_the_six_files(summary):
    expected = {f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")}
    assert contents(summary.folder).keys() == expected


@pytest.mark.parametrize(("split", "least"), [("train", 8_000), ("dev", 600), ("test", 600)])
def test_split_has_enough_questions(splits, split, least):
    assert len(splits[split]) >= least


def test_summary_counts_questions(summary, splits):
    assert summary.questions == {split: len(splits[split]) for split in SPLITS}


def test_summary_counts_tables(summary, tables):
    assert summary.tables == {split: len(tables[split]) for split in SPLITS}


def test_sample_has_more_than_sixty_tables(tables):
    assert len(set().union(*tables.values())) > 60


def test_each_train_table_has_a_hundred_questions(splits):
    assert min(Counter(example.table.id for example in splits["train"]).values()) >= 100


@pytest.mark.parametrize("split", SPLITS)
def test_tables_file_lists_just_the_tables_in_use(splits, tables, split):
    assert tables[split].keys() == {example.table.id for example in splits[split]}


def test_every_table_has_rows(tables):
    assert all(len(table.rows) >= 8 for split in SPLITS for table in tables[split].values())


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_fifth_of_the_questions_is_on_tables_that_train_has_not(splits, tables, split):
    held_out = [example for example in splits[split] if example.table.id not in tables["train"]]
    assert len(held_out) * 5 == len(splits[split])


def test_summary_counts_held_out_questions(summary):
    assert summary.held_out_questions == {"dev": 120, "test": 120}


def test_no_question_stands_twice_in_any_split(splits):
    questions = Counter(example.question.lower().rstrip("?.") for example in examples(splits))
    assert max(questions.values()) == 1


@pytest.mark.parametrize("split", SPLITS)
def test_split_has_every_aggregate(splits, split):
    assert {example.query.agg for example in splits[split]} == set(range(len(AGGREGATES)))


@pytest.mark.parametrize("split", SPLITS)
def test_split_has_the_three_operators(splits, split):
    used = {OPERATORS[c.operator] for example in splits[split] for c in example.query.conds}
    assert used == {"=", ">", "<"}


@pytest.mark.parametrize("split", SPLITS)
def test_one_condition_is_commonest_and_none_or_four_are_rare(splits, split):
    numbers = Counter(len(example.query.conds) for example in splits[split])
    assert numbers[1] > numbers[2] > numbers[3] > max(numbers[0], numbers[4]) > min(numbers[0], numbers[4]) > 0


def test_four_in_five_questions_have_at_most_eighteen_words(splits):
    lengths = [len(example.question.split()) for example in examples(splits)]
    assert sum(length <= 18 for length in lengths) >= 0.8 * len(lengths)


def test_statistics_are_of_real_columns(splits):
    kinds = {
        example.table.types[example.query.sel]
        for example in examples(splits)
        if AGGREGATES[example.query.agg] in ("SUM", "AVG", "MAX", "MIN")
    }
    assert kinds == {"real"}


def test_comparisons_are_of_real_columns(splits):
    kinds = {e.table.types[c.column] for e, c in conditions(splits) if OPERATORS[c.operator] in "><"}
    assert kinds == {"real"}


def test_no_query_has_two_conditions_on_a_column(splits):
    assert all(len({c.column for c in e.query.conds}) == len(e.query.conds) for e in examples(splits))


def test_every_value_stands_in_its_question_between_word_boundaries(splits):
    missing = [
        (example.question, c.value)
        for example, c in conditions(splits)
        if not re.search(rf"(?<![\w.-]){re.escape(c.value)}(?!\w|\.\d)", example.question)
    ]
    assert missing == []


def test_every_query_has_a_usable_result(splits):
    asked = defaultdict(list)
    for example in examples(splits):
        asked[example.table.id].append(example)
    useless = []
    for on_table in asked.values():
        with closing(Execution(on_table[0].table)) as execution:
            useless += [e.question for e in on_table if not is_usable(e.query, execution.execute(e.query))]
    assert useless == []


def test_every_query_is_read_back_from_its_text(splits):
    wrong = [
        example.question
        for example in examples(splits)
        if parse_query(format_query(example.query, example.table.header), example.table.header) != example.query
    ]
    assert wrong == []


def test_same_seed_gives_the_same_bytes(summary, tmp_path):
    write_sample(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(summary.folder)


def test_another_seed_gives_other_questions(summary, tmp_path):
    write_sample(tmp_path / "other", seed=1)
    assert contents(tmp_path / "other")["train.jsonl"] != contents(summary.folder)["train.jsonl"]


def test_new_sample_is_reported_as_written(summary):
    assert summary.written


def test_sample_that_is_there_already_is_not_written_again(summary):
    assert not write_sample(summary.folder).written


def test_empty_folder_is_filled(tmp_path):
    assert write_sample(tmp_path).written


def test_folder_with_something_else_is_rejected(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt.*name a new folder"):
        write_sample(tmp_path)


def test_rejected_folder_is_left_as_it_was(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError):
        write_sample(tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"mine"}


def test_sample_of_another_seed_is_rejected(summary):
    with pytest.raises(UserError, match=r"'train\.jsonl' is not that of the sample of seed 7"):
        write_sample(summary.folder, seed=7)


def test_file_in_the_place_of_the_folder_is_rejected(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="name a folder"):
        write_sample(tmp_path / "out")


def test_example_has_the_keys_of_the_official_layout(summary):
    line = (summary.folder / "dev.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(line).keys() == {"phase", "table_id", "question", "sql"}


def test_a_noun_or_predicate_names_one_column_of_a_table_only():
    shared = []
    for table in read_facts():
        phrases = Counter(
            phrase
            for column in table.columns
            for phrase in {*column.nouns, *column.marked("="), *column.marked(">"), *column.marked("<")}
        )
        shared += [(table.id, phrase) for phrase, number in phrases.items() if number > 1]
    assert shared == []


def test_no_counted_noun_is_the_plural_of_the_table():
    """`How many players ...` asks either for a cell or for a number of rows."""
    assert not [t.id for t in read_facts() for c in t.columns if c.kind == "count" and t.plural in c.nouns]


def test_every_row_is_about_something_else():
    assert all(len({row[table.key] for row in table.rows}) == len(table.rows) for table in read_facts())
