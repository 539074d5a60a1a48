"""The command line: strict flags, one JSON document, one line for an error, a quick start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.made import a_failed_record, a_record, a_score, write_run
from zeropods.cli import launch, main, parser


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeropods", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    done = run("data", "sample", "--out", tmp_path / "sample", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["questions"]["train"] >= 4_000


def test_an_error_is_one_line_and_a_status(tmp_path: Path) -> None:
    done = run("score", tmp_path / "none.jsonl", "--data", tmp_path, "--split", "dev", "--json")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("zeropods: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["prepare", "--dat", "x"],
        ["predict", "--nonsense"],
        ["data", "get", "imagenet", "--out", "x"],
        ["data"],
        [],
        ["prepare", "--data", "x", "--tokenizer", "y", "--prompt", "none", "--out", "z"],
    ],
)
def test_abbreviated_unknown_and_missing_words_fail(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("verb", ["data sample", "predict --model m", "export r"])
def test_a_place_without_a_name_is_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--out", ""]) == 1
    assert capsys.readouterr().err == "zeropods: --out '': expected a name; '.' is the folder in which you are\n"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from zeropods.cli import parser; parser();"
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_data_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"query": null}\n')
    assert main(["score", str(tmp_path / "p.jsonl"), "--data", str(tmp_path), "--split", "dev"]) == 1
    assert "dev.tables.jsonl: no such file" in capsys.readouterr().err


def test_a_launch_ends_with_what_its_run_came_to_and_what_to_call_next(tmp_path: Path) -> None:
    record, folder = a_record(), write_run(tmp_path / "run", a_record())
    last = launch.readable({**record, "folder": str(folder)}).splitlines()[-1]
    assert last.startswith("ok: 20 steps, loss ") and last.endswith(f"next: zeropods predict --model {folder} --score")
    scored = launch.readable({**record, "folder": str(folder), "score": a_score()})
    other = launch.readable({**record, "folder": str(folder), "argv": ["mine.py"]})
    assert "execution_accuracy       0.75" in scored and "next:" not in scored + other
    failed = launch.readable({**a_failed_record(), "folder": str(folder)})
    assert failed.splitlines()[-1] == f"run folder: {folder}"
