"""The demo page without a browser: its models and tables, a visitor's CSV file and query, and what is shown of them."""

import json
import os
import shutil
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_record, a_score, write_run
from zeropods.cli import main
from zeropods.data.manifest import SCHEMA_VERSION, Manifest
from zeropods.demo.answering import (
    MAX_BYTES,
    MAX_COLUMNS,
    MAX_ROWS,
    ModelAnswer,
    TrainedModel,
    checked,
    lost_data,
    run_query,
    tables_in,
    tables_of,
    trained_models,
    uploaded,
)
from zeropods.demo.page import MOST_RESULT_ROWS, Site, html, spans, usable_port
from zeropods.errors import UserError
from zeropods.files import sha256
from zeropods.sql.query import Condition, Query, format_query
from zeropods.sql.table import SQLTable

HEADER, TYPES, ROWS = ["Name", "Age"], ["text", "real"], [["Tom", 3]]


def a_model(folder: Path, prompt: str | None = "schema") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"prompt": prompt}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def a_run(folder: Path, accuracy: float | None, task: str = "text2sql") -> Path:
    scores = {} if accuracy is None else {"score_test": a_score(execution_accuracy=accuracy)}
    record = a_record(task=task)
    write_run(folder, record, **scores)
    (folder / "config.json").write_text(json.dumps(record))
    a_model(folder / "model", "schema" if task == "text2sql" else task)
    return folder


def a_run_with_a_broken_model(folder: Path) -> None:
    (a_run(folder, None) / "model" / "config.json").write_text("{")


# Models.


def test_the_best_run_comes_first_and_the_newest_of_the_unscored(tmp_path: Path) -> None:
    for name, accuracy in {"poor": 0.25, "old": None, "new": None, "good": 0.75}.items():
        run = a_run(tmp_path / name, accuracy)
        os.utime(run / "model" / "config.json", (1.0, 2.0 if name == "new" else 1.0))
    a_run(tmp_path / "squad", None, task="squad")
    write_run(tmp_path / "failed", a_record())
    models = trained_models([tmp_path])
    assert [model.name for model in models] == ["good", "poor", "new", "old"]
    assert models[0].label == "t5-tiny · no ZeRO · 75% right on test · good"


def test_model_folders_and_runs_of_one_name_can_be_asked(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / place / "run", 0.5) for place in ("a", "b")]
    models = trained_models([*runs, a_model(tmp_path / "exported")])
    assert {model.name for model in models} == {*map(str, runs), "exported"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "no runs found"),
        (lambda folder: write_run(folder, a_record()), "no trained model"),
        (lambda folder: write_run(folder / "failed", a_record()), "no trained text-to-SQL model"),
        (lambda folder: a_run(folder, None, task="squad"), "is a squad run; the demo needs text-to-SQL models"),
        (lambda folder: a_model(folder, None), "does not record its task; give --task"),
        (a_run_with_a_broken_model, "make a model folder from a run's checkpoint: zeropods export"),
    ],
)
def test_what_cannot_be_asked_is_a_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, said: str
) -> None:
    make(tmp_path / "named")
    assert main(["demo", str(tmp_path / "named")]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_port_in_use_is_named_and_the_usual_one_gives_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", usable_port(None))) as taken:
        port = taken.getsockname()[1]
        assert main(["demo", str(tmp_path), "--port", str(port)]) == 1
        assert usable_port(None) != port
    assert capsys.readouterr().err == f"zeropods: port {port}: Address already in use; give another with --port\n"


# Tables of a data set.


def test_tables_are_listed_by_title_and_columns_and_know_their_questions(tmp_path: Path) -> None:
    document = {"id": "t1", "header": HEADER, "types": TYPES, "rows": ROWS, "page_title": "Cats of note"}
    example = {"table_id": "t1", "question": "How old is Tom?", "sql": {"sel": 1, "agg": 0, "conds": [[0, 0, "Tom"]]}}
    (tmp_path / "dev.tables.jsonl").write_text(json.dumps(document) + "\n")
    (tmp_path / "dev.jsonl").write_text(json.dumps(example) + "\n")
    tables = tables_in(tmp_path)
    assert tables.labels == {"t1": "Cats of note: Name, Age"}
    assert tables.expected(tables.table("t1"), " how OLD is  Tom? ") == tables.examples["t1"][0]
    assert tables.expected(tables.table("t1"), "How old is Kit?") is None
    with pytest.raises(UserError, match="choose a table"):
        tables.table("other")


def test_the_tables_of_all_splits_are_offered_those_of_test_first_and_a_shared_one_once(tmp_path: Path) -> None:
    for split, ids in {"train": ["cats", "dogs", "ants"], "test": ["dogs"]}.items():
        documents = [{"id": id_, "header": HEADER, "types": TYPES, "rows": ROWS} for id_ in ids]
        query = {"sel": 1, "agg": 0, "conds": []}
        asked = [{"table_id": id_, "question": f"{id_} in {split}?", "sql": query} for id_ in ids]
        for name, lines in ((f"{split}.tables.jsonl", documents), (f"{split}.jsonl", asked)):
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables = tables_in(tmp_path)
    assert list(tables.labels) == ["dogs", "ants", "cats"]
    assert [example.question for example in tables.examples["dogs"]] == ["dogs in test?", "dogs in train?"]
    assert tables.description == f"3 in the splits test, train of {tmp_path.name}"


def a_set(folder: Path, raw: Path) -> Path:
    """A tokenized set, as far as it says where its raw data are."""
    folder.mkdir(parents=True)
    digests = {path.name: sha256(path) for path in raw.iterdir()}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION, content_key="c" * 16, task="text2sql", prompt="schema", tokenizer="t5-tiny",
        tokenizer_fingerprint="0", vocabulary_size=100, max_source_tokens=256, max_target_tokens=96, limit=None,
        copies=1, source_sha256=digests, splits={}, versions={}, data=str(raw),
    )  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)))
    return folder


def own_tables(folder: Path) -> Path:
    folder.mkdir(parents=True)
    document = {"id": "t1", "header": HEADER, "types": TYPES, "rows": ROWS, "page_title": "Cats of note"}
    example = {"table_id": "t1", "question": "How old is Tom?", "sql": {"sel": 1, "agg": 0, "conds": [[0, 0, "Tom"]]}}
    (folder / "test.tables.jsonl").write_text(json.dumps(document) + "\n")
    (folder / "test.jsonl").write_text(json.dumps(example) + "\n")
    return folder


def a_run_on(data: dict[str, str], folder: Path) -> TrainedModel:
    """A run that records where its tokenized set is."""
    run = a_run(folder, 0.5)
    for name in ("record.json", "config.json"):
        document = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**document, "dataset": {"content_key": "c" * 16, **data}}))
    (model,) = trained_models([run])
    return model


def test_a_run_s_own_tables_are_offered_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = a_set(tmp_path / "prepared", own_tables(tmp_path / "raw"))
    model = a_run_on({"path": str(place), "relative_path": "../../prepared"}, tmp_path / "runs" / "a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert list(tables_of(model).labels.values()) == ["Cats of note: Name, Age"]
    assert lost_data(model) is None


def test_a_run_s_own_tables_are_offered_after_all_was_moved(tmp_path: Path) -> None:
    before = tmp_path / "before"
    place = a_set(before / "prepared", own_tables(before / "raw"))
    a_run_on({"path": str(place), "relative_path": "../../prepared"}, before / "runs" / "a")
    (tmp_path / "before").rename(tmp_path / "after")
    (model,) = trained_models([tmp_path / "after" / "runs" / "a"])
    assert list(tables_of(model).labels.values()) == ["Cats of note: Name, Age"]
    assert lost_data(model) is None


@pytest.mark.parametrize("gone", ["prepared", "raw"])
def test_where_a_run_s_own_data_are_gone_that_is_said_with_what_is_shown_instead(tmp_path: Path, gone: str) -> None:
    place = a_set(tmp_path / "prepared", own_tables(tmp_path / "raw"))
    shutil.rmtree(tmp_path / gone)
    model = a_run_on({"path": str(place)}, tmp_path / "run")
    description = tables_of(model).description
    assert description.endswith("in the splits test, dev, train of embedded sample; the model's own data are gone")
    said = lost_data(model)
    assert said is not None and said.startswith(
        f"run: the data that it was trained on are gone ({place} and its tables)"
    )
    assert said.endswith("tables of the embedded data set instead; name yours with --data DIR")
    # A model folder does not record its data.
    (exported,) = trained_models([a_model(tmp_path / "exported")])
    assert lost_data(exported) is None and "gone" not in tables_of(exported).description


# A visitor's CSV file.


def table(folder: Path, content: str | bytes) -> SQLTable:
    path = folder / "pets.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return uploaded(path)


def test_names_types_and_cells_are_read(tmp_path: Path) -> None:
    read = table(tmp_path, 'Name,Age,Postcode\r\n"Tom\nCat",3,01234\r\n\r\nKit,,99999\r\n')
    assert (read.header, read.types) == (("Name", "Age", "Postcode"), ("text", "real", "text"))
    assert read.rows == (("Tom Cat", "3", "01234"), ("Kit", None, "99999"))


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        *((number, "real") for number in ("0", "-3", "−3", "1,234,567.5", ".5", "2e3", "12.25")),
        *((word, "text") for word in ("nan", "1e999", "007", "12 km", "1.2.3", "2026-01-02", "1,23", "--1", ".")),
    ],
)
def test_columns_of_numbers_are_told_from_others(tmp_path: Path, cell: str, kind: str) -> None:
    assert table(tmp_path, f'A|B\n"{cell}"|x\n').types == (kind, "text")


@pytest.mark.parametrize(
    ("content", "header", "rows", "types"),
    [
        ("A;B\n3,5;1.234\n1.234,25;7\n", ("A", "B"), (("3.5", "1234"), ("1234.25", "7")), ("real", "real")),
        ("A;B\n-3,5;x,5\n;2\n", ("A", "B"), (("-3.5", "x,5"), (None, "2")), ("real", "text")),
        ("A;B\n1,234.5;3.5\n", ("A", "B"), (("1,234.5", "3.5"),), ("real", "real")),
        ("sep=;\nA;B,C,D\n1;2\n", ("A", "B,C,D"), (("1", "2"),), ("real", "real")),
        ('"sep=\t"\r\nA\tB\r\n1\t2\r\n', ("A", "B"), (("1", "2"),), ("real", "real")),
        ("a, b and c;d\n1,5;2\n", ("a, b and c", "d"), (("1.5", "2"),), ("real", "real")),
        ("a, b, c, d;e\nx, y;2\nz;3\n", ("a, b, c, d", "e"), (("x, y", "2"), ("z", "3")), ("text", "real")),
    ],
    ids=["thousands", "empty", "points", "sep", "sep tab", "one comma", "many commas"],
)
def test_what_spreadsheets_write_is_read(tmp_path: Path, content: str, header: Any, rows: Any, types: Any) -> None:
    read = table(tmp_path, content)
    assert (read.header, read.rows, read.types) == (header, rows, types)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_delimiters_and_encodings_of_spreadsheets_are_told_apart(tmp_path: Path, delimiter: str, encoding: str) -> None:
    assert table(tmp_path, f"Käse{delimiter}猫\n1{delimiter}ß\n".encode(encoding)).header == ("Käse", "猫")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n \n", "has no rows"),
        (b"A,B\n", "no rows"),
        (b"A,B\n1,2\n1,2,3\n", "line 3: 3 cells, but the first line has 2"),
        (b"A,?\n1,2\n", "column 2 has no name"),
        ("A²,A2\n1,2\n".encode(), "two columns are named 'A²'"),
        ("Käse,B\n1,2\n".encode("latin-1"), "line 1 is not valid UTF-8"),
        (b'A,B\n"1,2\n', "line 2: unexpected end of data"),
        (
            b"sep=;\nA;B\n1;2\n1;2;3\n",
            "line 4: 3 cells, but the first line has 2; correct one of them (a cell that contains ';' must",
        ),
        (b"A," + b"x" * 200_000 + b"\n1,2\n", "field larger"),
        (b"\n".join([b",".join(b"c%d" % n for n in range(MAX_COLUMNS + 1))] * 2), f"at most {MAX_COLUMNS}"),
        (b"A\n" + b"1\n" * (MAX_ROWS + 1), f"more than {MAX_ROWS:,} rows"),
        (b"A\n" + b"1" * MAX_BYTES, "larger than 2 MiB"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=r"pets\.csv") as error:
        table(tmp_path, content)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "read"),
    [("over 72,5?", "over 72.5?"), ("1.234,50 of 3", "1234.50 of 3"), *[(s, s) for s in ("1,234", "1, 2", "1,2,3")]],
)
def test_a_number_with_a_decimal_comma_is_asked_with_a_point(tmp_path: Path, asked: str, read: str) -> None:
    table(tmp_path, "Team;Points\nA;72,5\nB;80,25\n")
    site = Site((a_model(tmp_path / "model"),))
    answer = site.ask("gone", "", "", str(tmp_path / "pets.csv"), f"Which team has {asked}")
    assert f"Which team has {read}<" in answer


# A visitor's question and query.

CATS = SQLTable("cats", ("Name", "Age"), ("text", "real"), (("Tom", 3), ("Kit", 5), ("<b>Mia</b>", 2)))
OLDEST = Query(0, 0, (Condition(1, 1, "4"),))
ATTACK = "<script>alert(1)</script>"


def test_a_question_is_one_line_of_letters_that_can_be_seen() -> None:
    assert checked(" how\x00 \x1b[31mmany\ud800 cats\n\u202e") == "how [31mmany cats"
    for question in (None, "\x00?!"):
        with pytest.raises(UserError, match="no question yet"):
            checked(question)


def answered(question: str = "Who is oldest?", right: bool | None = True) -> str:
    result = run_query(Query(0, 0, (Condition(0, 0, ATTACK),)), CATS)
    answer = ModelAnswer(result=result, generated_seconds=0.1, expected=run_query(OLDEST, CATS), right=right)
    return html("answers", question, [(ATTACK, answer), ("other", ATTACK)], CATS.header)


def test_answers_are_shown_with_their_verdict_and_nothing_of_others_is_markup() -> None:
    assert "✓ right" in answered() and "✗ wrong" in answered(right=False)
    shown = answered(ATTACK) + html("preview", ATTACK, CATS) + html("message", ATTACK)
    assert "<script" not in shown and "<b>" not in shown
    assert "&lt;script&gt;" in shown and "&lt;b&gt;Mia" in shown
    query = Query(1, 1, (Condition(0, 0, "Tom"), Condition(1, 2, "4")))
    assert " ".join(text for text, _ in spans(query, CATS.header)) == format_query(query, CATS.header)


def test_rows_beyond_the_limit_are_counted() -> None:
    many = SQLTable("many", ("N",), ("real",), tuple((n,) for n in range(1_234)))
    answer = ModelAnswer(result=run_query(Query(0, 0), many), generated_seconds=0.1, expected=None, right=None)
    shown = html("answers", "All?", [("m", answer)], many.header)
    assert f"first {MOST_RESULT_ROWS} of 1,234 rows" in shown and "and 1,222 more" in shown
    assert shown.count("<tr>") == MOST_RESULT_ROWS + 1
