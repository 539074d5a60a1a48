"""The reader names the place of every fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeropods.data.wikisql import read_split, read_tables
from zeropods.errors import UserError

TABLE = {"id": "t", "header": ["Name", "Age"], "types": ["text", "real"], "rows": [["Ann", 30]]}
EXAMPLE = {
    "phase": 1,
    "table_id": "t",
    "question": "How old is Ann?",
    "sql": {"sel": 1, "agg": 0, "conds": [[0, 0, "Ann"]]},
}


def write(folder: Path, tables: list[Any], examples: list[Any]) -> Path:
    for name, documents in (("train.tables.jsonl", tables), ("train.jsonl", examples)):
        lines = [d if isinstance(d, bytes) else json.dumps(d).encode() for d in documents]
        (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def fault(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        list(read_split(folder, "train"))
    return str(raised.value)


def sql(**changes: Any) -> dict[str, Any]:
    return {**EXAMPLE, "sql": {**EXAMPLE["sql"], **changes}}


def test_an_example_comes_with_its_table_and_query(tmp_path: Path) -> None:
    (example,) = read_split(write(tmp_path, [TABLE], [EXAMPLE]), "train")
    assert (example.index, example.table.header, example.query.conds[0].value) == (0, ("Name", "Age"), "Ann")


def test_numbers_in_conditions_become_text(tmp_path: Path) -> None:
    (example,) = read_split(write(tmp_path, [TABLE], [sql(conds=[[1, 1, 30.5]])]), "train")
    assert example.query.conds[0].value == "30.5"


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (b"{broken", "train.jsonl:2: broken JSON at column 2"),
        (b'{"question": "\xff"}', "train.jsonl:2: byte 0xff is not UTF-8"),
        (b"[]", "train.jsonl:2: a list; expected a JSON object"),
        (b"[" * 100_000, "train.jsonl:2: maximum recursion depth exceeded"),
        ({**EXAMPLE, "table_id": "u"}, "train.jsonl:2: table_id 'u' has no table"),
        ({**EXAMPLE, "question": ""}, "train.jsonl:2: question is ''"),
        (sql(sel=2), "train.jsonl:2: sel 2; expected 0 to 1"),
        (sql(sel=True), "train.jsonl:2: sel True"),
        (sql(agg=6), "train.jsonl:2: agg 6; expected 0 to 5"),
        (sql(conds=[[5, 0, "x"]]), "train.jsonl:2: condition column 5; expected 0 to 1"),
        (sql(conds=[[0, 4, "x"]]), "train.jsonl:2: condition operator 4; expected 0 to 3"),
        (sql(conds=[[0, 0, None]]), "train.jsonl:2: condition value None"),
        (sql(conds="x"), "train.jsonl:2: conds 'x'; expected a list"),
    ],
)
def test_a_bad_example_is_named_with_its_line(tmp_path: Path, example: Any, said: str) -> None:
    assert said in fault(write(tmp_path, [TABLE], [EXAMPLE, example]))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TABLE, "tables.jsonl:2: table id 't' occurs twice"),
        ({**TABLE, "id": "u", "rows": [["Ann"]]}, "tables.jsonl:2: row 1 is ['Ann']; expected 2 cells"),
        ({**TABLE, "id": "u", "types": ["text"]}, "tables.jsonl:2: types ['text']"),
        ({**TABLE, "id": "u", "types": ["text", "date"]}, "tables.jsonl:2: types"),
        ({**TABLE, "id": "u", "header": []}, "tables.jsonl:2: header []"),
        ({**TABLE, "id": 5}, "tables.jsonl:2: id is 5"),
    ],
)
def test_a_bad_table_is_named_with_its_line(tmp_path: Path, table: Any, said: str) -> None:
    assert said in fault(write(tmp_path, [TABLE, table], [EXAMPLE]))


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    assert "train.jsonl: the file is empty" in fault(write(tmp_path, [TABLE], []))


def test_a_missing_file_says_where_it_comes_from(tmp_path: Path) -> None:
    assert "zeropods data get wikisql" in fault(tmp_path)


def test_an_unknown_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="split 'validation'; expected train, dev, test"):
        list(read_split(tmp_path, "validation"))


def test_all_of_the_real_data_is_read(shared_data: Path) -> None:
    assert sum(1 for _ in read_split(shared_data / "wikisql", "dev")) == 8_421
    assert len(read_tables(shared_data / "wikisql" / "dev.tables.jsonl")) == 2_716
