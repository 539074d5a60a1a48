"""The command line as people see it: a quick start, tables in a terminal of 80 columns, sentences, no JSON."""

import argparse
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from tests.made import a_config, a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.cli import launch, main, parser
from zeropods.cli.pods import readable_list
from zeropods.train.flags import SCRIPTS, parse_flags

DATA = Path(__file__).parents[1] / "data"
REPORTS = DATA / "profile-zero1.txt", DATA / "profile-zero3-offload.txt"
COLUMNS, SCREEN = 80, 57
STYLE = re.compile("\x1b[^m]*m")


def in_terminal(*arguments: object) -> str:
    """What `zeropods` writes into a terminal, without its styles."""
    leader, follower = pty.openpty()
    with ThreadPoolExecutor() as thread, pytest.MonkeyPatch.context() as here:
        said = thread.submit(read_to_end, leader)
        with open(follower, "w") as terminal:
            here.setattr(sys, "stdout", terminal)
            here.setenv("COLUMNS", str(COLUMNS))
            assert main([*map(str, arguments)]) == 0
        return STYLE.sub("", said.result()).replace("\r\n", "\n")


def read_to_end(leader: int) -> str:
    """What comes out of a terminal; Linux says by an error that its other end is closed."""
    said = b""
    with suppress(OSError):
        while part := os.read(leader, 65_536):
            said += part
    os.close(leader)
    return said.decode()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs; of the model of the first one there are published figures."""
    for number, model in ((1, "google-t5/t5-small"), (2, "a-model-with-a-long-name-2")):
        record = a_record(ranks=[a_rank(0)], run_id=f"r{number}", model_id=model)
        write_run(tmp_path / "runs" / str(number), record, config=a_config())
    return tmp_path


WIDE = {
    "plan": (
        ["plan", "--model", "t5-large", "--price-per-hour", 3, "--steps", 9, "--all"],
        ["technique", "activations", "zero3_offload"],
    ),
    "advice": (
        ["plan", "--model", "t5-large", "--price-per-hour", 3, "--steps", 900],
        ["technique", "checkpointing", "zero3_offload", "Best:", "Cheapest:"],
    ),
    "terms": (["plan", "--model", "bloom-560m", "--formulas"], ["technique", "formula"]),
    "profile": (["profile", REPORTS[0], "--depth", 2, "--against", REPORTS[1]], ["lm_head", "ratio", "T5LayerNorm"]),
    "summary": (
        ["summary", "runs", "--out", "out"],
        ["throughput", "a-model-with-a-long-name-2", "Caveats:"],
    ),
}


@pytest.mark.parametrize("columns", [30, 40])
def test_what_is_too_wide_for_a_narrow_pipe_is_broken_and_not_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    argv = ["plan", "--model", "t5-small", "--gpu", "T4", "--pods", "2", "--technique", "zero3_offload"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= columns for line in text.splitlines() if line.startswith("|"))
    headings = set()
    for part in text.split("\n\n"):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
        if not rows:
            continue
        rule = next(place for place, row in enumerate(rows) if set(row[0]) == {"-"})
        headings |= {"".join(pieces).replace(" ", "") for pieces in zip(*rows[:rule], strict=True)}
        # The first column, which the rows are told apart by, is whole.
        assert {row[0] for row in rows[rule + 1 :] if row[0]} == {"zero3_offload"}
    assert headings == {
        "technique", "checkpointing", "memory(GiB)", "host(GiB)", "batchsize(rows)", "step(s)", "samples/s",
    }  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), WIDE.values(), ids=WIDE)
def test_no_table_is_wider_than_the_terminal_and_nothing_is_lost(
    arguments: list[object],
    words: list[str],
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs)
    shown = in_terminal(*arguments)
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert rows and all(line.endswith("|") for line in rows)
    assert all(len(line) <= COLUMNS for line in shown.splitlines())
    assert all(word in shown for word in words) and "…" not in shown
    # No terminal: as wide as COLUMNS says; without it Markdown, a row a line.
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert main(list(map(str, arguments))) == 0
    assert all(len(line) <= COLUMNS for line in capsys.readouterr().out.splitlines())
    monkeypatch.delenv("COLUMNS")
    assert main(list(map(str, arguments))) == 0
    markdown = capsys.readouterr().out
    cells = {cell.strip() for line in markdown.splitlines() if line.startswith("|") for cell in line.split(" | ")}
    short = {cell for cell in cells if re.fullmatch(r"[\w.%/-]{1,20}", cell) and cell.strip("-")}
    assert len(short) > 5 and all(cell in shown for cell in short)


def test_the_list_of_pods_has_its_units_in_words() -> None:
    pod = {"pod": "pod1", "status": "ready", "runs": {}, "lease_seconds_left": 59.6}
    said = readable_list({"clusters": [{"name": "pods", "here": True, "hostfile": "hosts", "pods": [pod]}]})
    assert re.search(r"\| runs \| lease left \(s\) \|\n.*\n.*\| 60 +\|", said)


def test_prepare_and_score_speak_in_sentences_and_json_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "sample", "--out", "data"]) == 0
    made = capsys.readouterr().out
    assert re.fullmatch(r"data: written; questions: train [\d,]+, dev \d+, test \d+; .*\n", made), made
    words = ["prepare", "--data", "data", "--tokenizer", "trained", "--limit", "20", "--out", "set"]
    said = in_terminal(*words)
    assert re.match(r"set: prepared; task text2sql, prompt schema, tokenizer trained of [\d,]+ tokens\n", said)
    assert re.search(r"\ntrain: 20 rows; source [\d.]+ tokens on average, \d+ at most; target ", said)
    asked = [json.loads(line) for line in Path("data/test.jsonl").read_text().splitlines()[:4]]
    answers = [
        {"index": number, "question": each["question"], "prediction": "", "query": each["sql"] if number else None}
        for number, each in enumerate(asked)
    ]
    Path("p.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in answers))
    # In a process that has no transformers, whose pipelines would load torch.
    score = [sys.executable, "-m", "zeropods", "score", "p.jsonl", "--data", "data", "--split", "test"]
    scored = subprocess.run(score, capture_output=True, text=True, timeout=240, check=True).stdout
    assert re.match(r"4 answers: execution 0\.750 \[0\.\d+, [01]\.\d+\], .*, no query in 1\n", scored)
    assert "{" not in said + scored
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["rows"] == 20


def commands(node: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every parser of the command line."""
    yield node
    below = (each for each in node._actions if isinstance(each, argparse._SubParsersAction))
    yield from (found for each in below for one in each.choices.values() for found in commands(one))


@pytest.mark.parametrize("command", commands(parser()), ids=lambda command: command.prog)
def test_the_help_of_a_verb_fits_a_screen_and_has_a_line_for_each_flag(
    command: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    said = command.format_help()
    lines = said.splitlines()
    assert len(lines) <= SCREEN and all(len(line) <= COLUMNS for line in lines)
    usage, _, listed = said.partition("\n\n")
    for action in command._actions:
        flag = action.option_strings[-1] if action.option_strings else ""
        assert action.help or isinstance(action, argparse._SubParsersAction)
        assert len(re.findall(rf"^  (-h, )?{flag}( |$)", listed, re.MULTILINE)) == 1 or not flag
        shown = " ".join(listed.split())
        value = action.default
        if flag and action.nargs != 0 and value not in (None, [], argparse.SUPPRESS):
            assert f"(default: {value})" in shown
    assert "if not given" not in said and usage.count("--") <= 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_of_a_script_has_one_line_for_each_flag(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit):
        parse_flags(SCRIPTS[script], ["--help"])
    _, _, listed = capsys.readouterr().out.partition("options:\n")
    assert all(re.fullmatch(r"  -[^ ]+ .* \S.{0,42}", line) and len(line) < COLUMNS for line in listed.splitlines())
    assert listed.count("(default: ") == listed.count("\n") - 1 == len(fields(SCRIPTS[script]))


def test_the_usage_of_a_launch_says_where_the_script_stands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert capsys.readouterr().out.startswith("usage: zeropods launch [FLAG ...] -- SCRIPT [ARGUMENT ...]\n")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from zeropods.cli import parser; parser();"
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


def test_a_launch_ends_with_what_its_run_came_to_and_what_to_call_next(tmp_path: Path) -> None:
    record, folder = a_record(), write_run(tmp_path / "run", a_record())
    last = launch.readable({**record, "folder": str(folder)}).splitlines()[-1]
    assert last.startswith("ok: 20 steps, loss ") and last.endswith(f"next: zeropods predict --model {folder} --score")
    scored = launch.readable({**record, "folder": str(folder), "score": a_score()})
    other = launch.readable({**record, "folder": str(folder), "argv": ["mine.py"]})
    assert "execution 0.750" in scored and "next: zeropods summary" in scored and "next:" not in other
    failed = launch.readable({**a_failed_record(), "folder": str(folder)})
    assert failed.splitlines()[-1] == f"run folder: {folder}"
