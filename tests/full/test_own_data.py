"""The five commands of docs/own_data.md, as they are printed there, from its CSV files to a question in the browser."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.full.conftest import ROOT
from tests.full.demo_page import start
from tests.full.forks import fork_server
from tests.pages import blocks
from zeropods.cli import main

WAIT = 90_000


def test_the_page_s_csv_files_become_a_model_that_is_asked(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, table, questions, *_ = blocks((ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "people.csv").write_text(table)
    (tmp_path / "questions.csv").write_text(questions)
    from_csv, prepare, train, predict, demo = map(shlex.split, commands.replace("\\\n", "").splitlines())
    assert train[:2] == ["python", "textsql_train.py"]
    monkeypatch.chdir(tmp_path)
    assert main(from_csv[1:]) == main(prepare[1:]) == 0
    fork_server().train(train[2:], 1, tmp_path / "said")
    assert main(predict[1:]) == 0
    served = start(["-m", *demo], tmp_path / "log", cwd=tmp_path)
    try:
        page = chromium.new_page()
        page.set_default_timeout(WAIT)
        page.goto(served.address)
        page.wait_for_selector("#zp-examples tbody tr")
        assert "people: Name, Town, Weight (kg), Born" in page.input_value("#zp-table input")
        page.fill("#zp-question textarea", "Where does Bo live?")
        page.click("#zp-ask")
        page.wait_for_selector("#zp-answer .zp-card")
        assert page.inner_text(".zp-card > .zp-sql").startswith("SELECT")
    finally:
        served.end()
