"""The git hooks, run for real in a repository of their own: nothing is fetched, and what is unclean is mended."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
        command, cwd=folder, env={**kept, **own}, capture_output=True, text=True, check=False, timeout=60
    )


def test_unclean_files_are_stopped_and_mended_before_commits_and_pushes(tmp_path: Path) -> None:
    for name in (CONFIG, "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".gitignore").write_text(".venv\n.hooks\n")
    (tmp_path / "ugly.py").write_text("import os\nx = [1,\n  2]\n")
    dirty = tmp_path / "dirty.ipynb"
    dirty.write_text(json.dumps({"cells": [CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    hooks = (sys.executable, "-m", "pre_commit")
    run(tmp_path, "git", "init", "--quiet")
    for status in (1, 0):
        run(tmp_path, "git", "add", "--all")
        done = run(tmp_path, *hooks, "run")
        assert done.returncode == status, done.stdout + done.stderr
    assert (tmp_path / "ugly.py").read_text() == "x = [1, 2]\n"
    assert json.loads(dirty.read_text())["cells"] == [{**CELL, "execution_count": None, "outputs": []}]
    installed = run(tmp_path, *hooks, "install")
    made = [(tmp_path / ".git" / "hooks" / name).is_file() for name in ("pre-commit", "pre-push")]
    assert made == [True, True], installed.stderr
    assert re.findall(r"repo: (\S+)", (ROOT / CONFIG).read_text()) == ["local"]
