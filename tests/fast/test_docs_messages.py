"""What docs/troubleshooting.md quotes is said: by our code, or by the installed libraries."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.pages import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS = (
    "Pods do not come up",
    "The check before a launch fails",
    "A run is refused",
    "A run ends badly",
    "Data, answers, reports",
)
LIBRARIES = {
    "DeepSpeed": ("deepspeed", ["launcher/*.py", "ops/op_builder/builder.py"]),
    "torch": ("torch", ["utils/cpp_extension.py", "cuda/__init__.py"]),
    "datasets": ("datasets", ["load.py"]),
    "evaluate": ("evaluate", ["loading.py"]),
    "transformers": ("transformers", ["integrations/deepspeed.py", "utils/hub.py"]),
}
HOLE = "\0"
"""In a message's text, where the code puts a value in."""


def rows(section: str) -> list[str]:
    """The first cell of each row of a section's table."""
    body = TEXT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines[1:]]


def quoted(section: str) -> list[str]:
    """The messages of a section: what stands in backticks in a first cell that begins with one."""
    return [text for row in rows(section) if row.startswith("`") for text in re.findall(r"`([^`]+)`", row)]


def messages(files: Iterable[Path]) -> list[str]:
    """Every text in the code of these files, with a hole for each value."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else HOLE for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@cache
def own_messages() -> list[str]:
    return messages([*(ROOT / "zeropods").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *ROOT.glob("*.py")])


def is_said(quote: str, texts: Iterable[str]) -> bool:
    parts = [part for part in quote.split("...") if part.strip()]
    pattern = re.compile(".*".join(re.escape(part) for part in parts), re.DOTALL)
    return any(pattern.search(text) for text in texts)


@pytest.mark.parametrize("section", OURS)
def test_every_message_of_ours_is_in_the_code(section: str) -> None:
    quotes = quoted(section)
    assert len(quotes) > 4 and [quote for quote in quotes if not is_said(quote, own_messages())] == []


@pytest.mark.parametrize("library", ["DeepSpeed"])
def test_every_message_of_a_library_is_in_the_installed_one(library: str) -> None:
    assert [quote for quote in quoted(library) if not is_said(quote, installed(library))] == []


@pytest.mark.parametrize(
    ("library", "part"),
    [
        ("torch", "Ninja is required"),
        ("torch", "Error building extension"),
        ("torch", "Torch not compiled"),
        ("datasets", "Dataset scripts"),
        ("evaluate", "Couldn't find a module script"),
        ("transformers", "We couldn't connect"),
        ("transformers", "Please correct"),
    ],
)
def test_a_message_of_the_python_part_of_a_library_is_in_the_installed_one(library: str, part: str) -> None:
    (quote,) = [text for text in re.findall(r"`([^`\n]+)`", TEXT) if text.startswith(part)]
    assert is_said(quote, installed(library))


def installed(library: str) -> list[str]:
    package, patterns = LIBRARIES[library]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(found.origin).parent
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    assert files
    return messages(files)


def test_there_are_at_least_thirty_symptoms() -> None:
    assert sum(len(rows(section)) for section in re.findall(r"^## (.+)$", TEXT, re.MULTILINE)) >= 30


def test_every_symptom_has_a_cause_and_a_remedy() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    assert [line for line in lines if len([cell for cell in line.strip("| ").split(" | ") if cell.strip()]) != 3] == []
