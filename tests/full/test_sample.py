"""What the embedded sample data set promises."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from zeropods.data.manifest import SPLITS
from zeropods.data.sample import write_sample
from zeropods.data.wikisql import Example, SQLTable, read_split, read_tables
from zeropods.errors import UserError
from zeropods.sql.query import Execution, format_query, is_usable, parse_query

Splits = dict[str, list[Example]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, object]:
    return write_sample(folder)


@pytest.fixture(scope="module")
def splits(folder: Path, summary: dict[str, object]) -> Splits:
    return {split: list(read_split(folder, split)) for split in SPLITS}


@pytest.fixture(scope="module")
def tables(folder: Path, summary: dict[str, object]) -> dict[str, dict[str, SQLTable]]:
    return {split: read_tables(folder / f"{split}.tables.jsonl") for split in SPLITS}


def examples(splits: Splits) -> Iterator[Example]:
    for split in SPLITS:
        yield from splits[split]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_summary_counts_what_the_files_hold(folder, summary, splits, tables):
    expected = {f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")}
    assert contents(folder).keys() == expected
    assert summary == {
        "folder": str(folder),
        "written": True,
        "seed": 0,
        "questions": {split: len(splits[split]) for split in SPLITS},
        "tables": {split: len(tables[split]) for split in SPLITS},
        "held_out_questions": {"dev": 120, "test": 120},
    }
    line = (folder / "dev.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(line).keys() == {"phase", "table_id", "question", "sql"}


def test_a_fifth_of_the_questions_is_on_tables_that_train_has_not_and_none_stands_twice(splits, tables):
    for split in ("dev", "test"):
        held_out = [example for example in splits[split] if example.table.id not in tables["train"]]
        assert len(held_out) * 5 == len(splits[split])
    questions = Counter(example.question.lower().rstrip("?.") for example in examples(splits))
    assert max(questions.values()) == 1


def test_every_query_has_a_usable_result_its_values_from_the_question_and_is_read_back_from_its_text(splits):
    asked = defaultdict(list)
    for example in examples(splits):
        asked[example.table.id].append(example)
        for condition in example.query.conds:
            assert re.search(rf"(?<![\w.-]){re.escape(condition.value)}(?!\w|\.\d)", example.question)
    for on_table in asked.values():
        table = on_table[0].table
        with closing(Execution(table)) as execution:
            assert [e.question for e in on_table if not is_usable(e.query, execution.execute(e.query))] == []
        assert all(parse_query(format_query(e.query, table.header), table.header) == e.query for e in on_table)


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(content for _, content in sorted(contents(folder).items()))).hexdigest()[:16]


def test_the_bytes_of_seed_0_never_change(tmp_path):
    for task in ("text2sql", "squad", "lm"):
        write_sample(tmp_path / task, task=task)
    found = {path.name: digest(path) for path in tmp_path.iterdir()}
    assert found == {"text2sql": "afb468841421dd80", "squad": "c2d63e897c87ab3f", "lm": "4a904dcbc2f9d396"}


@pytest.mark.parametrize("task", ["squad", "lm"])
def test_a_sample_is_written_once_and_not_over_that_of_another_seed(task, tmp_path):
    assert write_sample(tmp_path, task=task)["written"]  # An empty folder is filled.
    assert not write_sample(tmp_path, task=task)["written"]
    with pytest.raises(UserError, match=r"than the sample of seed 7 \(train.*\); name a new folder"):
        write_sample(tmp_path, seed=7, task=task)


def test_what_is_no_sample_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"something else than the sample .*; name a new folder"):
        write_sample(tmp_path, task="lm")
    with pytest.raises(NotADirectoryError):
        write_sample(tmp_path / "thesis.txt", task="lm")
    assert contents(tmp_path) == {"thesis.txt": b"mine"}
