"""The Makefile, pinned requirements, git hooks, set-up up to where it would install, tests that hang."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.launches import ROOT, until
from tests.made import a_config, a_rank, a_record, a_score, write_run
from zeropods.pods.processes import find_process, is_alive
from zeropods.report.answers import FOUR_QUESTIONS
from zeropods.workshop import Workshop

NOT_OURS = {".venv", ".gpu", "build"}
"""Folders of other programs, and of packs, which hold copies."""
CHECKS = ("ruff check", "ruff format --check", "mypy", "nbstripout --verify", "shellcheck")


def make(*arguments: str, folder: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=240)
    return run.stdout


def test_make_alone_prints_the_help_and_every_rule_is_phony() -> None:
    assert make() == make("help")
    assert {"setup", "demo", "test"} <= set(re.findall(r"^make (\S+)  +\S", make("help"), re.MULTILINE))
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)", text, re.MULTILINE)
    assert sorted(phony.split()) == sorted(re.findall(r"^([a-z-]+):", text, re.MULTILINE))


def test_clean_removes_caches_and_keeps_runs_results_and_the_environment(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept, removed = ("runs/a", "results/a", ".venv/lib/__pycache__"), ("zeropods/__pycache__", ".mypy_cache")
    for folder in (*kept, *removed):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    make("clean", folder=tmp_path)
    assert all((tmp_path / folder / "file").exists() for folder in kept)
    assert not any((tmp_path / folder).exists() for folder in removed)


def test_check_runs_every_check_and_looks_at_every_shell_file() -> None:
    lines = make("--dry-run", "check")
    assert [part for part in CHECKS if part not in lines] == []
    command = next(line for line in lines.splitlines() if "shellcheck" in line)
    files = [path for path in ROOT.rglob("*") if path.suffix in (".sh", ".sbatch") and not NOT_OURS & set(path.parts)]
    assert files and [path.name for path in files if str(path.relative_to(ROOT)) not in command] == []


@pytest.mark.parametrize("has_usual_runs", [True, False])
def test_the_demo_ends_with_the_answers_a_table_for_a_terminal_pages_and_what_to_do_next(
    has_usual_runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for pods in (1, 2):
        ranks = [a_rank(rank) for rank in range(pods)]
        record = a_record(ranks=ranks, run_id=f"run{pods}", model_id="a-model-with-a-rather-long-name")
        write_run(tmp_path / "runs" / str(pods), record, config=a_config(), score_test=a_score())
    runs = "runs/demo" if has_usual_runs else str(tmp_path / "runs")
    monkeypatch.setenv("ZEROPODS_RUNS", runs)
    conclude = runpy.run_path(str(ROOT / "tools" / "demo.py"))["_conclude"]
    conclude(Workshop(runs=tmp_path / "runs"), ROOT / "build" / "notebooks")
    answers, table, pages, steps = capsys.readouterr().out.strip().split("\n\n")
    assert [line for line in answers.splitlines() if line[0] != " "] == list(FOUR_QUESTIONS)
    assert table.startswith("| ") and "throughput" in table and "none x1" in table
    assert max(len(line) for line in [*answers.splitlines(), *table.splitlines()]) <= 80
    assert f" {tmp_path}/runs/summary/index.html\n" in pages and " build/notebooks/*.html" in pages
    ask = "make ask" if has_usual_runs else f"make ask RUN={runs}"
    assert steps.startswith("next:\n") and f"  {ask}  " in steps


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_is_pinned_exactly(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    loose = [line for line in lines if not re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==\d[\w.]*", line)]
    assert lines and not loose


def test_set_up_knows_what_the_pinned_torch_brings_with_it() -> None:
    (torch,) = re.findall(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert torch in runpy.run_path(str(ROOT / "tools" / "torch_build.py"))["GIGABYTES"]


def test_set_up_without_a_python_that_is_new_enough_is_one_line(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "flock", "mkdir"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "tools").mkdir()
    setup = shutil.copy(ROOT / "tools" / "setup", tmp_path / "tools")
    command = [str(tmp_path / "bash"), str(setup)]
    run = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=240)
    said = "setup: no Python >= 3.11 on PATH; install one, for example python3.11 or newer\n"
    assert (run.returncode, run.stderr) == (1, said)


# The git hooks, run for real in a repository of their own.

CONFIG = ".pre-commit-config.yaml"
RESULT = {"output_type": "execute_result", "data": {"text/plain": ["2"]}, "execution_count": 1, "metadata": {}}
CELL = {
    "cell_type": "code", "id": "sum", "source": ["1 + 1"], "execution_count": 1, "outputs": [RESULT], "metadata": {}
}  # fmt: skip
"""As Jupyter writes it; reading notebooks by nbformat takes seconds to import."""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user of nobody else's settings would, with no way to a network."""
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    own = {"PRE_COMMIT_HOME": str(folder / ".hooks"), "HOME": str(folder), "GIT_CONFIG_GLOBAL": os.devnull, **nowhere}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PRE_COMMIT"))}
    return subprocess.run(
        command, cwd=folder, env={**kept, **own}, capture_output=True, text=True, check=False, timeout=240
    )


def test_unclean_files_are_stopped_and_mended_before_commits_and_pushes(tmp_path: Path) -> None:
    for name in (CONFIG, "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".gitignore").write_text(".venv\n.hooks\n")
    (tmp_path / "ugly.py").write_text("import os\nx = [1,\n  2]\n")
    dirty = tmp_path / "dirty.ipynb"
    dirty.write_text(json.dumps({"cells": [CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    shown = tmp_path / "docs" / "gallery" / "shown.ipynb"
    shown.parent.mkdir(parents=True)
    shutil.copy(dirty, shown)
    hooks = (sys.executable, "-m", "pre_commit")
    run(tmp_path, "git", "init", "--quiet")
    for status in (1, 0):
        run(tmp_path, "git", "add", "--all")
        done = run(tmp_path, *hooks, "run")
        assert done.returncode == status, done.stdout + done.stderr
    assert (tmp_path / "ugly.py").read_text() == "x = [1, 2]\n"
    assert json.loads(dirty.read_text())["cells"] == [{**CELL, "execution_count": None, "outputs": []}]
    assert json.loads(shown.read_text())["cells"] == [CELL]
    installed = run(tmp_path, *hooks, "install")
    made = [(tmp_path / ".git" / "hooks" / name).is_file() for name in ("pre-commit", "pre-push")]
    assert made == [True, True], installed.stderr
    assert re.findall(r"repo: (\S+)", (ROOT / CONFIG).read_text()) == ["local"]


# Tests that hang, or leave something behind, as `make test` would see them.

CONFTEST = """
from tests.watch import Watch
def pytest_configure(config):
    config.pluginmanager.register(Watch(grace_seconds=0.5))
"""
IT = """
import pathlib, pytest, subprocess, time
@pytest.fixture
def made():
    pathlib.Path("made").touch()
    yield
    pathlib.Path("made").unlink()
def test_leaves():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("pid").write_text(str(child.pid))
def test_hangs(made):
    time.sleep(600)
"""


def test_an_interrupted_run_names_what_had_not_ended_and_kills_what_was_left_behind(tmp_path: Path) -> None:
    for name, text in (("conftest.py", CONFTEST), ("pytest.ini", "[pytest]\n"), ("test_it.py", IT)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    until((tmp_path / "made").exists)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=240)
    assert "test_it.py::test_hangs" in said and "NOT ENDED after" in said
    assert not (tmp_path / "made").exists()
    pid = int((tmp_path / "pid").read_text())
    assert f"LEFT BEHIND and killed: {pid} sleep 600" in said
    until(lambda: (found := find_process(pid)) is None or not is_alive(found))
