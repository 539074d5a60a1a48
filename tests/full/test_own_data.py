"""The five commands of docs/own_data.md, as they are printed there, from its CSV files to a question in the browser."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from tests.chromium import opened_chromium
from tests.full.conftest import ROOT
from tests.full.demo_page import start
from tests.pages import blocks

WAIT = 90_000


def test_the_page_s_csv_files_become_a_model_that_is_asked(tmp_path: Path) -> None:
    commands, table, questions, *_ = blocks((ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "people.csv").write_text(table)
    (tmp_path / "questions.csv").write_text(questions)
    (tmp_path / "textsql_train.py").symlink_to(ROOT / "textsql_train.py")
    programs = {"zeropods": ["-m", "zeropods"], "python": []}
    *first, demo = [[*programs[words[0]], *words[1:]] for words in map(shlex.split, commands.splitlines())]
    assert len(first) == 4
    for words in first:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    with opened_chromium() as browser:
        served = start([*demo], tmp_path / "log", cwd=tmp_path)
        try:
            page = browser.new_page()
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
