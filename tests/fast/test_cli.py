"""The command line: strict flags, one JSON document, one line for an error, a quick start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.made import a_failed_record, a_record, a_score, write_run
from zeropods.cli import launch


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeropods", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from zeropods.cli import parser; parser();"
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
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
