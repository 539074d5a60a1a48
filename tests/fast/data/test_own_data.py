"""A data set made of a user's own CSV files, by the command line."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from zeropods.cli import main
from zeropods.data.wikisql import read_split, wikisql_splits
from zeropods.sql.query import execute, format_query

TABLES = {
    "people": "Name;Home town;Weight (kg)\nAnn;Oslo;61,5\nBo;;72,25\n",
    "Rivers": 'River,Length (km)\nNile,"6,650"\nRhine,1230\n',
    "lakes": "Lake,Depth\nBaikal,1642\n",
    "broken": "A,B\n1,2,3\n",
}
WHERE_IS_ANN = ("Where does Ann live?", "SELECT [Home town] FROM people WHERE Name = 'Ann'")


def made(folder: Path, questions: Sequence[tuple[str, ...]], **tables: str) -> int:
    """The exit status of the verb with these questions, on the tables above if no others are given."""
    (folder / "tables").mkdir(exist_ok=True)
    for name, content in (tables or TABLES).items():
        (folder / "tables" / f"{name}.csv").write_text(content)
    rows = [["question", "sql"], *questions]
    quoted = (",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
    (folder / "questions.csv").write_text("\n".join(quoted) + "\n")
    places = {"--tables": "tables", "--questions": "questions.csv", "--out": "own"}
    return main(
        ["data", "from-csv", "--json", *(word for flag, name in places.items() for word in (flag, str(folder / name)))]
    )


@pytest.mark.parametrize(
    ("sql", "query"),
    [
        ("SELECT [Home town] FROM people", "SELECT Home town FROM table"),
        ("select \"home TOWN\" from People as p where p.name = 'Ann';", "SELECT Home town FROM table WHERE Name = Ann"),
        (
            "SELECT count(*) AS n FROM people WHERE [Home town] = 'Oslo'",
            "SELECT COUNT Name FROM table WHERE Home town = Oslo",
        ),
        (
            "SELECT MAX(`Length (km)`) FROM rivers WHERE (River = 'O''H' AND `Length (km)` > -3) AND [Length (km)] < 9",
            "SELECT MAX Length (km) FROM table WHERE River = O'H AND Length (km) > -3 AND Length (km) < 9",
        ),
    ],
)
def test_a_plain_statement_is_the_same_query(tmp_path: Path, sql: str, query: str) -> None:
    assert made(tmp_path, [("What?", sql)]) == 0
    (example,) = read_split(tmp_path / "own", "train")
    assert format_query(example.query, example.table.header) == query


BEYOND = {
    "SELECT River FROM rivers ORDER BY River": "ORDER: not supported",
    "SELECT River FROM rivers GROUP BY River": "GROUP: not supported",
    "SELECT DISTINCT River FROM rivers": "DISTINCT: not supported",
    "WITH a AS (SELECT 1) SELECT River FROM rivers": "WITH: not supported",
    "SELECT River FROM rivers JOIN lakes ON 1 = 1": "JOIN: not supported",
    "SELECT River FROM (SELECT * FROM rivers)": "no plain table after FROM",
    "SELECT 1": "no plain table after FROM",
    "SELECT River FROM rivers UNION SELECT Lake FROM lakes": "not a single SELECT",
    "SELECT River FROM rivers; DROP TABLE rivers": "not a single SELECT",
    "SELECT River FROM rivers WHERE a b": "not valid SQL near 'b'",
    "SELECT River FROM rivers WHERE River = 'x": "not valid SQL",
    "SELECT * FROM rivers": "* is selected",
    "SELECT COUNT(DISTINCT River) FROM rivers": "is selected",
    "SELECT River, River FROM rivers": "2 columns are selected",
    "SELECT Depth FROM rivers": "'Depth' is not a column of rivers, whose columns are River, Length (km)",
    "SELECT a FROM seas": "no table 'seas'; the tables are Rivers, broken, lakes, people",
    "SELECT River FROM rivers WHERE River = 'a' OR River = 'b'": "OR River = 'b': not supported; expected one column",
    "SELECT River FROM rivers WHERE River >= 'a'": "WHERE COLUMN =, > or < VALUE, joined by AND",
    "SELECT River FROM rivers WHERE River IN ('a')": "River IN ('a'): not supported",
    "SELECT River FROM rivers WHERE 3 < River": "expected a column, one of =, >, <",
    'SELECT River FROM rivers WHERE River = "Nile"': "put text in 'single quotes'",
    "SELECT River FROM rivers WHERE River = ' '": "the value is empty; give one",
    "SELECT River FROM rivers WHERE River = 'a AND River = b'": "can be read as another query",
    "": "its sql is empty; write one, or remove the row",
}


def test_each_row_that_cannot_be_taken_is_named_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made(tmp_path, [WHERE_IS_ANN, *(("What?", sql) for sql in BEYOND), ("one cell",)]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["questions"], len(document["left_out"])) == ({"train": 1}, len(BEYOND) + 1)
    for number, (line, said) in enumerate(
        zip(document["left_out"], [*BEYOND.values(), "1 cell; expected question and sql"], strict=True), start=3
    ):
        assert line.startswith(f"{tmp_path}/questions.csv:{number}: ") and said in line
    assert document["remarks"] == [
        f"{tmp_path}/tables: too few tables to keep some for dev and test; questions are divided",
        f"{tmp_path}/tables: no question is about Rivers.csv, broken.csv, lakes.csv",
    ]
    assert printed.err.splitlines() == [
        *(f"left out: {line}" for line in document["left_out"]),
        *document["remarks"],
    ]
    words = ["--tables", tmp_path / "tables", "--questions", tmp_path / "questions.csv", "--out", tmp_path / "again"]
    assert main(["data", "from-csv", *map(str, words)]) == 0
    counts = f"questions: train 1; {len(BEYOND) + 1} questions left out; 2 remarks above\n"
    assert capsys.readouterr().out == f"{tmp_path}/again: written; {counts}"


def test_what_is_odd_about_a_question_is_remarked_upon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ("Where does TIM live?", "SELECT Name FROM people WHERE Name = 'Tim'"),
        ("Who?", WHERE_IS_ANN[1]),
        ("Last?", "SELECT MAX(Name) FROM people"),
        ("How many?", "SELECT COUNT(Name) FROM people"),
        ("Heaviest?", "SELECT MAX([Weight (kg)]) FROM people"),
    ]
    assert made(tmp_path, rows, people=TABLES["people"]) == 0
    err = capsys.readouterr().err
    assert "questions.csv:2: no row of people has Name = Tim\n" in err
    assert "questions.csv:3: 'Ann' is not in the question; a model copies its values from there\n" in err
    assert "questions.csv:4: MAX of Name, which is text: its cells are not numbers\n" in err
    assert err.count("\n") == 4


DATES = {
    "iso": "Name,Born\nAnn,1974-12-31\nBo,1980-02-01 18:30\nCleo,\nDan,1969-07-20\n",
    "german": "Name,Born\nAnn,31.12.1974\nBo,1.2.1980\n",
}


def remarks_of(folder: Path, question: str, sql: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert made(folder, [(question, sql)], **DATES) == 0
    return [line.split("questions.csv:2: ")[1] for line in capsys.readouterr().err.splitlines() if ".csv:2: " in line]


@pytest.mark.parametrize(
    ("sql", "answer"),
    [
        ("SELECT Name FROM iso WHERE Born > '1974-12-31'", ["bo"]),
        ("SELECT Name FROM iso WHERE Born < '1974-12-31'", ["dan"]),
        ("SELECT MAX(Born) FROM iso", ["1980-02-01 18:30"]),
        ("SELECT MIN(Born) FROM iso", ["1969-07-20"]),
    ],
)
def test_iso_dates_have_an_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sql: str, answer: list[str]
) -> None:
    assert remarks_of(tmp_path, "Who was born after or before 1974-12-31?", sql, capsys) == []
    (example,) = read_split(tmp_path / "own", "train")
    assert execute(example.query, example.table) == answer


@pytest.mark.parametrize(
    ("sql", "remark"),
    [
        (
            "SELECT Name FROM german WHERE Born > '31.12.1974'",
            "text, which has no order; compare it with =, or write its dates as 2024-12-31, which have an order",
        ),
        (
            "SELECT MAX(Born) FROM german",
            "which is text: its cells are not numbers; write its dates as 2024-12-31, which have an order",
        ),
        (
            "SELECT Name FROM iso WHERE Born > '1974'",
            "Born holds dates, but '1974' is none; compare it with a whole date, as in 2024-12-31",
        ),
        ("SELECT AVG(Born) FROM iso", "AVG of Born, which is text: its cells are not numbers"),
        ("SELECT Born FROM iso WHERE Name > 'Ann'", "Name is text, which has no order; compare it with ="),
    ],
)
def test_what_has_no_order_is_remarked_upon_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sql: str, remark: str
) -> None:
    lines = remarks_of(tmp_path, "After 31.12.1974 or 1974, or Ann?", sql, capsys)
    assert any(line.endswith(remark) for line in lines)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("1;2,5;-;1e3;n/a", "4: '-' is not a number, so column Weight is treated as text"),
        ("1;2,5;NaN", "4: 'NaN' is not a number"),
        ("1;2,5;1,5e3;1e200;-0,5", None),
        ("1;-;-", None),
        ("01234;12345;23456", "2: '01234' is not a number"),
    ],
)
def test_a_cell_that_makes_text_of_a_column_of_numbers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cells: str, said: str | None
) -> None:
    others = ["7"] * 20 if said else []
    rows = "".join(f"{number};{cell}\n" for number, cell in enumerate([*cells.split(";"), *others]))
    assert made(tmp_path, [("Number 1?", "SELECT Weight FROM a WHERE Nr = 1")], a=f"Nr;Weight\n{rows}") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "as text" in line]
    assert len(lines) == (said is not None) and (said is None or f"{tmp_path}/tables/a.csv:{said}" in lines[0])


@pytest.mark.parametrize(("tables", "alike"), [(5, True), (2, False)])
def test_tables_are_divided_where_there_are_enough_else_questions(tmp_path: Path, tables: int, alike: bool) -> None:
    names = [f"t{number}" for number in range(tables)]
    rows = [(f"{name} {n}?", f"SELECT A FROM {name} WHERE A = {n}") for name in names for n in range(10)]
    assert made(tmp_path, rows, **dict.fromkeys(names, "A,B\n1,2\n")) == 0
    splits = {split: list(read_split(tmp_path / "own", split)) for split in ("train", "dev", "test")}
    assert sum(map(len, splits.values())) == len(rows) and min(map(len, splits.values())) >= len(rows) / 10
    shared = {e.table.id for e in splits["train"]} & {e.table.id for e in splits["dev"] + splits["test"]}
    assert len(splits["train"]) > len(rows) / 2 and (not shared) == alike


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"--tables": "none"}, "none: no such folder"),
        ({"--tables": "own"}, "own: no .csv file there"),
        ({"--questions": "none.csv"}, "none.csv: No such file or directory"),
        ({"--questions": "own.csv"}, "own.csv: is empty; expected a line question,sql, then a row for each question"),
        ({"--questions": "tables/lakes.csv"}, "lakes.csv: columns lake, depth; expected question, sql"),
        ({"--out": "tables"}, "tables: already exists; remove it, or choose a new folder"),
        ({}, "questions.csv: no question can be used ("),
    ],
)
def test_what_is_wrong_with_a_place_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: dict[str, str], said: str
) -> None:
    assert made(tmp_path, [("What?", "SELECT * FROM lakes")]) == 1
    capsys.readouterr()
    (tmp_path / "own").mkdir()
    (tmp_path / "own.csv").touch()
    flags = {"--tables": "tables", "--questions": "questions.csv", "--out": "own", **names}
    assert (
        main(["data", "from-csv", *(word for flag, name in flags.items() for word in (flag, str(tmp_path / name)))])
        == 1
    )
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_table_that_cannot_be_read_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(f"{number}?", f"SELECT {column} FROM bad") for number, column in enumerate("AAB")]
    assert made(tmp_path, [WHERE_IS_ANN, *rows], people=TABLES["people"], bad=TABLES["broken"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("zeropods: the file bad.csv: line 2: 3 cells, but the first line") and err.count("\n") == 1


def test_a_decimal_comma_is_one_in_a_condition_and_its_question_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    people = "Name;Born;Weight (kg)\nAnn;July 4,1990;61,125\nBo;;72,25\n"
    rows = [
        ("Who is heavier than 61,2 kg, in rounds 1,2?", "SELECT Name FROM people WHERE [Weight (kg)] > '61,2'"),
        ("Who has 61,125 kg?", "SELECT Name FROM people WHERE [Weight (kg)] = '61,125'"),
        ("Who was born on July 4,1990?", "SELECT Name FROM people WHERE Born = 'July 4,1990'"),
        ("Who is heavier than 70 kg?", "SELECT Name FROM people WHERE [Weight (kg)] > '70 kg'"),
        ("Who is heavier than many?", "SELECT Name FROM people WHERE [Weight (kg)] > 'many'"),
        ("Whose name is after 102?", "SELECT Name FROM people WHERE Name > 102"),
    ]
    assert made(tmp_path, rows, people=people) == 0
    taken = {
        each.question: each
        for split in wikisql_splits(tmp_path / "own")
        for each in read_split(tmp_path / "own", split)
    }
    assert [execute(taken[question].query, taken[question].table) for question in (
        "Who is heavier than 61.2 kg, in rounds 1,2?", "Who has 61.125 kg?", "Who was born on July 4,1990?",
    )] == [["bo"], ["ann"], ["ann"]]  # fmt: skip
    err = capsys.readouterr().err.splitlines()
    remarks = [line.partition("questions.csv:")[2] for line in err if ".csv:" in line]
    assert remarks == [
        "5: '70 kg' is compared as 70",
        "6: 'many' is not a number, but Weight (kg) holds numbers",
        "6: no row of people has Weight (kg) > many",
        "7: Name is text, which has no order; compare it with =",
    ]


def test_tables_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(tmp_path, [WHERE_IS_ANN], people=TABLES["people"], PEOPLE=TABLES["people"]) == 1
    assert "PEOPLE.csv and people.csv differ only in letter case; rename one" in capsys.readouterr().err
