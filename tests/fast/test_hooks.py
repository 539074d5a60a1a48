"""The git hooks, run for real in a repository of their own: nothing is fetched, and what is unclean is mended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ".pre-commit-config.yaml"
UGLY = "import os\nx = [1,\n  2]\n"
NEAT = "x = [1, 2]\n"


@dataclass(frozen=True)
class Repository:
    """A git repository with this project's hooks and environment, an ugly file and an executed notebook."""

    folder: Path
    first: subprocess.CompletedProcess[str]
    """What the hooks said at first; then what they mended was added."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    folder = tmp_path_factory.mktemp("repository")
    shutil.copy(ROOT / CONFIG, folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".gitignore").write_text(".venv\n.hooks\n")
    (folder / "ugly.py").write_text(UGLY)
    (folder / "dirty.ipynb").write_text(executed_notebook())
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", "--all")
    first = hooks(folder)
    run(folder, "git", "add", "--all")
    return Repository(folder, first)


def executed_notebook() -> str:
    result = v4.new_output("execute_result", data={"text/plain": "2"}, execution_count=1)
    return nbformat.writes(v4.new_notebook(cells=[v4.new_code_cell("1 + 1", execution_count=1, outputs=[result])]))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user of nobody else's settings would, with no way to a network."""
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    own = {"PRE_COMMIT_HOME": str(folder / ".hooks"), "HOME": str(folder), "GIT_CONFIG_GLOBAL": os.devnull, **nowhere}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PRE_COMMIT"))}
    return subprocess.run(
        command, cwd=folder, env={**kept, **own}, capture_output=True, text=True, check=False, timeout=60
    )


def hooks(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, "-m", "pre_commit", "run")


def test_unclean_files_are_stopped_and_mended(repository: Repository) -> None:
    assert repository.first.returncode == 1, repository.first.stderr
    assert (repository.folder / "ugly.py").read_text() == NEAT
    (cell,) = nbformat.read(repository.folder / "dirty.ipynb", as_version=4).cells
    assert (cell.source, cell.outputs, cell.execution_count) == ("1 + 1", [], None)
    again = hooks(repository.folder)
    assert again.returncode == 0, again.stdout


def test_they_come_from_here_and_are_installed_in_front_of_commits_and_of_pushes(repository: Repository) -> None:
    installed = run(repository.folder, sys.executable, "-m", "pre_commit", "install")
    made = [name for name in ("pre-commit", "pre-push") if (repository.folder / ".git" / "hooks" / name).is_file()]
    assert made == ["pre-commit", "pre-push"], installed.stderr
    assert re.findall(r"repo: (\S+)", (ROOT / CONFIG).read_text()) == ["local"]
