"""README.md states what results/ holds, and nothing that is not there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_are_those_of_the_results() -> None:
    filled = runpy.run_path(str(ROOT / "tools" / "readme.py"))["filled"]
    assert filled(TEXT) == TEXT


def test_linked_files_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) >= 3
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_two_commands_come_first() -> None:
    assert re.findall(r"^make \w+", TEXT, flags=re.MULTILINE)[:2] == ["make demo", "make test"]
