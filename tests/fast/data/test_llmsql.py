"""LLMSQL's layout is read, its faults are named, and answers are judged as its own evaluator judges them."""

import json
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made_llmsql import PLAYERS, TABLES, TEST, TRAIN, VAL, write_json_lines, write_llmsql
from zeropods.data.llmsql import SQLQuestion, read_questions
from zeropods.data.wikisql import (
    count_examples,
    read_split,
    source_files,
    split_of,
    table_ids,
    table_titles,
    wikisql_splits,
)
from zeropods.errors import UserError
from zeropods.evaluate.llmsql_execution import Database, with_llmsql
from zeropods.evaluate.score import read_predictions
from zeropods.measure.score_json import QueryScore
from zeropods.sql.query import AGGREGATES, Condition, Query, format_query
from zeropods.sql.statement import query_of_statement, statement_of
from zeropods.sql.table import SQLTable

# The layout.


def test_questions_come_with_their_tables_and_with_queries_whose_numbers_are_as_in_the_question(tmp_path: Path) -> None:
    folder = write_llmsql(tmp_path)
    examples = list(read_split(folder, "test"))
    assert [format_query(example.query, example.table.header) for example in examples] == [
        "SELECT Nat'l team FROM table WHERE Player = Bo O'Hara",
        "SELECT Player FROM table WHERE Goals > 3",
        "SELECT Known as \" FROM table WHERE Nat'l team = Norway",
        "SELECT Goals FROM table",
        "SELECT MAX Goals FROM table WHERE Nat'l team = Spain",
        "SELECT COUNT Time FROM table WHERE Year = 2003 AND Winner = Ann Bee",
        "SELECT Winner FROM table WHERE Year > 1999",
        "SELECT Time FROM table WHERE Winner = Bo O'Hara AND Year = 1999",
    ]
    # The eighth question, whose statement has `!=`, is passed over and keeps its number.
    assert [example.index for example in examples] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert examples[0].table is examples[1].table
    assert examples[0].table.rows == tuple(tuple(row) for row in PLAYERS["rows"])


def test_each_split_has_its_file_and_tests_all_questions_where_it_has_none(tmp_path: Path) -> None:
    folder = write_llmsql(tmp_path / "whole")
    assert wikisql_splits(folder) == ["train", "dev", "test"]
    names = {split: [path.name for path in source_files(folder, split)] for split in ("train", "dev", "test")}
    assert names == {
        "train": ["train_questions.jsonl", "tables.jsonl"],
        "dev": ["val_questions.jsonl", "tables.jsonl"],
        "test": ["test_questions.jsonl", "tables.jsonl"],
    }
    for split, (questions, tables) in names.items():
        assert (split_of(questions), split_of(tables)) == (split, None)
    assert (table_ids(folder, "train"), table_ids(folder, "dev")) == ({"1-100-1"}, {"2-200-3"})
    assert table_titles(folder, "test") == {"1-100-1": "Harbour Rovers", "2-200-3": "Lake Cup"}
    assert (count_examples(folder, "test", None), count_examples(folder, "test", 3)) == (9, 3)

    bare = write_llmsql(tmp_path / "bare", train_questions=None, val_questions=None, test_questions=None)
    assert wikisql_splits(bare) == ["test"]
    assert [path.name for path in source_files(bare, "test")] == ["questions.jsonl", "tables.jsonl"]
    assert split_of("questions.jsonl") == "test"
    assert len(list(read_split(bare, "test"))) == len([*TEST, *TRAIN, *VAL]) - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_questions": [TEST[0], TEST[0]]}, "test_questions.jsonl:2: question_id 1 occurs twice; keep one"),
        ({"test_questions": [TEST[0] | {"table_id": "u"}]}, "test_questions.jsonl:1: table_id 'u' is missing from "
         "tables.jsonl beside it"),
        ({"test_questions": [TEST[0] | {"question_id": "1"}]}, "test_questions.jsonl:1: question_id is '1'"),
        ({"test_questions": [{"question_id": 1, "question": "Who?", "table_id": "1-100-1"}]},
         "test_questions.jsonl:1: sql: Field required"),
        ({"test_questions": [TEST[7]]}, "test_questions.jsonl: none of its statements is of WikiSQL's form"),
        ({"tables": [PLAYERS, PLAYERS]}, "tables.jsonl:2: table_id '1-100-1' occurs twice; keep one of them"),
        ({"tables": [PLAYERS | {"types": ["text"]}]}, "tables.jsonl:1: 5 columns, but a row or its types have 1"),
        ({"tables": [{"id": "1-100-1"}]}, "tables.jsonl:1: table_id: Field required"),
        ({"tables": None}, "tables.jsonl: no such file; the questions of test_questions.jsonl are about its tables: "
         "fetch it together with the questions"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_place(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_llmsql(tmp_path, **changes)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        list(read_split(folder, "test"))
    assert "\n" not in str(raised.value)


def test_data_in_no_layout_are_told_which_file_is_missing(tmp_path: Path) -> None:
    message = (
        "dev.jsonl: no such file; give a folder that has it, or dev.parquet (the hub's layout), or val_questions.jsonl "
        "(LLMSQL's), or fetch it: zeropods data get wikisql --out wikisql"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        list(read_split(tmp_path, "dev"))
    write_json_lines(tmp_path / "dev.jsonl", [{"question": "Who?", "table_id": "t", "sql": {}}])
    message = (
        "dev.tables.jsonl: no such file, and dev.jsonl does not have its table in each row, as the hub's layout has; "
        "add one or the other"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        list(read_split(tmp_path, "dev"))


# Statements.

TABLE = SQLTable("t", ("Name", "No. 5", 'Says "a"'), ("text", "real", "text"), ())


NAMES = st.lists(st.text(min_size=1), min_size=3, max_size=3, unique_by=str.lower)
VALUES = st.one_of(
    st.text().filter(lambda text: not text.endswith(".0")),
    st.integers().map(str),
    st.sampled_from(["3.25", "-1e5", "1,234", "12 km", "It's"]),
)
CONDITIONS = st.tuples(st.integers(0, 2), st.integers(0, 2), VALUES).map(lambda parts: Condition(*parts))
QUERIES = st.tuples(st.integers(0, 2), st.integers(0, len(AGGREGATES) - 1), st.lists(CONDITIONS, max_size=3).map(tuple))


@given(NAMES, QUERIES.map(lambda parts: Query(*parts)))
def test_a_query_is_read_back_from_its_statement(header: list[str], query: Query) -> None:
    table = SQLTable("1-2", tuple(header), ("text", "real", "text"), ())
    assert query_of_statement(statement_of(query, table), table) == query


@pytest.mark.parametrize(
    "statement",
    [
        'SELECT * FROM "t"', 'SELECT COUNT(*) FROM "t"', 'SELECT Name FROM "t"', 'SELECT "Name", "No. 5" FROM "t"',
        'SELECT "Name" FROM t', 'SELECT "Name" FROM "u"', 'SELECT "Age" FROM "t"', 'SELECT "Name" FROM "t" LIMIT 1',
        'SELECT "Name" FROM "t" WHERE "No. 5" >= 3', 'SELECT "Name" FROM "t" WHERE "Age" = 3',
        'SELECT "Name" FROM "t" WHERE "No. 5" = 3 OR "No. 5" = 4', 'SELECT "Name" FROM "t" WHERE "No. 5" = "Name"',
        'SELECT MAX("Name" FROM "t"', 'SELECT "Name") FROM "t"', 'SELECT "Name" FROM "t"; SELECT 1', "",
    ],
)  # fmt: skip
def test_a_statement_of_another_form_is_no_query(statement: str) -> None:
    assert query_of_statement(statement, TABLE) is None


@pytest.mark.parametrize(
    ("statement", "query"),
    [
        ('select max( "no. 5" ) from "t" ;', Query(1, 1)),
        ('SELECT "Name" FROM "t" WHERE "No. 5" = 2003.0', Query(0, 0, (Condition(1, 0, "2003"),))),
        ('SELECT "Name" FROM "t" WHERE "No. 5" = \'2003.0\'', Query(0, 0, (Condition(1, 0, "2003.0"),))),
        ('SELECT "Name" FROM "t" WHERE "Says ""a""" = "It\'s"', Query(0, 0, (Condition(2, 0, "It's"),))),
    ],
)
def test_a_statement_may_be_written_in_other_ways(statement: str, query: Query) -> None:
    assert query_of_statement(statement, TABLE) == query


# The evaluator's verdicts.

VERDICTS = [
    (1, 'SELECT "Nat\'l team" FROM "Table" WHERE "Player" = "Bo O\'Hara"', True, 0, 0, 0),
    (1, 'It is ```sql\nselect "Nat\'l team" from "1-100-1" where "player" = \'Bo O\'\'Hara\'\n``` .', True, 0, 0, 0),
    (1, "SELECT 'ireland'", False, 0, 0, 0),
    (1, 'SELECT "Country" FROM "Table"', False, 0, 0, 0),
    (1, 'SELECT "Country" FROM "table"', False, 0, 0, 1),
    (2, 'SELECT "Player" FROM \'Table\' WHERE "Goals" > 3 ORDER BY "Goals" DESC', True, 0, 0, 0),
    # NULL, numbers and a text in one column cannot be sorted: neither the gold statement nor the answer counts.
    (4, 'SELECT "Goals" FROM Table', False, 0, 0, 1),
    (5, "SELECT NULL", True, 1, 1, 0),
    (6, "SELECT 2.0", True, 0, 0, 0),
    (6, "SELECT '2'", False, 0, 0, 0),
    (6, 'SELECT 1; no: SELECT COUNT(*) FROM "Table" WHERE "Year" = \'2003\'', True, 0, 0, 0),
    (7, 'SELECT DISTINCT "Winner" FROM "Table" WHERE "Year" > 1999', False, 0, 0, 0),
    # The placeholder is replaced in a longer word, too: what is left of it is an alias.
    (7, 'SELECT "Winner" FROM Tables WHERE "Year" > 1999', True, 0, 0, 0),
    (8, 'SELECT "Year" FROM "Table" WHERE "Year" < 2000', True, 0, 0, 0),
    (9, "I do not know.", False, 0, 0, 0),
    (9, "selected: SELECT\n\n\n\n'56.920'", False, 0, 0, 1),
    (9, " ".join(f"SELECT {number};" for number in range(10)) + " SELECT '56.920'", False, 0, 0, 0),
]
"""Question, answer, and what `evaluate_sample` of llmsql 0.1.16 says of it: whether it is right, and the numbers of
statements that find a lone NULL, of gold statements that do, and of statements that fail."""
UNSCORED = QueryScore(
    examples=1, exact_match=0.0, logical_form_accuracy=0.0, execution_accuracy=None, executable=0, intervals={}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llmsql(tmp_path_factory.mktemp("llmsql"))


@pytest.fixture(scope="module")
def questions(folder: Path) -> Sequence[SQLQuestion]:
    return list(read_questions(folder / "test_questions.jsonl"))


@pytest.mark.parametrize(("number", "answer", "right", "pred_none", "gold_none", "errors"), VERDICTS)
def test_an_answer_is_judged_as_the_evaluator_judges_it(
    folder: Path,
    questions: Sequence[SQLQuestion],
    number: int,
    answer: str,
    right: bool,
    pred_none: int,
    gold_none: int,
    errors: int,
) -> None:
    index = number - 1
    scored = with_llmsql(UNSCORED, questions[index : index + 1], {index: answer}, folder / "test_questions.jsonl")
    counts = scored.llmsql
    assert (counts.total, counts.matches, counts.accuracy) == (1, int(right), float(right))
    assert (counts.pred_none, counts.gold_none, counts.sql_errors) == (pred_none, gold_none, errors)
    assert counts.evaluator == "llmsql 0.1.16"


def test_the_package_itself_judges_so(folder: Path) -> None:
    utils = pytest.importorskip("llmsql.utils.evaluation_utils", reason="pip install --no-deps llmsql==0.1.16")
    by_id = {line["question_id"]: line for line in TEST}
    with closing(utils.connect_sqlite(str(folder / "sqlite_tables.db"))) as database:
        for number, answer, *verdict in VERDICTS:
            item = {"question_id": number, "completion": answer}
            right, _, counts = utils.evaluate_sample(item, by_id, database)
            assert [bool(right), counts["pred_none"], counts["gold_none"], counts["sql_error"]] == verdict, answer


def test_the_accuracy_has_an_interval_and_counts_what_was_not_asked_up_to_the_last_answer(
    folder: Path, questions: Sequence[SQLQuestion]
) -> None:
    path = folder / "test_questions.jsonl"
    right = {question.index: question.sql for question in questions if question.index != 7}
    scored = with_llmsql(UNSCORED, questions, right, path)
    # The fourth cannot be sorted, the eighth was not asked.
    assert (scored.llmsql.matches, scored.llmsql.total, scored.llmsql.beyond_form) == (7, 9, 1)
    assert scored.own_metrics == {"llmsql_execution": pytest.approx(7 / 9)}
    low, high = scored.intervals["llmsql_execution"] or (1.0, 0.0)
    assert low < 7 / 9 < high
    some = {index: answer for index, answer in right.items() if index < 3}
    scored = with_llmsql(UNSCORED, questions, some, path)
    assert (scored.llmsql.matches, scored.llmsql.total, scored.llmsql.beyond_form) == (3, 3, 0)


def test_a_statement_that_does_not_end_fails_and_none_changes_the_tables(folder: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n"
    with closing(Database(folder / "sqlite_tables.db", seconds=0.2)) as database:
        assert database.rows(f"SELECT * FROM ({endless})") is None
        assert database.rows("SELECT 2") == [(2,)]
        assert database.rows('DELETE FROM "1-100-1"') is None
        assert database.rows('SELECT COUNT(*) FROM "1-100-1"') == [(4,)]


def test_a_database_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    folder = write_llmsql(tmp_path)
    path = folder / "test_questions.jsonl"
    questions = list(read_questions(path))
    database = folder / "sqlite_tables.db"
    other = write_llmsql(tmp_path / "other", tables=[*TABLES, PLAYERS | {"table_id": "9-9-9"}])
    write_json_lines(other / "test_questions.jsonl", [TEST[0] | {"table_id": "9-9-9"}])
    missing_table = list(read_questions(other / "test_questions.jsonl"))
    with pytest.raises(UserError, match="db: has no table '9-9-9', which question 1 is about; fetch it together with"):
        with_llmsql(UNSCORED, missing_table, {0: "SELECT 1"}, path)
    database.write_text("<html>" * 200)
    with pytest.raises(UserError, match=r"db: cannot be read \(file is not a database\); fetch it together with"):
        with_llmsql(UNSCORED, questions, {0: "SELECT 1"}, path)
    database.unlink()
    with pytest.raises(UserError, match="db: no such file, and answers are executed on it; fetch it together with"):
        with_llmsql(UNSCORED, questions, {0: "SELECT 1"}, path)


def test_a_file_of_its_evaluator_is_no_prediction_file_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"question_id": 1, "completion": "SELECT 1"}))
    with pytest.raises(UserError, match="is in the form of LLMSQL's evaluator; only zeropods score reads it"):
        read_predictions(path)
