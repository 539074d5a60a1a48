"""`zeropods prepare` and `zeropods data sample`: each task has its own flags and its own layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeropods.cli import main

PREPARE = ["prepare", "--data", "nowhere", "--tokenizer", "gpt-tiny", "--out", "nowhere"]


@pytest.mark.parametrize(
    ("task", "flags", "said"),
    [
        ("squad", ["--prompt", "schema"], "--prompt schema: a flag of task text2sql, not of squad"),
        ("lm", ["--plain-vocabulary"], "--plain-vocabulary True: a flag of task text2sql, not of lm"),
        ("text2sql", ["--max-seq-length", "8"], "--max-seq-length 8: a flag of task squad and lm, not of text2sql"),
        ("squad", ["--text-field", "body"], "--text-field body: a flag of task lm, not of squad"),
        ("lm", ["--loss-on", "answer"], "loss_on 'answer': text of the task lm has no answers"),
        ("text2sql", ["--max-source-tokens", "1"], "--max-source-tokens 1; expected at least 2"),
        ("lm", ["--max-seq-length", "1"], "--max-seq-length 1; expected at least 2"),
        ("squad", ["--limit", "0"], "--limit 0; expected at least 1"),
        ("squad", [], "nowhere: no such folder; give one that is there, or fetch SQuAD"),
    ],
)
def test_a_flag_that_does_not_fit_is_one_line(
    task: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PREPARE, "--task", task, *flags]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(("task", "file"), [("squad", "train-v1.1.json"), ("lm", "train.txt")])
def test_a_sample_has_the_layout_of_its_task(
    task: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "sample", "--task", task, "--out", str(tmp_path / "sample"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"]
    assert (tmp_path / "sample" / file).is_file()
