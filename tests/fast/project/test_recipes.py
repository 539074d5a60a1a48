"""Each recipe of docs/recipes.md applies to the project as it is, and then the test that it brings passes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

PAGE = ROOT / "docs" / "recipes.md"
RECIPE = re.compile(r"^## (?P<name>[^\n]+)\n(?:(?!## )[^\n]*\n)*?```diff\n(?P<diff>.*?)^```", re.MULTILINE | re.DOTALL)
"""Matches a section of the page with its diff."""
RECIPES = {recipe["name"]: recipe["diff"] for recipe in RECIPE.finditer(PAGE.read_text(encoding="utf-8"))}
COPIED = ("zeropods", "tests", "dsconfig", "docs")
"""Folders that recipes change, or that their tests read."""


def test_there_is_a_recipe_for_a_technique_an_engine_a_task_a_backend_and_a_figure() -> None:
    assert list(RECIPES) == ["A technique", "An engine", "A task", "A backend", "A figure of the summary"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_applies_and_then_its_own_test_passes(name: str, tmp_path: Path) -> None:
    diff = RECIPES[name]
    own_tests = re.findall(r"^\+\+\+ b/(tests/\S+)", diff, re.MULTILINE)
    assert own_tests
    project = tmp_path / "project"
    for folder in COPIED:
        shutil.copytree(ROOT / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy2(path, project)

    # Without this, git would look for a repository around the copy, and apply nothing outside it.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path), "PYTHONPATH": str(project)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    applied = subprocess.run(
        ["git", "apply", "-"], cwd=project, env=environment, input=diff, text=True, capture_output=True, timeout=300
    )
    assert applied.returncode == 0, applied.stderr

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "tests")]
    tested = subprocess.run(
        [*command, *own_tests], cwd=project, env=environment, capture_output=True, text=True, timeout=600
    )
    assert tested.returncode == 0, tested.stdout
