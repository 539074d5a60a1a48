"""What the embedded sample data set promises."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from zeropods.data.manifest import SPLITS
from zeropods.data.sample import SampleSummary, write_sample
from zeropods.data.wikisql import Example, SQLTable, read_split, read_tables
from zeropods.errors import UserError
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Execution, format_query, is_usable, parse_query

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
    assert summary.counts == {
        "questions": {split: len(splits[split]) for split in SPLITS},
        "tables": {split: len(tables[split]) for split in SPLITS},
        "held_out_questions": {"dev": 120, "test": 120},
    }
    line = (summary.folder / "dev.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(line).keys() == {"phase", "table_id", "question", "sql"}


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


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(content for _, content in sorted(contents(folder).items()))).hexdigest()[:16]


def test_the_bytes_of_seed_0_never_change(summary, tmp_path):
    folders = {task: write_sample(tmp_path / task, task=task).folder for task in ("squad", "lm")}
    found = {task: digest(folder) for task, folder in [("text2sql", summary.folder), *folders.items()]}
    assert found == {"text2sql": "afb468841421dd80", "squad": "c2d63e897c87ab3f", "lm": "4a904dcbc2f9d396"}


@pytest.mark.parametrize("task", ["squad", "lm"])
def test_a_sample_is_written_once_and_not_over_that_of_another_seed(task, tmp_path):
    assert write_sample(tmp_path, task=task).written  # An empty folder is filled.
    assert not write_sample(tmp_path, task=task).written
    with pytest.raises(UserError, match=r"'\S+' is not that of the sample of seed 7; name a new folder"):
        write_sample(tmp_path, seed=7, task=task)


def test_what_is_no_sample_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt.*name a new folder"):
        write_sample(tmp_path, task="lm")
    with pytest.raises(UserError, match="name a folder"):
        write_sample(tmp_path / "thesis.txt", task="lm")
    assert contents(tmp_path) == {"thesis.txt": b"mine"}
