"""Wrong turns of somebody's first hour, on the command line: one clear line, before any work, and nothing left."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.made import a_record, write_run
from zeropods.cli import main

VERBS = {
    "sample": ["data", "sample"],
    "from-csv": ["data", "from-csv", "--tables", "nowhere", "--questions", "nowhere"],
    "prepare": ["prepare", "--data", "nowhere", "--tokenizer", "t5-tiny"],
    "predict": ["predict", "--model", "nowhere", "--data", "nowhere", "--split", "test"],
    "perplexity": ["perplexity", "nowhere", "--data", "nowhere", "--split", "test"],
    "export": ["export", "nowhere"],
    "sweep": ["sweep", "nowhere.yaml"],
    "summary": ["summary", "nowhere"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a command is refused with."""
    assert main([str(word) for word in words]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    return error


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("out", ["", "file/below", "/proc/new", os.fsdecode(b"\xff")])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    verb: str, out: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()
    assert "zeropods: --out" in refused(capsys, *VERBS[verb], "--out", out)
    assert os.listdir(here) == ["file"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*VERBS["predict"], "--out", "run"], "--out 'run': is a folder; give the name of a file"),
        (["score", "/proc/p.jsonl", "--data", "nowhere", "--split", "dev"], "choose another place"),
        (["summary", "run", "--out", "run"], "--out run: is a run; choose another folder"),
    ],
)
def test_what_is_there_is_not_written_into(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(here / "run", a_record())
    before = sorted(os.listdir(here / "run"))
    assert said in refused(capsys, *words)
    assert sorted(os.listdir(here / "run")) == before


def test_a_summary_of_broken_runs_alone_fails(here: Path) -> None:
    write_run(here / "runs" / "good", a_record())
    write_run(here / "runs" / "bad", "{")
    assert main(["summary", "runs", "--out", "both"]) == 0
    assert main(["summary", "runs/bad", "--out", "one"]) == 1


def test_a_terminal_that_cannot_show_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert main(["data", "sample", "--task", "lm", "--out", "thé"]) == 0
    assert b"th\\xe9" in shown.getvalue()


def test_a_prepared_set_is_not_replaced_by_another(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", "--task", "lm", "--data", "text", "--tokenizer", "gpt-tiny", "--out", "set"]
    assert main(["data", "sample", "--task", "lm", "--out", "text"]) == 0
    assert main([*words, "--max-seq-length", "16", "--limit", "50"]) == 0
    assert main([*words, "--max-seq-length", "16", "--limit", "50"]) == 0
    capsys.readouterr()
    assert "set: holds a set of other data, settings or versions" in refused(capsys, *words, "--limit", "50")


def test_a_writer_that_is_ended_leaves_nothing_and_one_that_was_killed_is_cleared_up(here: Path) -> None:
    assert main(["data", "sample", "--out", "data"]) == 0
    words = ["prepare", "--data", "data", "--tokenizer", "t5-tiny", "--out", "set", "--limit", "3000"]
    for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        process = subprocess.Popen([sys.executable, "-m", "zeropods", *words], stderr=subprocess.DEVNULL)
        while not list(here.glob(".set.*/new")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) not in (0, 1)
        assert len(list(here.glob(".set.*"))) == left
    (here / ".set.held" / "new").mkdir(parents=True)
    held = os.open(here / ".set.held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert main([*words[:-1], "20"]) == 0
    os.close(held)
    assert sorted(os.listdir(here)) == [".set.held", "data", "set"]
