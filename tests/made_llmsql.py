"""A small set in LLMSQL's layout, written by hand after what llmsql 0.1.16 reads.

Keys and the form of the statements are those of the published files (github.com/LLMSQL/llmsql-benchmark); tables,
questions and ids are made up here.
"""

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLAYERS = {
    "table_id": "1-100-1",
    "page_title": "Harbour Rovers",
    "caption": "Squad",
    "section_title": "Squad",
    "table_name": "table_100_1",
    "header": ["Player", "No.", "Nat'l team", "Goals", 'Known as "'],
    "types": ["text", "text", "text", "real", "text"],
    "rows": [
        ["Ann Bee", "7", "Norway", 12.0, "The Wall"],
        ["Bo O'Hara", "9", "Ireland", 3.5, None],
        ["Cy Dale", "10", "Norway", None, "Cy"],
        ["Di Eng", "11", "Wales", "n/a", "Queen"],
    ],
}
RACES = {
    "table_id": "2-200-3",
    "page_title": "Lake Cup",
    "caption": "",
    "section_title": "",
    "table_name": "",
    "header": ["Year", "Winner", "Time"],
    "types": ["real", "text", "text"],
    "rows": [[1999.0, "Bo O'Hara", "56.920"], [2003.0, "Ann Bee", "57.1"], [2003.0, "Ann Bee", "58.0"]],
}
TABLES = [PLAYERS, RACES]


def asked(number: int, table: dict[str, Any], question: str, sql: str) -> dict[str, Any]:
    """A line of a file of questions; `TABLE` in the statement stands for the table's id."""
    id_ = table["table_id"]
    return {"question_id": number, "table_id": id_, "question": question, "sql": sql.replace("TABLE", f'"{id_}"')}


TRAIN = [
    asked(101, PLAYERS, "What number has Ann Bee?", 'SELECT "No." FROM TABLE WHERE "Player" = \'Ann Bee\';'),
    asked(102, PLAYERS, "How many goals has Ann Bee?", 'SELECT "Goals" FROM TABLE WHERE "Player" = \'Ann Bee\';'),
    asked(
        103, PLAYERS, "How many play for Wales?", 'SELECT COUNT("Player") FROM TABLE WHERE "Nat\'l team" = \'Wales\';'
    ),
]
VAL = [asked(104, RACES, "Who won in 1999?", 'SELECT "Winner" FROM TABLE WHERE "Year" = 1999.0;')]
TEST = [
    asked(1, PLAYERS, "Which team has Bo O'Hara?", "SELECT \"Nat'l team\" FROM TABLE WHERE \"Player\" = 'Bo O''Hara';"),
    asked(2, PLAYERS, "Who has more than 3 goals?", 'SELECT "Player" FROM TABLE WHERE "Goals" > 3.0;'),
    asked(3, PLAYERS, "Which names do players of Norway have?", 'SELECT "Known as """ FROM TABLE WHERE '
          "\"Nat'l team\" = 'Norway';"),
    asked(4, PLAYERS, "What are the goals of all?", 'SELECT "Goals" FROM TABLE;'),
    asked(5, PLAYERS, "Most goals for Spain?", "SELECT MAX(\"Goals\") FROM TABLE WHERE \"Nat'l team\" = 'Spain';"),
    asked(6, RACES, "How many wins by 2003 for Ann Bee?", 'SELECT COUNT("Time") FROM TABLE WHERE "Year" = 2003.0 AND '
          "\"Winner\" = 'Ann Bee';"),
    asked(7, RACES, "Who won later than 1999?", 'SELECT "Winner" FROM TABLE WHERE "Year" > 1999.0;'),
    asked(8, RACES, "Which year was not won by Ann Bee?", "SELECT \"Year\" FROM TABLE WHERE \"Winner\" != 'Ann Bee';"),
    asked(9, RACES, "Which time had Bo O'Hara in 1999?", "SELECT \"Time\" FROM TABLE WHERE \"Winner\" = 'Bo O''Hara' "
          'AND "Year" = 1999.0;'),
]  # fmt: skip
"""The statement of question 8 is not of WikiSQL's form: it has `!=`."""


def write_llmsql(folder: Path, **changes: Any) -> Path:
    """The set as its files; a change gives the lines of a file of that name, `None` leaves it out."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "tables": TABLES,
        "train_questions": TRAIN,
        "val_questions": VAL,
        "test_questions": TEST,
        "questions": [*TEST, *TRAIN, *VAL],
    }
    for name, lines in {**files, **changes}.items():
        if lines is not None:
            write_json_lines(folder / f"{name}.jsonl", lines)
    write_database(folder / "sqlite_tables.db")
    return folder


def write_json_lines(path: Path, documents: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def write_database(path: Path) -> None:
    """The tables as SQLite holds them: columns by their names, REAL or TEXT."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    for table in TABLES:
        columns = []
        for name, kind in zip(table["header"], table["types"], strict=True):
            doubled = name.replace('"', '""')
            columns.append(f'"{doubled}" {kind.upper()}')
        connection.execute(f'CREATE TABLE "{table["table_id"]}" ({", ".join(columns)})')
        places = ", ".join("?" * len(columns))
        connection.executemany(f'INSERT INTO "{table["table_id"]}" VALUES ({places})', table["rows"])
    connection.commit()
    connection.close()
