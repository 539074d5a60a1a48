"""Which models and tables the page finds, and what it says of others."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.made import a_record, a_score, write_run
from zeropods.cli import main
from zeropods.demo.answering import trained_models
from zeropods.demo.page import Site
from zeropods.demo.serving import listening
from zeropods.demo.tables import tables_in
from zeropods.errors import UserError

HEADER, TYPES, ROWS = ["Name", "Age"], ["text", "real"], [["Tom", 3]]


def a_model(folder: Path, prompt: str | None = "schema") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"prompt": prompt}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def a_run(folder: Path, accuracy: float | None, task: str = "text2sql", **values: object) -> Path:
    scores = {} if accuracy is None else {"score_test": a_score(execution_accuracy=accuracy)}
    record = a_record(task=task, **values)
    write_run(folder, record, **scores)
    (folder / "config.json").write_text(json.dumps(record))
    a_model(folder / "model", "schema" if task == "text2sql" else task)
    return folder


def a_data_set(folder: Path, **table: object) -> Path:
    folder.mkdir()
    document = {"id": "t1", "header": HEADER, "types": TYPES, "rows": ROWS, **table}
    example = {"table_id": "t1", "question": "How old is Tom?", "sql": {"sel": 1, "agg": 0, "conds": [[0, 0, "Tom"]]}}
    (folder / "dev.tables.jsonl").write_text(json.dumps(document) + "\n")
    (folder / "dev.jsonl").write_text(json.dumps(example) + "\n")
    return folder


def test_the_best_run_comes_first_and_the_newest_of_the_unscored(tmp_path: Path) -> None:
    for name, accuracy in {"poor": 0.25, "old": None, "new": None, "good": 0.75}.items():
        run = a_run(tmp_path / name, accuracy)
        os.utime(run / "model" / "config.json", (1.0, 2.0 if name == "new" else 1.0))
    assert [model.name for model in trained_models([tmp_path])] == ["good", "poor", "new", "old"]


def test_a_run_is_named_by_model_technique_accuracy_and_folder(tmp_path: Path) -> None:
    (model,) = trained_models([a_run(tmp_path / "one", 0.75)])
    assert model.label == "t5-tiny · no ZeRO · 75% right on test · one"


def test_runs_of_other_tasks_and_without_a_model_are_left_out_of_many(tmp_path: Path) -> None:
    a_run(tmp_path / "good", 0.75)
    a_run(tmp_path / "squad", None, task="squad")
    write_run(tmp_path / "failed", a_record())
    assert [model.name for model in trained_models([tmp_path])] == ["good"]


def test_a_model_folder_can_be_asked(tmp_path: Path) -> None:
    assert [model.name for model in trained_models([a_model(tmp_path / "exported")])] == ["exported"]


def test_two_runs_of_one_name_keep_their_paths(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / place / "run", 0.5) for place in ("a", "b")]
    assert {model.name for model in trained_models(runs)} == set(map(str, runs))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "no run there"),
        (lambda folder: write_run(folder, a_record()), "no trained model"),
        (lambda folder: write_run(folder / "failed", a_record()), "no trained text-to-SQL model"),
        (lambda folder: a_run(folder, None, task="squad"), "is a squad run; the demo asks text-to-SQL models"),
        (lambda folder: a_run(folder, None, task="lm"), "is a text run; the demo asks text-to-SQL models"),
        (lambda folder: a_model(folder, None), "does not say its task"),
    ],
)
def test_what_cannot_be_asked_is_a_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: object, said: str
) -> None:
    make(tmp_path / "named")  # type: ignore[operator]
    assert main(["demo", str(tmp_path / "named")]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("port", ["web", "0", "-1", "65536", "1" * 5000, "٣٣٣٣", ""])
def test_a_port_that_is_none_is_named(port: str) -> None:
    with pytest.raises(UserError, match=r"^port .*expected a number from 1 to 65535"), listening(port):
        pass


def test_a_port_in_use_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with listening(None) as taken:
        port = str(taken.getsockname()[1])
        assert main(["demo", str(tmp_path), "--port", port]) == 1
    assert capsys.readouterr().err == f"zeropods: port {port}: Address already in use; give another with --port\n"


def test_it_listens_on_this_machine_only() -> None:
    with listening(None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.family == socket.AF_INET


def test_a_table_is_listed_by_its_title_and_columns(tmp_path: Path) -> None:
    assert tables_in(a_data_set(tmp_path / "d", page_title="Cats of note")).labels == {"t1": "Cats of note: Name, Age"}


def test_a_question_of_the_data_set_is_known_in_any_case_and_spacing(tmp_path: Path) -> None:
    tables = tables_in(a_data_set(tmp_path / "d"))
    assert tables.expected(tables.table("t1"), " how OLD is  Tom? ") == tables.examples["t1"][0]
    assert tables.expected(tables.table("t1"), "How old is Kit?") is None


@pytest.mark.parametrize("id_", [None, "", "other"])
def test_a_table_that_is_not_in_the_list_is_refused(tmp_path: Path, id_: str | None) -> None:
    with pytest.raises(UserError, match="choose a table"):
        tables_in(a_data_set(tmp_path / "d")).table(id_)


def test_a_page_whose_last_model_has_gone_says_so(tmp_path: Path) -> None:
    site = Site((tmp_path,), passed_over={a_run(tmp_path / "damaged", 0.5).resolve()})
    with pytest.raises(UserError, match="no model that can be loaded is there any more"):
        site.models()
