"""The reader names the place of every fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from zeropods.data.wikisql import read_split, read_tables
from zeropods.errors import UserError

TABLE = {"id": "t", "header": ["Name", "Age"], "types": ["text", "real"], "rows": [["Ann", 30]]}
SQL = {"sel": 1, "agg": 0, "conds": [[0, 0, "Ann"], [1, 1, 30.0]]}
EXAMPLE = {"phase": 1, "table_id": "t", "question": "How old is Ann?", "sql": SQL}


def write(folder: Path, tables: list[Any], examples: list[Any]) -> Path:
    for name, documents in (("train.tables.jsonl", tables), ("train.jsonl", examples)):
        lines = [d if isinstance(d, bytes) else json.dumps(d).encode() for d in documents]
        (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def test_an_example_comes_with_its_table_and_query_whose_numbers_become_text(tmp_path: Path) -> None:
    (example,) = read_split(write(tmp_path, [TABLE], [EXAMPLE]), "train")
    assert (example.index, example.table.header) == (0, ("Name", "Age"))
    assert [condition.value for condition in example.query.conds] == ["Ann", "30.0"]


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        ([b"{broken"], "2: broken JSON"),
        ([b"[]"], "2: it is []"),
        ([EXAMPLE | {"table_id": "u"}], "2: table_id 'u' has no table"),
        ([EXAMPLE | {"question": " "}], "2: question is ' '"),
        ([EXAMPLE | {"sql": SQL | {"sel": 2}}], "2: Query(sel=2"),
        ([EXAMPLE | {"sql": SQL | {"sel": True}}], "2: sql.sel is True"),
        ([EXAMPLE | {"sql": SQL | {"conds": [[5, 0, "x"]]}}], "its table t has 2 columns"),
        ([EXAMPLE | {"sql": SQL | {"conds": [[0, 4, "x"]]}}], "2: sql.conds.0.1 is 4"),
        ([EXAMPLE | {"sql": SQL | {"conds": [[0, 0]]}}], "2: sql.conds.0"),
    ],
)
def test_a_bad_example_is_named_with_its_line(tmp_path: Path, examples: list[Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        list(read_split(write(tmp_path, [TABLE], [EXAMPLE, *examples]), "train"))
    assert "train.jsonl:2" in str(raised.value) and said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "tables.jsonl:2: table id 't' occurs twice"),
        ({"id": "u", "rows": [["Ann"]]}, "tables.jsonl:2: 2 columns, but a row or the types with 1"),
        ({"id": "u", "types": ["text", "date"]}, "tables.jsonl:2: types.1 is 'date'"),
        ({"id": "u", "header": []}, "tables.jsonl:2: header is []"),
    ],
)
def test_a_bad_table_is_named_with_its_line(tmp_path: Path, table: Any, said: str) -> None:
    with pytest.raises(UserError) as raised:
        list(read_split(write(tmp_path, [TABLE, TABLE | table], [EXAMPLE]), "train"))
    assert said in str(raised.value)


def test_a_split_that_is_empty_or_missing_is_named(tmp_path: Path) -> None:
    for split, said in {
        "train": "train.jsonl: the file is empty",
        "dev": "zeropods data get wikisql",
    }.items():
        with pytest.raises(UserError, match=said):
            list(read_split(write(tmp_path, [TABLE], []), split))


def test_all_of_the_real_data_is_read(shared_data: Path) -> None:
    assert sum(1 for _ in read_split(shared_data / "wikisql", "dev")) == 8_421
    assert len(read_tables(shared_data / "wikisql" / "dev.tables.jsonl")) == 2_716
