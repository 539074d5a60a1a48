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
from zeropods.data.wikisql import SPLITS, Example, SQLTable, read_split, read_tables
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
def tables(summary: SampleSummary) -> dict[str, dict[str, SQLTable]]:
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


def test_summary_counts_what_the_files_hold(summary, splits, tables):
    expected = {f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")}
    assert contents(summary.folder).keys() == expected
    assert summary.written
    assert summary.questions == {split: len(splits[split]) for split in SPLITS}
    assert summary.tables == {split: len(tables[split]) for split in SPLITS}
    assert summary.held_out_questions == {"dev": 120, "test": 120}
    line = (summary.folder / "dev.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(line).keys() == {"phase", "table_id", "question", "sql"}


def test_there_are_enough_questions_and_tables(splits, tables):
    assert all(len(splits[split]) >= least for split, least in (("train", 8_000), ("dev", 600), ("test", 600)))
    assert len(set().union(*tables.values())) > 60
    assert min(Counter(example.table.id for example in splits["train"]).values()) >= 100
    assert all(len(table.rows) >= 8 for split in SPLITS for table in tables[split].values())


@pytest.mark.parametrize("split", SPLITS)
def test_tables_file_lists_just_the_tables_in_use(splits, tables, split):
    assert tables[split].keys() == {example.table.id for example in splits[split]}


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_fifth_of_the_questions_is_on_tables_that_train_has_not(splits, tables, split):
    held_out = [example for example in splits[split] if example.table.id not in tables["train"]]
    assert len(held_out) * 5 == len(splits[split])


def test_no_question_stands_twice_in_any_split(splits):
    questions = Counter(example.question.lower().rstrip("?.") for example in examples(splits))
    assert max(questions.values()) == 1


@pytest.mark.parametrize("split", SPLITS)
def test_split_has_wikisqls_mix_of_queries(splits, split):
    assert {example.query.agg for example in splits[split]} == set(range(len(AGGREGATES)))
    assert {OPERATORS[c.operator] for example in splits[split] for c in example.query.conds} == {"=", ">", "<"}
    numbers = Counter(len(example.query.conds) for example in splits[split])
    assert numbers[1] > numbers[2] > numbers[3] > max(numbers[0], numbers[4]) > min(numbers[0], numbers[4]) > 0
    short = sum(len(example.question.split()) <= 18 for example in splits[split])
    assert short >= 0.8 * len(splits[split])


def test_queries_make_sense(splits):
    statistics = ("SUM", "AVG", "MAX", "MIN")
    kinds = {e.table.types[e.query.sel] for e in examples(splits) if AGGREGATES[e.query.agg] in statistics}
    kinds |= {e.table.types[c.column] for e, c in conditions(splits) if OPERATORS[c.operator] in "><"}
    assert kinds == {"real"}
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


def test_a_seed_gives_the_same_bytes_and_another_one_others(summary, tmp_path):
    write_sample(tmp_path)  # An empty folder is filled.
    assert contents(tmp_path) == contents(summary.folder)
    assert not write_sample(tmp_path).written
    with pytest.raises(UserError, match=r"'\w+\.\S+' is not that of the sample of seed 7"):
        write_sample(tmp_path, seed=7)


def test_what_is_no_sample_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt.*name a new folder"):
        write_sample(tmp_path)
    with pytest.raises(UserError, match="name a folder"):
        write_sample(tmp_path / "thesis.txt")
    assert contents(tmp_path) == {"thesis.txt": b"mine"}


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
